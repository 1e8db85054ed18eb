"""Device memory of processes: ``shutdown()`` gives all of it back; where there is too little, all ranks hear of it."""

import functools
import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cuda_ranks import SOFTWARE, alone, marked, run_processes
from cuda_training import on_gpus
from torch import nn

import syncengine
from syncengine.errors import SyncError

MIB = 1 << 20

# ---- what comes back ----


def free_memory() -> int:
    """Of the device, between what its ranks do."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    free = torch.cuda.mem_get_info()[0]
    dist.barrier()
    return free


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """With 64 MiB in buckets."""
    model = syncengine.Parallel(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        model(torch.ones(2, 2048, device="cuda")).sum().backward()
        optimizer.step()
    return model, optimizer


def trains(drops_first: bool) -> None:
    """With a model, 32 MiB in a tensor that peers reach, and two groups' staging, of 48 each."""
    syncengine.init(timeout=60.0)
    model, optimizer = trained()
    tensor = syncengine.empty(8 * MIB, device="cuda").zero_()
    syncengine.all_reduce(tensor)
    torch.cuda.synchronize()
    if drops_first:
        del model, optimizer, tensor
    syncengine.shutdown()


@alone
@on_gpus(in_job=False)
@pytest.mark.parametrize("world", [2, 3])
def test_shutdown_gives_all_memory_back(rank: int, world: int):
    dist.init_process_group("gloo")
    trains(False)  # loads kernels, which stay
    before = free_memory()
    kept = []  # MiB that are not free any more
    for drops_first in (False, True, False):
        trains(drops_first)
        kept.append((before - free_memory()) // MIB)
    assert max(kept) < 8, kept


@alone
@on_gpus(in_job=False)
def test_a_model_that_is_gone_leaves_its_memory_to_the_next(rank: int):
    dist.init_process_group("gloo")
    syncengine.init(timeout=60.0)
    free = []
    for _ in range(5):
        trained()
        free.append(free_memory() // MIB)
    syncengine.shutdown()
    kept = [free[1] - behind for behind in free[2:]]  # MiB less than behind two, as one is there while the next is made
    assert max(kept) < 8, kept


# ---- what there is too little of ----

WANTED = 512 * MIB + 256  # bytes, by each of these


def for_buckets() -> Callable[[], object]:
    model = syncengine.Parallel(nn.Linear(4096, 32768, bias=False).cuda())
    x = torch.ones(1, 4096, device="cuda")
    return lambda: model(x).sum().backward()


def for_a_tensor() -> Callable[[], object]:
    syncengine.barrier(device=torch.device("cuda"))  # connects
    return lambda: syncengine.empty(WANTED, dtype=torch.uint8, device="cuda")


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except SyncError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def runs_out(rank: int, prepare: Callable[[], Callable[[], object]]) -> tuple[str, str]:
    """What is said where rank 0's device has too little memory, and what the next call says, with enough of it."""
    syncengine.init(timeout=60.0)
    ask = prepare()
    syncengine.barrier()  # all have what they need before
    left = torch.cuda.mem_get_info()[0] - 300 * MIB
    hog = torch.empty(left if rank == 0 else 0, dtype=torch.uint8, device="cuda")

    def asks_when_it_is_taken() -> None:
        syncengine.barrier()  # a fault of rank 0, which may be out of it first, can end it for rank 1
        ask()

    said = outcome(asks_when_it_is_taken)
    del hog
    return said, outcome(syncengine.barrier)


@alone
@marked
@pytest.mark.parametrize("prepare", [for_buckets, for_a_tensor])
@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_too_little_memory_fails_the_communicator(hosts: str, prepare: Callable[[], Callable[[], object]]):
    lacks = [f"CUDA: device {rank % torch.cuda.device_count()} has no memory for {WANTED} bytes" for rank in range(2)]
    own = [f"InvalidUsage: {text}" for text in lacks]
    told = [f"Aborted: rank {rank}: {text}" for rank, text in enumerate(lacks)]
    possible = [(own[0], told[0])]
    if hosts == "ab":  # nobody waits for others there to take memory
        possible.append((own[0], "no error"))
    if not SOFTWARE and torch.cuda.device_count() == 1:  # rank 1 has no more memory than rank 0
        possible += [(own[0], own[1]), (told[1], own[1])]
    outcomes = run_processes(2, functools.partial(runs_out, prepare=prepare), hosts=hosts)
    said = [said for said, _ in outcomes]
    assert any(all(map(str.startswith, said, texts)) for texts in possible), outcomes
    assert all(then.startswith(tuple(told)) for _, then in outcomes), outcomes
