"""The default communicator: init, shutdown, settings, what peers learn of an uncaught error, and the thin functions."""

import itertools
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pool import run_on_ranks

import syncengine
from syncengine.errors import InvalidUsage, SyncError

# ---- one rank, in this process ----


@pytest.fixture
def alone(monkeypatch):
    """An environment without launcher, and no communicator before or after."""
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    syncengine.shutdown()


def test_before_init_everything_says_what_to_do():
    for call in (syncengine.rank, syncengine.world_size, syncengine.local_rank, syncengine.barrier):
        with pytest.raises(InvalidUsage, match=r"call syncengine\.init\(\) first"):
            call()
    assert not syncengine.is_initialized()
    syncengine.shutdown()


def test_one_process_is_a_world_of_one(alone):
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    communicator = syncengine.init()
    assert syncengine.default_communicator() is communicator
    assert (syncengine.rank(), syncengine.world_size(), syncengine.local_rank()) == (0, 1, 0)
    tensor = syncengine.empty(2, 3)
    tensor.fill_(3.0)
    syncengine.all_reduce(tensor, "avg")
    assert torch.equal(tensor, torch.full((2, 3), 3.0))
    assert len(os.listdir("/proc/self/task")) == threads  # noqa: PTH208


def test_init_again_is_the_same_communicator(alone):
    communicator = syncengine.init(gradient_memory="torch", numerics="ring")
    for asked in ({}, {"gradient_memory": "torch"}, {"numerics": "ring"}, {"timeout": communicator.timeout}):
        assert syncengine.init(**asked) is communicator
    with pytest.raises(InvalidUsage, match=r"numerics='rank_order'.* already has numerics='ring'"):
        syncengine.init(numerics="rank_order")
    with pytest.raises(InvalidUsage, match=r"timeout=7\.0.* already has timeout=1800\.0"):  # the default
        syncengine.init(timeout=7)
    syncengine.shutdown()
    assert syncengine.init(numerics="rank_order").numerics == "rank_order"


def test_bad_setting_leaves_nothing_initialised(alone):
    with pytest.raises(InvalidUsage, match="numerics='quick'"):
        syncengine.init(numerics="quick")
    assert not syncengine.is_initialized()


@pytest.mark.parametrize("sizes", [(2, 3), ([2, 3],), (torch.Size([2, 3]),)])
def test_empty_takes_sizes_as_torch_does(alone, sizes):
    syncengine.init()
    assert syncengine.empty(*sizes, dtype=torch.int64).shape == (2, 3)
    assert syncengine.empty(*sizes, dtype=torch.int64, device="cpu").dtype == torch.int64
    with pytest.raises(InvalidUsage, match="device='meta'"):
        syncengine.empty(*sizes, device="meta")


@pytest.mark.parametrize("sizes", [(2**61,), (2**32, 2**32), (2**62, 2)])
def test_empty_refuses_what_no_address_space_has_room_for(alone, sizes):
    syncengine.init()
    with pytest.raises(InvalidUsage, match="empty: no address space"):
        syncengine.empty(*sizes, dtype=torch.float64)


def elastic_with(patience: float) -> None:
    syncengine.elastic(lambda elastic: None, patience=patience, model=torch.nn.Linear(1, 1))


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan")])
def test_seconds_that_are_none_are_refused(alone, seconds):
    communicator = syncengine.init()
    work = communicator.all_reduce(torch.ones(1), async_op=True)
    for call in (work.wait, communicator.shrink, elastic_with):
        with pytest.raises(InvalidUsage, match="give seconds, more than 0"):
            call(seconds)
    work.wait()


# ---- several ranks ----


@run_on_ranks()
def test_work_on_strided_parameters():
    """Every second column of a leaf that requires a gradient, and two threads that wait for the same work."""
    parameter = torch.nn.Parameter(torch.full((4, 6), float(syncengine.rank())))
    work = syncengine.broadcast(parameter[:, ::2], 1, async_op=True)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: work.wait(), range(2)))
    assert parameter.grad_fn is None
    expected = torch.full((4, 6), float(syncengine.rank()))
    expected[:, ::2] = 1.0
    assert torch.equal(parameter.detach(), expected)


@run_on_ranks()
def test_endless_timeout_is_no_error():
    if syncengine.rank() == 1:
        time.sleep(0.3)  # the other one shall sleep, and look at the clock
    work = syncengine.all_reduce(torch.ones(5), async_op=True)
    work.wait(timeout=float("inf"))
    syncengine.barrier()


def init_with(settings_by_rank):
    settings = settings_by_rank[int(os.environ["RANK"])]
    try:
        return syncengine.init(timeout=20, **settings).numerics
    except SyncError as error:
        return f"{type(error).__name__}: {error}"


@run_on_ranks(settings=None)
def test_communicators_one_after_another():
    for _ in range(5):
        communicator = syncengine.init(timeout=20)
        communicator.all_reduce(tensor := torch.ones(3))
        assert tensor.tolist() == [2.0] * 3
        syncengine.shutdown()


def timeout_of_group():
    return syncengine.init().timeout


@run_on_ranks(spawned=True)
def test_forked_child_leaves_the_group_alone():
    """A child that ends, in order or by an error, says nothing to the parent's peers."""
    for status in (0, 1):
        child = os.fork()
        if child == 0:
            if status:
                raise ValueError("the child's own business")
            sys.exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    syncengine.all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [2.0] * 3


def test_settings_differ_between_ranks(pool):
    answers = pool.run(init_with, [{}, {"numerics": "ring"}, {}], world=3, settings=None)
    said = "Mismatch: rank 0 has numerics='rank_order', rank 1 has numerics='ring': give all ranks the same"
    assert answers == [said] * 3


def test_init_that_fails_on_one_rank_fails_on_all(pool):
    """An arena of one page is too small: the others learn it from that rank, not by a timeout."""
    answers = pool.run(init_with, [{}, {"arena_bytes": 4096}], settings=None)
    assert answers[1].startswith("InvalidUsage: ")
    assert answers[0] == f"Aborted: rank 1 failed in init: {answers[1]}"


def test_timeout_is_the_process_groups(pool):
    assert pool.run(timeout_of_group, settings=None, gloo=True) == [1800.0] * 2
    assert pool.run(timeout_of_group, settings=None, environ={"SYNCENGINE_TIMEOUT": "33"}) == [33.0] * 2


@run_on_ranks(world=3)
def test_output_and_input_may_share_memory() -> None:
    rank = syncengine.rank()
    for size in (4, 70_000):
        for begin in range(0, 2 * size + 1, size // 2):
            memory = torch.arange(3.0 * size) % 50 + rank
            given = [(torch.arange(3.0 * size) % 50 + r)[begin : begin + size] for r in range(3)]
            syncengine.all_gather(memory, memory[begin : begin + size])
            assert torch.equal(memory, torch.cat(given)), (size, begin)
            memory = torch.arange(3.0 * size) % 50 + rank
            total = sum(torch.arange(3.0 * size) % 50 + r for r in range(3))
            syncengine.reduce_scatter(memory[begin : begin + size], memory)
            assert torch.equal(memory[begin : begin + size], total.chunk(3)[rank]), (size, begin)
    with pytest.raises(InvalidUsage, match=r"all_reduce: several elements of a tensor .* the same memory"):
        syncengine.all_reduce(torch.ones(1).expand(3))


@run_on_ranks()
def test_tensors_whose_memory_holds_the_negative() -> None:
    rank = syncengine.rank()

    def mine() -> torch.Tensor:
        values = torch.full((5000,), 1.0 + rank)
        return torch._neg_view(-values) if rank == 0 else values  # as x.conj().imag is

    for call in (syncengine.all_reduce, lambda tensor: syncengine.broadcast(tensor, 0)):
        tensor = mine()
        call(tensor)
        assert tensor.unique().tolist() == [3.0 if call is syncengine.all_reduce else 1.0]
    memory = torch.empty(10_000)
    everyone = torch._neg_view(memory) if rank else memory
    syncengine.all_gather(everyone, mine())
    assert everyone.view(2, 5000).unique(dim=1).tolist() == [[1.0], [2.0]]


def with_gaps(value: float, *shape: int) -> torch.Tensor:
    """Every second column is the tensor's: it goes through a copy."""
    return torch.full((*shape[:-1], 2 * shape[-1]), float(value))[..., ::2]


def on_tensors_with_gaps(**options: bool) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """One call of each kind on 2 ranks: what it returned, its target, what that will be."""
    rank = syncengine.rank()
    one, whole, part = torch.full((2, 3), rank + 1.0), torch.full((4, 3), rank + 1.0), torch.ones(2, 3)
    calls: list[tuple[Callable[[torch.Tensor], Any], torch.Tensor, torch.Tensor]] = [
        (lambda target: syncengine.all_reduce(target, **options), with_gaps(rank + 1.0, 2, 3), part * 3),
        (lambda target: syncengine.broadcast(target, 1, **options), with_gaps(rank, 2, 3), part),
        (lambda target: syncengine.all_gather(target, one, **options), with_gaps(0, 4, 3), torch.cat([part, part * 2])),
        (lambda target: syncengine.reduce_scatter(target, whole, **options), with_gaps(0, 2, 3), part * 3),
    ]
    return [(call(target), target, expected) for call, target, expected in calls]


@run_on_ranks()
def test_inference_tensors_with_gaps_are_written_in_any_mode() -> None:
    with torch.inference_mode():
        made = [with_gaps(syncengine.rank() + 1.0, 2, 3) for _ in range(3)]
        works = on_tensors_with_gaps(async_op=True)
    for work, target, expected in works:  # begun in inference mode
        assert target.is_inference()
        work.wait()
        assert torch.equal(target, expected)
    syncengine.all_reduce(made[0])
    syncengine.all_reduce(made[1], async_op=True).wait()
    work = syncengine.all_reduce(made[2], async_op=True)
    works = on_tensors_with_gaps(async_op=True)
    with torch.inference_mode():
        for other, target, expected in works:  # begun outside of it
            assert not target.is_inference()
            other.wait()
            assert torch.equal(target, expected)
        work.wait()
    assert all(torch.equal(target, torch.full((2, 3), 3.0)) for target in made)


@run_on_ranks()
def test_autograd_sees_that_tensors_with_gaps_are_written() -> None:
    for async_op in (False, True):
        weight = torch.ones(2, 3, requires_grad=True)
        value = with_gaps(2.0, 2, 3)
        product = (weight * value).sum()
        work = syncengine.all_reduce(value, async_op=async_op)
        if work:
            work.wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.parametrize("world", [2, 3])
@run_on_ranks()
def test_a_call_follows_those_in_flight_on_the_same_memory(world: int) -> None:
    """Of two asynchronous calls on the same memory the second follows the first, whichever goes through a copy."""
    columns: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda t: t[:, ::2], lambda t: t, lambda t: t[:, 1::2]]
    for first, second in itertools.product(columns, repeat=2):
        for dropped in (False, True):
            tensor, expected = torch.ones(400, 6), torch.ones(400, 6)
            work = syncengine.all_reduce(first(tensor), async_op=True)
            if dropped:
                del work
            last = syncengine.all_reduce(second(tensor), async_op=True)
            last.wait()
            if not dropped:
                work.wait()
            for view in (first, second):
                view(expected).mul_(world)
            assert torch.equal(tensor, expected), dropped


@run_on_ranks()
def test_an_input_that_overlaps_the_output_is_copied_behind_the_calls_in_flight() -> None:
    memory = torch.full((4 << 20,), syncengine.rank() + 1.0)  # a broadcast of so much takes milliseconds
    syncengine.broadcast(memory, 1, async_op=True)
    syncengine.all_gather(memory[-20:-4], memory[-8:])
    assert memory.unique().tolist() == [2.0]
