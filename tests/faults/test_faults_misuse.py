"""Ranks that call different things: all of them raise Mismatch soon, with both sides named."""

import time

import pytest
import torch
from faults import memory_of_this_process, my_rank, suffer, wait_for_file
from faults_model import model_and_step
from marks import mostly_nightly
from pool import run_on_ranks

import syncengine


def all_reduce(count=100, dtype=torch.float32, op="sum", **how):
    return syncengine.all_reduce(torch.ones(count, dtype=dtype), op, **how)


# What rank 1 calls where the others call all_reduce(sum, float32, 100 elements), and its name in the error.
OTHER_CALLS = {
    "shape": (lambda: all_reduce(count=99), "all_reduce(sum, float32, 99 elements)"),
    "shape of the same size": (
        lambda: syncengine.all_reduce(torch.ones(10, 10)),
        "all_reduce(sum, float32, 100 elements) with another layout",
    ),
    "dtype": (lambda: all_reduce(dtype=torch.float64), "all_reduce(sum, float64, 100 elements)"),
    "dtype of the same size": (lambda: all_reduce(dtype=torch.int32), "all_reduce(sum, int32, 100 elements)"),
    "op": (lambda: all_reduce(op="max"), "all_reduce(max, float32, 100 elements)"),
    "avg": (lambda: all_reduce(op="avg"), "all_reduce(avg, float32, 100 elements)"),
    "barrier": (syncengine.barrier, "barrier"),
    "broadcast": (lambda: syncengine.broadcast(torch.ones(100), 0), "broadcast(from rank 0 of the group, float32, 100"),
    "reduce_scatter": (
        lambda: syncengine.reduce_scatter(torch.ones(10), torch.ones(10 * syncengine.world_size())),
        "reduce_scatter(sum, float32, 10 elements)",
    ),
    "all_gather": (
        lambda: syncengine.all_gather(torch.ones(10 * syncengine.world_size()), torch.ones(10)),
        "all_gather(float32, 10 elements)",
    ),
    "split": (lambda: syncengine.default_communicator().split([1]), "Communicator.split()"),
    "asynchronous": (lambda: all_reduce(count=99, async_op=True).wait(), "all_reduce(sum, float32, 99 elements)"),
}


@pytest.mark.parametrize(
    ("name", "world"), [*((name, 3) for name in OTHER_CALLS), *mostly_nightly([("shape", 2), ("shape", 8)], 0)]
)
@run_on_ranks(settings=None)
def test_another_call(name, world):
    def body(step):
        syncengine.barrier()
        step()
        OTHER_CALLS[name][0]() if my_rank() == 1 else all_reduce()

    outcome = suffer(body, timeout=100.0)
    outcome.check("Mismatch", "rank 1", "all_reduce(sum, float32, 100 elements)", soon=True)
    if name != "split":  # told by the other side, it is an all_gather
        assert OTHER_CALLS[name][1] in outcome.text


@run_on_ranks(world=2, settings=None)
def test_another_layout_of_the_same_elements():
    def body(step):
        matrix = torch.ones(20, 30)
        syncengine.all_reduce(matrix.t() if my_rank() == 1 else matrix)

    suffer(body, timeout=100.0).check("Mismatch", "layout")


@run_on_ranks(world=2, settings=None)
def test_another_order():
    def body(step):
        sizes = [100, 200] if my_rank() == 0 else [200, 100]
        works = [all_reduce(count=size, async_op=True) for size in sizes]
        step()
        for work in works:
            work.wait()

    suffer(body, timeout=100.0).check("Mismatch", "all_reduce(sum, float32, 100", "all_reduce(sum, float32, 200")


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("world", mostly_nightly([2, 3, 8], 1))
@run_on_ranks(settings=None)
def test_leaving_while_others_wait(world, trains):
    """The last rank makes one call less, or one backward."""

    def body(step):
        call = model_and_step()[1] if trains else all_reduce
        call()
        step()
        if my_rank() != world - 1:
            call()

    outcome = suffer(body, timeout=100.0)
    if my_rank() == world - 1:
        outcome.check()
    else:
        outcome.check("PeerLost", f"rank {world - 1} has left (it exited or called syncengine.shutdown())", soon=True)


@pytest.mark.parametrize("in_arena", [False, True])
@run_on_ranks(world=2, settings=None)
def test_shutdown_while_work_is_pending(in_arena, tmp_path):
    has_left = tmp_path / "has left"

    def body(step):
        tensor = syncengine.empty(500_000).fill_(1.0) if in_arena else torch.ones(500_000)
        syncengine.barrier()
        if my_rank() == 0:
            work = syncengine.all_reduce(tensor, async_op=True)
            syncengine.shutdown()
            has_left.touch()
            step()
            work.wait()
        else:
            wait_for_file(has_left)
            step()
            syncengine.all_reduce(tensor)

    outcome = suffer(body, timeout=100.0)
    if my_rank() == 0:
        outcome.check("InvalidUsage", "closed")
    else:
        outcome.check("PeerLost", "rank 0 has left", soon=True)


@run_on_ranks(world=2, settings=None)
def test_abandoned_work_ends():
    """Nobody keeps the Work or the tensor: the engine alone holds the memory, and Python may hold the GIL meanwhile."""

    def body(step):
        for _ in range(50):
            syncengine.all_reduce(torch.ones(10_000), async_op=True)
            sum(range(5_000))
        syncengine.barrier()
        return syncengine.default_communicator().counters()["operations"]

    outcome = suffer(body, timeout=100.0)
    outcome.check()
    assert outcome.value == 51


@pytest.mark.parametrize(
    ("closing", "error", "text"), [(True, "PeerLost", "rank 0 has left"), (False, "Aborted", "enough")]
)
@run_on_ranks(settings=None)
def test_the_jobs_end_reaches_its_splits(closing, error, text):
    def body(step):
        world = syncengine.default_communicator()
        pair = world.split([0, 1])
        pair.barrier()
        if my_rank() == 0:
            syncengine.shutdown() if closing else world.abort("rank 0: enough")
            return
        step()
        pair.barrier()

    outcome = suffer(body, timeout=100.0)
    if my_rank() == 1:
        outcome.check(error, text, soon=True)


@pytest.mark.parametrize("where", ["elsewhere", "same tensor", "same pages"])
@run_on_ranks(world=2, settings=None)
def test_a_failure_next_door_is_harmless_or_told(where):
    """Rank 0 has told its peers in `a` where its tensor lies when `b` fails in the middle of an operation."""

    def body(step):
        world = syncengine.default_communicator()
        a, b = world.split([0, 1]), world.split([0, 1])
        memory = syncengine.empty(2, 102_400).fill_(1.0)  # 100 pages each
        theirs = {"same pages": memory[0, 1:], "same tensor": memory[1], "elsewhere": syncengine.empty(102_400)}[where]
        mine = memory[0, :-1] if where == "same pages" else memory[0]
        world.barrier()
        if my_rank() == 0:
            work = a.all_reduce(mine, async_op=True)
            b.all_reduce(theirs, async_op=True)
            time.sleep(0.1)
            b.abort("rank 0: enough")
            world.barrier()
            work.wait()
        else:
            world.barrier()
            a.all_reduce(mine)
        return mine[0].item(), mine[-1].item()

    outcome = suffer(body, timeout=100.0)
    if where == "same pages":  # cut loose from the peers: `a` can't go on, and must not pretend to
        assert (outcome.error, outcome.text, outcome.left) == ("Aborted", "rank 0: enough", [])
    else:
        assert (outcome.error, outcome.value, outcome.left) == ("", (2.0, 2.0), [])


@pytest.mark.thorough
@run_on_ranks(settings=None)
def test_memory_that_a_failure_has_detached_is_given_back():
    count = 2**24

    def body(step):
        world = syncengine.default_communicator()
        used = []
        for _ in range(5):
            pair = world.split([0, 1])
            tensor = syncengine.empty(count).fill_(1.0)
            if my_rank() == 0:
                work = pair.all_reduce(tensor[: count // 2], async_op=True)
                world.barrier()
                pair.abort("rank 0: enough")
                with pytest.raises(syncengine.errors.Aborted):
                    work.wait()
                tensor.fill_(2.0)
                del work
            else:
                world.barrier()
            world.barrier()
            del pair, tensor
            world.barrier()
            used.append(memory_of_this_process("Pss"))
        return used[-1] - used[0]

    outcome = suffer(body, timeout=100.0)
    outcome.check()
    assert outcome.value < 4 * count, "it grows with each failure"


@run_on_ranks(world=2)
def test_a_long_text_is_cut_not_lost():
    if my_rank() == 0:
        syncengine.default_communicator().abort("x" + "é" * 2000)
    with pytest.raises(syncengine.errors.Aborted, match="^x" + "é" * 500):
        syncengine.barrier()
