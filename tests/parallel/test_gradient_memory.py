"""Where autograd's gradients lie changes how bytes move, never the bits."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from faults import in_child, memory_of_this_process, wait_for_file
from marks import mostly_nightly
from models import workload
from models.workload import train as train_workload
from parallel_models import Mlp, Run, train
from pool import RankPool, run_on_ranks
from raising_model import InBackward
from random_layers import Layer
from torch import nn

import syncengine

PAGE = os.sysconf("SC_PAGE_SIZE")


def train_all() -> tuple[list[list[bytes]], dict[str, int]]:
    runs = [Run("mlp"), Run("mlp", accumulate=2), Run("mlp", set_to_none=False), Run("tied"), Run("conv")]
    runs += [Run("mixed", dtype=None), Run("mlp", dtype=torch.bfloat16), Run("mlp", options=(("bucket_cap_mb", 0.1),))]
    results = [train(syncengine.Parallel, run) for run in runs]
    results.append(train_workload(syncengine.Parallel, workload("gpt")).gradients)
    bits = [[t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in result] for result in results]
    return bits, syncengine.default_communicator().counters()


@pytest.mark.nightly
@pytest.mark.parametrize("world", mostly_nightly([2, 3, 4], 1))
def test_bits_are_those_of_the_staged_way(pool: RankPool, world: int):
    ways = ({"gradient_memory": "torch"}, {"gradient_memory": "arena"})
    expected, found = (pool.run(train_all, world=world, settings=way) for way in ways)
    assert [bits for bits, _ in found] == [bits for bits, _ in expected]
    for (_, before), (_, after) in zip(expected, found, strict=True):
        assert after["direct_bytes"] - before["direct_bytes"] > 55e6  # of 83e6 that these runs reduce


@run_on_ranks()
def test_no_large_gradient_is_copied_or_staged():
    model = syncengine.Parallel(Mlp())
    for _ in range(3):
        model.zero_grad()  # all gradients are made anew
        before = syncengine.default_communicator().counters()
        model(torch.randn(3, 24)).sum().backward()
    after = syncengine.default_communicator().counters()
    direct, staged, at_once = (after[n] - before[n] for n in ("direct_bytes", "staged_bytes", "one_shot_bytes"))
    small = sum(p.nbytes for p in model.parameters() if p.nbytes < PAGE)
    assert staged + at_once + model.sync_stats()["copied_bytes"]["small"] <= small
    assert direct >= model.sync_stats()["reduced_bytes"] - small


@pytest.mark.parametrize("gradient_memory", mostly_nightly(["arena", "torch"], 0))
@run_on_ranks(settings=None)
def test_gradients_outlive_the_communicator(gradient_memory: str):
    """And so do children that were forked meanwhile."""
    syncengine.init(gradient_memory=gradient_memory, timeout=60.0)
    model, x = syncengine.Parallel(Mlp()), torch.randn(3, 24)
    model(x).sum().backward()
    kept = [(p.grad, p.grad.clone()) for p in model.parameters()]
    tensor = syncengine.empty(1000).fill_(3.0)
    gc.collect()  # here: in the child a group of Gloo's, of an earlier test, would wait for threads

    def child() -> bool:
        nonlocal kept, model
        same = all(torch.equal(grad, copy) for grad, copy in kept)
        kept[0][0].zero_()
        del kept, model
        gc.collect()
        return same

    assert in_child(child) == (0, "True")
    model.zero_grad()
    del model
    syncengine.shutdown()
    gc.collect()
    assert all(torch.equal(grad, copy) and torch.equal(grad.add_(1), copy + 1) for grad, copy in kept)
    assert tensor.sum() == 3000
    syncengine.init(timeout=60.0)
    syncengine.Parallel(Mlp())(x).sum().backward()
    del kept
    gc.collect()
    assert torch.ones(10000).sum() == 10000


def in_arena(tensor: torch.Tensor) -> bool:
    """Whether the kernel says that this memory is one of our arenas."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "memfd:" in line
    return False


@run_on_ranks()
def test_only_gradients_lie_in_the_arena():
    """Neither what the forward makes, nor temporaries of backward, nor anything after it or on another thread."""
    seen: dict[str, torch.Tensor] = {}
    model = syncengine.Parallel(nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 64)))
    same_size, x = model.module[0].weight.shape, torch.randn(50, 64)

    def look(grad: torch.Tensor) -> None:
        seen["temporary"] = grad  # [50, 300]: no parameter's size
        with ThreadPoolExecutor(1) as thread:
            seen["other"] = thread.submit(torch.empty, same_size).result()

    for _ in range(2):
        seen["forward"] = model.module[0](x)
        seen["output"] = output = model(x)
        model.module[1].register_full_backward_hook(lambda m, grads, _: look(grads[0]))
        output.square().sum().backward()
        seen["after"] = torch.empty(same_size)
        assert all(in_arena(p.grad) == (p.nbytes >= PAGE) for p in model.parameters())
        assert not any(map(in_arena, seen.values())), {name: in_arena(t) for name, t in seen.items()}
        model.zero_grad()
    with model.no_sync():
        model(x).square().sum().backward()
    assert all(in_arena(p.grad) == (p.nbytes >= PAGE) for p in model.parameters())  # later ones add to it
    assert not in_arena(torch.empty(same_size))


@run_on_ranks(spawned=True)
def test_a_failed_backward_leaves_the_allocator_as_it_was(tmp_path: Path):
    model = syncengine.Parallel(nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 64)))
    (tmp_path / f"made {syncengine.rank()}").touch()
    wait_for_file(tmp_path / f"made {1 - syncengine.rank()}")  # else the other's failure may end its construction
    with pytest.raises(ZeroDivisionError):
        model(InBackward.apply(torch.randn(5, 64, requires_grad=True), lambda: 1 // 0)).sum().backward()
    assert not in_arena(torch.empty(300, 64))
    assert all(p.grad is None for p in model.parameters())


@run_on_ranks()
def test_the_profiler_sees_gradients():
    model = syncengine.Parallel(nn.Linear(512, 512))
    x = torch.ones(1, 512)
    with torch.profiler.profile(profile_memory=True) as profile:
        model(x).sum().backward()
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.events()) >= 4 * 512 * 512


@pytest.mark.parametrize("gradients_outlive_it", [False, True])
@run_on_ranks(spawned=True)  # without models of other tests
def test_memory_goes_with_the_model(gradients_outlive_it: bool):
    """The arena's: before a model of 4 MiB, with its gradients, and after these have gone."""
    syncengine.barrier()
    before = memory_of_this_process("Pss_Shmem")
    model = syncengine.Parallel(nn.Linear(1024, 1024, bias=False))
    for _ in range(6):
        model.zero_grad()
        model(torch.ones(2, 1024)).sum().backward()
    syncengine.barrier()
    during = memory_of_this_process("Pss_Shmem")
    syncengine.barrier()
    gradients = [p.grad for p in model.parameters()] if gradients_outlive_it else []
    model.zero_grad()
    del model
    gc.collect()
    del gradients
    syncengine.barrier()
    deadline = time.monotonic() + 60
    while (after := memory_of_this_process("Pss_Shmem")) - before >= 2**20 and time.monotonic() < deadline:
        time.sleep(0.01)  # the engine's thread may be the one that drops the last reference
    syncengine.barrier()  # what a rank shares with one that has ended would count in full
    assert 4 * 2**20 <= during - before < 9 * 2**20  # one gradient, or the two that follow each other
    assert after - before < 2**20


class Convolving(torch.autograd.Function):
    """Its backward makes temporaries of the gradient's size, before the gradient, as a convolution, or after it."""

    temporaries_first = True
    in_arena: ClassVar[list[bool]] = []  # of each temporary

    @staticmethod
    def forward(ctx: object, weight: torch.Tensor) -> torch.Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        def scratch() -> list[torch.Tensor]:
            temporaries = [torch.ones(512, 512) for _ in range(2)]
            Convolving.in_arena += map(in_arena, temporaries)
            return temporaries[1:]

        held = scratch() if Convolving.temporaries_first else []
        result = torch.full((512, 512), syncengine.rank() + 1.0)
        if not held:
            scratch()
        return result


def step(model: nn.Module, backwards: int = 1) -> tuple[list[bool], bool]:
    """Where the temporaries and the gradient lay, in the last of so many backwards that add to one gradient."""
    if backwards == 1:
        model.zero_grad()
    Convolving.in_arena.clear()
    model().backward()
    grad = model.module.weight.grad
    assert torch.equal(grad, torch.full_like(grad, 1.5 * backwards))
    return Convolving.in_arena.copy(), in_arena(grad)


@run_on_ranks()
def test_temporaries_of_a_gradients_size_stay_out_once_they_are_known():
    temporaries_out, all_in = ([False, False], True), ([True, True], True)
    Convolving.temporaries_first = True
    weight = nn.Parameter(torch.zeros(512, 512))
    model = syncengine.Parallel(Layer(lambda self: Convolving.apply(self.weight), weight=weight))
    syncengine.barrier()
    before = memory_of_this_process("Pss_Shmem")
    assert [step(model) for _ in range(4)] == [all_in] + [temporaries_out] * 3
    syncengine.barrier()
    growth = memory_of_this_process("Pss_Shmem") - before
    syncengine.barrier()
    assert growth < 1.75 * 2**20  # the gradient is of 1 MiB, each temporary, too
    # Backwards that accumulate make no gradient, only temporaries; each learns for its own kind.
    assert [step(model, backwards) for backwards in (2, 3)] == [all_in, temporaries_out]
    assert [step(model) for _ in range(2)] == [temporaries_out] * 2
    # Another order: a wrong guess costs one staged gradient, and is forgotten. After the third, nothing is guessed.
    for first, then in ((False, [all_in, temporaries_out]), (True, [all_in, temporaries_out]), (False, [all_in] * 3)):
        Convolving.temporaries_first = first
        assert not step(model)[1]
        assert [step(model) for _ in then] == then


def staged_of_a_step(rows: int, given: bool = False) -> tuple[dict[str, int], str]:
    """Bytes by reason, and the shortage. `given`: the gradient's memory is of the user's choice."""
    model = syncengine.Parallel(nn.Linear(1024, rows, bias=False))
    model.module.weight.grad = torch.zeros(rows, 1024) if given else None
    model(torch.ones(1, 1024)).sum().backward()
    statistics = model.sync_stats()
    assert statistics["reduced_bytes"] == 4096 * rows
    staged = {reason: size for reason, size in statistics["staged_bytes"].items() if size}
    assert "numerics" in staged or in_arena(model.module.weight.grad) == (not staged)
    return staged, statistics["shortage"]


def test_the_reason_for_staging_is_told(pool: RankPool):
    arena = {"SYNCENGINE_ARENA_BYTES": str(64 * 2**20)}  # half of it for gradients
    for staged, shortage in pool.run(staged_of_a_step, 9 * 1024, settings=None, environ=arena):
        assert staged == {"shortage": 36 * 2**20}
        assert "SYNCENGINE_ARENA_BYTES" in shortage
        assert str(36 * 2**20) in shortage
    for staged, settings, environ, given in [
        ({}, {}, {}, False),
        ({"setting": 2**22}, {"gradient_memory": "torch"}, {}, False),
        ({"setting": 2**22}, {}, {"SYNCENGINE_GRADIENT_MEMORY": "torch"}, False),
        ({"numerics": 2**22}, {"numerics": "ring"}, {}, False),
        ({"elsewhere": 2**22}, {}, {}, True),
    ]:
        assert pool.run(staged_of_a_step, 1024, given, settings=settings, environ=environ) == [(staged, "")] * 2
