"""The torch.distributed backend "syncengine": results that go through copies, and who puts them into their tensors."""

import gc
import itertools
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool, run_on_ranks
from torch.distributed import ReduceOp
from torch_backend_values import equal, ours


def through_copies(group: dist.ProcessGroup, **options: Any) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """One call of each kind whose result goes through a copy: what it returned, its target, what that will be."""
    rank = dist.get_rank()
    bits = torch.tensor([1 << rank])
    average = torch.tensor([3 + 2 * rank, 7])
    eighths = torch.tensor([1.0 + rank]).to(torch.float8_e5m2)
    scaled = torch.full((3,), 2.0 + rank)
    strided = torch.full((3, 2), rank + 1.0).t()
    shared = torch.zeros(5)
    sizes = [torch.zeros(1), torch.zeros(2, 2).t()]
    part = torch.zeros(2, dtype=torch.int64)
    reduced = partial(dist.all_reduce, group=group, **options)
    gathered = partial(dist.all_gather, group=group, **options)
    scattered = partial(dist.reduce_scatter_tensor, group=group, **options)
    return [
        (reduced(bits, ReduceOp.BOR), bits, torch.tensor([3])),
        (reduced(average, ReduceOp.AVG), average, torch.tensor([4, 7])),
        (reduced(eighths, ReduceOp.SUM), eighths, torch.tensor([3.0]).to(eighths.dtype)),
        (reduced(scaled, dist._make_nccl_premul_sum(0.5)), scaled, torch.full((3,), 2.5)),
        (reduced(strided), strided, torch.full((2, 3), 3.0)),
        (gathered([shared[:3], shared[2:]], torch.full((3,), rank + 1.0)), shared, torch.tensor([1.0, 1, 2, 2, 2])),
        (gathered(sizes, [torch.ones(1), torch.ones(2, 2)][rank]), sizes[1], torch.ones(2, 2)),
        (scattered(part, torch.full((4,), 1 << rank), ReduceOp.BXOR), part, torch.tensor([3, 3])),
    ]


def missing(calls: list[tuple[Any, torch.Tensor, torch.Tensor]]) -> list[int]:
    """Whose results are not there."""
    return [i for i, (_, target, expected) in enumerate(calls) if not equal(target, expected)]


def operations(group: dist.ProcessGroup) -> int:
    return group._get_backend(torch.device("cpu")).communicator.counters()["operations"]


def dropped(group: dist.ProcessGroup) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    return [(None, target, expected) for _, target, expected in through_copies(group, async_op=True)]


@run_on_ranks(gloo=True, settings=None)
def test_the_result_of_a_work_that_was_dropped_is_there_after_the_next_call() -> None:
    group = ours()
    backend = group._get_backend(torch.device("cpu"))

    def look() -> None:
        work = dist.barrier(group, async_op=True)
        while not work.is_completed():
            pass

    for call in (
        lambda: dist.barrier(group),
        lambda: dist.barrier(group, async_op=True).wait(),
        lambda: dist.barrier(group, async_op=True).get_future().wait(),
        look,
        backend.monitored_barrier,
    ):
        calls = dropped(group)
        call()
        assert missing(calls) == []
    backend._start_coalescing()
    calls = dropped(group)
    backend._end_coalescing()
    dist.barrier(group)
    assert missing(calls) == []
    before = operations(group)
    calls = dropped(group)
    while operations(group) < before + len(calls) + 1:  # one of them is two operations
        time.sleep(0.001)
    dist.destroy_process_group(group)
    assert missing(calls) == []


@run_on_ranks(gloo=True, settings=None)
def test_works_are_delivered_once_and_kept_no_longer() -> None:
    group = ours()
    calls = through_copies(group, async_op=True)
    for work, target, expected in calls:
        work.wait()
        assert equal(target, expected)
        target.zero_()
    dist.barrier(group)
    for work, target, _ in calls:
        work.wait()
        assert equal(target, torch.zeros_like(target))
    tensor = torch.tensor([1, 2])
    for keep in (True, False):
        seen = weakref.ref(buffer := torch.tensor([1, 2]))
        work = dist.all_reduce(buffer, ReduceOp.BOR, group, async_op=True)
        if keep:
            work.wait()
        else:
            del work
            dist.barrier(group)
        work = None
        del buffer
        gc.collect()
        assert seen() is None
    for _ in range(100):  # nor does a program that waits for none of them collect them all
        dist.all_reduce(tensor, ReduceOp.BOR, group, async_op=True)
    dist.barrier(group)


@run_on_ranks(gloo=True, settings=None)
def test_inference_tensors_are_written_whoever_delivers() -> None:
    group = ours()
    with torch.inference_mode():
        late = through_copies(group, async_op=True)
        futures = through_copies(group, async_op=True)
        for work, _, _ in futures:
            work.get_future().wait()
        assert missing(futures) == []
    for work, target, _ in late:
        assert target.is_inference()
        work.wait()
    assert missing(late) == []
    with torch.inference_mode():
        bits, integers = torch.tensor([1 << dist.get_rank()]), torch.tensor([3, 5])
    dist.all_reduce(bits, ReduceOp.BOR, group)
    dist.all_reduce(integers, ReduceOp.AVG, group)
    assert bits.tolist() == [3]
    assert integers.tolist() == [3, 5]
    with torch.inference_mode():
        calls = dropped(group)
    dist.barrier(group)
    assert missing(calls) == []


@run_on_ranks(gloo=True, settings=None)
def test_autograd_sees_what_is_delivered() -> None:
    group = ours()
    weight = torch.ones(2, 3, requires_grad=True)
    value = (torch.full((3, 2), 2.0)).t()
    product = (weight * value).sum()
    before = value._version
    dist.all_reduce(value, group=group)  # through a copy
    assert value._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    dist.all_reduce(weight.detach().t(), group=group)
    assert equal(weight.detach(), torch.full((2, 3), 2.0))


def undeliverable(group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
    """The work of a call that has ended, whose result does not fit its tensor any more; and that."""
    peer, counters = 1 - dist.get_rank(), group._get_backend(torch.device("cpu")).communicator.counters
    before = counters()["messages"]
    target = torch.zeros(3, 2).t()
    work = dist.irecv(target, peer, group)
    target.data = torch.empty(7)
    dist.barrier()  # Gloo's: only now does it get something
    dist.isend(torch.ones(2, 3), peer, group)
    while counters()["messages"] < before + 2:
        time.sleep(0.001)
    return work, target


@run_on_ranks(gloo=True, settings=None)
def test_an_error_of_a_delivery_is_that_of_its_own_work() -> None:
    group = ours()
    fits = "size of tensor"
    begin = partial(dist.all_reduce, group=group, async_op=True)

    def by_looking(tensor: torch.Tensor) -> None:
        work = begin(tensor)
        while not work.is_completed():
            pass
        assert work.is_success()

    def by_another(tensor: torch.Tensor) -> None:
        begin(tensor)
        dist.barrier(group)

    for i, call in enumerate(
        (
            lambda tensor: dist.all_reduce(tensor, group=group),
            lambda tensor: begin(tensor).wait(),
            lambda tensor: begin(tensor).get_future().wait(),
            by_looking,
            by_another,
        )
    ):
        work, target = undeliverable(group)
        call(tensor := torch.ones(2, 2).t())
        assert equal(tensor, torch.full((2, 2), 2.0)), i
        for _ in range(2):
            with pytest.raises(RuntimeError, match=fits):
                work.wait()
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(RuntimeError, match=fits):
            work.get_future().wait()
        assert target.shape == (7,)
    dist.barrier(group)


def drop_undeliverable() -> None:
    group = ours()
    undeliverable(group)
    kept, _ = undeliverable(group)
    dist.barrier(group)
    with pytest.raises(RuntimeError, match="size of tensor"):
        kept.wait()
    del kept
    gc.collect()


def test_an_error_of_a_delivery_that_nobody_asked_for_is_a_warning(pool: RankPool):
    with pool.spawn_ranks(drop_undeliverable, gloo=True, settings=None) as ranks:
        for rank in ranks:
            rank.result()
            assert rank.output().count("recv: its result was not put into its tensor: The size of tensor") == 1


@run_on_ranks(gloo=True, settings=None)
def test_a_call_follows_those_in_flight_on_the_same_memory() -> None:
    """Of each pair of asynchronous calls the second follows the first, whichever goes through a copy."""
    group = ours()
    views = [lambda t: t[:, ::2], lambda t: t, lambda t: t.t()]
    for first, second in itertools.product(views, repeat=2):
        tensor, expected = torch.ones(400, 6), torch.ones(400, 6)
        dist.all_reduce(first(tensor), group=group, async_op=True)  # nobody waits for it
        dist.all_reduce(second(tensor), group=group, async_op=True).wait()
        for view in (first, second):
            view(expected).mul_(2)
        assert torch.equal(tensor, expected)


LONG = 16 << 20  # bytes: a call on so many takes milliseconds, so the next one is made in the middle of it
Call = tuple[torch.dtype, Callable[[torch.Tensor], tuple[Any, list[torch.Tensor], float]]]


def calls_outside_the_order(group: dist.ProcessGroup) -> list[Call]:
    """Calls by copies or messages on 8 elements, 2 on both ranks: each call's work, its targets, and their value."""
    rank = dist.get_rank()
    zeros, integers = torch.zeros, partial(torch.zeros, dtype=torch.int64)
    reduced = partial(dist.all_reduce, group=group, async_op=True)
    scattered = partial(dist.reduce_scatter, group=group, async_op=True)
    whole, double = partial(dist.reduce_scatter_tensor, group=group, async_op=True), dist._make_nccl_premul_sum(2.0)
    parts = [zeros(8), zeros(8)] if rank == 1 else []
    sevens = list(torch.full((2, 8), 7.0)) if rank == 1 else None
    uneven = [zeros(3), zeros(5)]
    exchanged = [zeros(4), zeros(4)]
    return [
        (torch.float32, lambda t: (dist.reduce(t, 1, group=group, async_op=True), [t], 2.0 + 2 * rank)),
        (torch.float32, lambda t: (reduced(t, double), [t], 8.0)),
        (torch.int32, lambda t: (reduced(t, ReduceOp.AVG), [t], 2)),
        (torch.int64, lambda t: (reduced(t, ReduceOp.AVG), [t], 2)),
        (torch.float8_e5m2, lambda t: (reduced(t), [t], 4.0)),
        (torch.float32, lambda t: (dist.all_gather(uneven, t[: [3, 5][rank]], group, True), uneven, 2.0)),
        (torch.float32, lambda t: (scattered(out := zeros([3, 5][rank]), list(t.split([3, 5]))), [out], 4.0)),
        (torch.int64, lambda t: (scattered(out := integers(4), list(t.chunk(2)), ReduceOp.BOR), [out], 2)),
        (torch.int64, lambda t: (whole(out := integers(4), t, ReduceOp.AVG), [out], 2)),
        (torch.float32, lambda t: (dist.gather(t, parts or None, 1, group, True), parts, 2.0)),
        (torch.float32, lambda t: (dist.scatter(t, sevens, 1, group, True), [t], 7.0)),
        (torch.float32, lambda t: (dist.all_to_all(exchanged, list(t.chunk(2)), group, True), exchanged, 2.0)),
    ]


@run_on_ranks(gloo=True, settings=None)
def test_a_call_by_copies_or_messages_follows_one_in_place_on_the_same_memory():
    group, rank, wrong = ours(), dist.get_rank(), []
    for i, (dtype, call) in enumerate(calls_outside_the_order(group)):
        memory = torch.full((LONG // dtype.itemsize,), rank + 1.0).to(dtype)
        dist.broadcast(memory, 1, group, async_op=True)  # nobody waits for it
        work, targets, value = call(memory[-8:])  # on rank 0 they are still 1
        work.wait()
        if not all(equal(target, torch.full(target.shape, value).to(dtype)) for target in targets):
            wrong.append(i)
    return wrong


@pytest.mark.parametrize("how", ["gather", "scatter"])
@run_on_ranks(gloo=True, settings=None)
def test_a_call_in_place_follows_messages_that_read_or_write_the_same_memory(how: str) -> None:
    """A message reads or writes rank 0's memory. Rank 1 has other memory for the second call, and waits for nothing."""
    group, rank = ours(), dist.get_rank()
    memory = torch.full((LONG // 4,), rank + 1.0)
    end = memory[-8:] if rank == 0 else torch.full((8,), 2.0)
    parts = [torch.full_like(memory, 7.0) for _ in range(2)] if rank == 1 else None
    work = getattr(dist, how)(memory, parts, 1, group, async_op=True)
    dist.all_reduce(end, group=group, async_op=True).wait()
    work.wait()
    assert equal(end, torch.full((8,), 3.0 if how == "gather" else 9.0))
    if parts and how == "gather":
        assert [part.unique().tolist() for part in parts] == [[1.0], [2.0]]


@run_on_ranks(gloo=True, settings=None)
def test_a_call_follows_results_that_are_put_into_a_tensor_which_was_no_input() -> None:
    group, rank = ours(), dist.get_rank()
    whole = partial(dist.reduce_scatter_tensor, group=group, async_op=True)
    average, bits = torch.zeros(2, 4, dtype=torch.int64)
    uneven = [torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)]
    for target, first in (
        (average, lambda: whole(average, torch.full((8,), 2 + 2 * rank), ReduceOp.AVG)),
        (bits, lambda: whole(bits, torch.full((8,), 1 + rank), ReduceOp.BOR)),
        (uneven[rank][:4], lambda: dist.all_gather(uneven, torch.full((4 + rank,), 3), group, True)),
    ):
        first()  # nobody waits for it; it writes 3
        dist.all_reduce(target, group=group, async_op=True).wait()
        assert target.tolist() == [6] * 4
