"""Forked children of a rank (DataLoader workers, say): kept out of shared memory, and harmless to the job."""

import os
import signal

import pytest
import torch
from faults import ended, in_child, memory_of_this_process, my_rank
from pool import run_on_ranks
from torch.utils.data import DataLoader, TensorDataset

import syncengine
from syncengine.errors import InvalidUsage


@run_on_ranks(world=2)
def test_child_may_not_use_the_engine():
    communicator = syncengine.default_communicator()
    tensor = torch.ones(8)
    communicator.all_reduce(torch.ones(8), async_op=True).wait()

    def child():
        calls = {
            "all_reduce": lambda: syncengine.all_reduce(tensor),
            "async": lambda: syncengine.all_reduce(tensor, async_op=True),
            "barrier": communicator.barrier,
            "split": lambda: communicator.split([communicator.rank]),
            "empty": lambda: syncengine.empty(8),
            "counters": communicator.counters,
            "init": syncengine.init,
            "Parallel": lambda: syncengine.Parallel(torch.nn.Linear(2, 2)),
        }
        for name, call in calls.items():
            with pytest.raises(InvalidUsage, match="forked child"):
                call()
                print(name)
        communicator.abort("from a child")  # no effect, and no error: a handler may call it
        communicator.close()
        syncengine.shutdown()
        return "all refused"

    answers = [in_child(child)]
    for _ in range(3):
        syncengine.all_reduce(tensor)
    assert tensor[0] == syncengine.world_size() ** 3
    assert answers == [(0, "all refused")]


@run_on_ranks(world=2)
def test_childs_writes_stay_in_the_child():
    mine, freed = syncengine.empty(300_000), syncengine.empty(300_000)
    mine.fill_(my_rank() + 1.0)
    del freed

    def child():
        assert mine[0] == mine[-1] == my_rank() + 1.0, "the child must see what was there"
        mine.fill_(99.0)
        assert mine.sum() == 99.0 * 300_000
        return "written"

    answer = in_child(child)
    untouched = bool((mine == my_rank() + 1.0).all())
    syncengine.all_reduce(mine)
    assert (answer, untouched, mine[0].item(), mine[-1].item()) == ((0, "written"), True, 3.0, 3.0)


@run_on_ranks()
def test_children_that_come_and_go():
    """By exit and by SIGKILL, while collectives are running."""
    tensor = syncengine.empty(500_000)
    ordinary = torch.empty(100_000)
    for round in range(4):
        tensor.fill_(1.0)
        ordinary.fill_(1.0)
        works = [syncengine.all_reduce(t, async_op=True) for t in (tensor, ordinary)]
        pid = os.fork()
        if pid == 0:
            if round % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        os.waitpid(pid, 0)
        for work in works:
            work.wait()
        assert tensor[0] == tensor[-1] == ordinary[0] == ordinary[-1] == syncengine.world_size()


def load_data() -> float:
    """Worker processes read ordinary memory and the arena, while the engine works."""
    data = syncengine.empty(64, 4)
    data.copy_(torch.arange(256.0).reshape(64, 4))
    total = torch.zeros(1)
    for memory in (data, data.clone()):
        loader = DataLoader(TensorDataset(memory), batch_size=8, num_workers=2, multiprocessing_context="fork")
        for (batch,) in loader:
            part = batch.sum().reshape(1)
            syncengine.all_reduce(part)
            total += part
    syncengine.barrier()
    return total.item()


def test_data_loader_with_forked_workers(pool):
    expected = 2 * 2 * torch.arange(256.0).sum().item()
    assert [total for total, _ in ended(pool, load_data)] == [expected] * 2


def memory_of_a_child() -> tuple[int, str]:
    """What a child has more than its parent, whose gradients it has read."""
    model = syncengine.Parallel(torch.nn.Linear(2048, 2048, bias=False))  # gradients of 16 MiB
    model(torch.ones(1, 2048)).sum().backward()
    gradient = model.module.weight.grad
    mean = gradient.mean().item()
    before = memory_of_this_process("Anonymous")

    def child() -> int:
        assert gradient.mean().item() == mean
        return memory_of_this_process("Anonymous") - before

    answer = in_child(child)
    syncengine.barrier()
    return answer


def test_children_take_no_memory_for_gradients(pool):
    for (code, taken), _ in ended(pool, memory_of_a_child):
        assert code == 0
        assert int(taken) < 4 * 2**20
