"""The torch.distributed backend "syncengine": collectives beside Gloo's in the same processes."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool, run_on_ranks
from torch.distributed import ReduceOp

import syncengine
from syncengine import _C
from syncengine.communicator import group_communicator
from syncengine.errors import InvalidUsage, Mismatch
from syncengine.launch import store as launch_store

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
OTHERS = (torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


def ours(**options: Any) -> dist.ProcessGroup:
    """All ranks, over syncengine; the default group is Gloo's."""
    return dist.new_group(backend="syncengine", **options)


def value(dtype: torch.dtype, rank: int, *shape: int) -> torch.Tensor:
    """Small integers, other ones on each rank: sums and products are exact in any order."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 3 + rank * 5 + 1) % 4
    if dtype.is_complex:
        return torch.complex(numbers.double(), 1 + numbers.double()).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def values(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    return [value(dtype, rank, *shape) for rank in range(dist.get_world_size())]


def mine(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return value(dtype, dist.get_rank(), *shape)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also for dtypes that torch.equal does not know."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bool(a == b)


REFERENCE = {
    ReduceOp.SUM: lambda stack: stack.sum(0),
    ReduceOp.PRODUCT: lambda stack: stack.prod(0),
    ReduceOp.MIN: lambda stack: stack.amin(0),
    ReduceOp.MAX: lambda stack: stack.amax(0),
    ReduceOp.AVG: lambda stack: stack.sum(0) / len(stack),
}


def reduced(op: ReduceOp.RedOpType, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """What all ranks' values make."""
    stack = torch.stack(values(dtype, *shape))
    if dtype is torch.bool:
        return stack.all(0) if op in (ReduceOp.MIN, ReduceOp.PRODUCT) else stack.any(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    return REFERENCE[op](stack.to(wide)).to(dtype)


@run_on_ranks(world=4, gloo=True, settings=None)
def test_reductions_of_every_dtype() -> None:
    group = ours()
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            expected = reduced(op, dtype, 4, 50)
            tensor = mine(dtype, 4, 50)
            dist.all_reduce(tensor, op, group)
            assert equal(tensor, expected), (dtype, op)
            part = torch.empty(50, dtype=dtype)
            dist.reduce_scatter_tensor(part, mine(dtype, 4, 50), op, group)
            assert equal(part, expected[dist.get_rank()]), (dtype, op)
    for dtype in (*FLOATS, *COMPLEX):
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            tensor = mine(dtype, 5)
            dist.all_reduce(tensor, op, group)
            assert equal(tensor, reduced(op, dtype, 5)), (dtype, op)
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        tensor = mine(dtype, 5)
        dist.all_reduce(tensor, group=group)
        assert equal(tensor, sum(value(torch.int64, r, 5) for r in range(4)).to(dtype)), dtype


@run_on_ranks(world=3, gloo=True, settings=None)
def test_every_dtype_is_moved() -> None:
    group = ours()
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, *OTHERS):
        everybody = values(dtype, 3, 7)
        tensor = mine(dtype, 3, 7)
        dist.broadcast(tensor, 1, group)
        assert equal(tensor, everybody[1]), dtype
        parts = [torch.empty(3, 7, dtype=dtype) for _ in range(3)]
        dist.all_gather(parts, mine(dtype, 3, 7), group)
        assert all(map(equal, parts, everybody)), dtype
        whole = torch.empty(9, 7, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine(dtype, 3, 7), group)
        assert equal(whole, torch.cat([e.view(torch.uint8) for e in everybody]).view(dtype)), dtype


@run_on_ranks(world=3, gloo=True, settings=None)
def test_bitwise_reductions() -> None:
    group, rank = ours(), dist.get_rank()
    for dtype in (*INTEGERS, torch.bool, torch.uint16):
        for op, combine in (
            (ReduceOp.BAND, torch.bitwise_and),
            (ReduceOp.BOR, torch.bitwise_or),
            (ReduceOp.BXOR, torch.bitwise_xor),
        ):
            a, b, c = values(dtype, 3, 5)
            expected = combine(combine(a, b), c)
            tensor = mine(dtype, 3, 5).t()
            work = dist.all_reduce(tensor, op, group, async_op=True)
            work.wait()
            assert equal(tensor.t(), expected), (dtype, op)
            part = torch.empty(5, dtype=dtype)
            dist.reduce_scatter_tensor(part, mine(dtype, 3, 5), op, group)
            assert equal(part, expected[rank]), (dtype, op)
            dist.reduce_scatter(part.zero_(), list(mine(dtype, 3, 5)), op, group)
            assert equal(part, expected[rank]), (dtype, op)
    with pytest.raises(InvalidUsage, match=r"ReduceOp.BAND has no meaning for dtype Float"):
        dist.all_reduce(torch.ones(2), ReduceOp.BAND, group)


@run_on_ranks(world=3, gloo=True, settings=None)
def test_reduce_changes_the_destination_only() -> None:
    group, rank = ours(), dist.get_rank()
    for destination in range(3):
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            tensor = mine(torch.float32, 6, 4).t()
            dist.reduce(tensor, destination, op, group)
            expected = reduced(op, torch.float32, 6, 4) if rank == destination else mine(torch.float32, 6, 4)
            assert equal(tensor, expected.t())


@run_on_ranks(world=3, gloo=True, settings=None)
def test_all_gather_of_different_sizes() -> None:
    group, rank = ours(), dist.get_rank()
    outputs = [torch.zeros(2 * r + 1, 2) for r in range(3)]
    dist.all_gather(outputs, mine(torch.float32, 2 * rank + 1, 2), group)
    assert all(equal(outputs[r], value(torch.float32, r, 2 * r + 1, 2)) for r in range(3))


@run_on_ranks(world=2, gloo=True, settings=None)
def test_premul_sum() -> None:
    group = ours()
    for factor in (0.5 + dist.get_rank(), torch.tensor(0.5 + dist.get_rank())):
        op = dist._make_nccl_premul_sum(factor)
        tensor = mine(torch.float32, 100)
        dist.all_reduce(tensor, op, group)
        a, b = values(torch.float32, 100)
        assert equal(tensor, a * 0.5 + b * 1.5)
        part = torch.empty(50)
        dist.reduce_scatter_tensor(part, mine(torch.float32, 100), op, group)
        assert equal(part, tensor.chunk(2)[dist.get_rank()])


@run_on_ranks(world=2, gloo=True, settings=None)
def test_tensors_that_are_not_contiguous() -> None:
    group = ours()
    for view in (torch.t, lambda t: t[:, ::2], lambda t: t[1:, 1:]):
        expected = sum(view(v) for v in values(torch.float32, 4, 6))
        tensor = mine(torch.float32, 4, 6)
        dist.all_reduce(view(tensor), group=group)
        assert equal(view(tensor), expected)
        work = dist.all_gather(outputs := [view(torch.zeros(4, 6)) for _ in range(2)], view(mine(torch.float32, 4, 6)),
                               group, async_op=True)  # fmt: skip
        work.wait()
        assert all(map(equal, outputs, map(view, values(torch.float32, 4, 6))))
    channels_last = mine(torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last)
    if dist.get_rank() == 1:
        channels_last = channels_last.contiguous()  # ranks may differ
    dist.all_reduce(channels_last, group=group)
    assert equal(channels_last, sum(values(torch.float32, 2, 3, 4, 5)))


@run_on_ranks(world=3, gloo=True, settings=None)
def test_lists_and_coalesced_calls() -> None:
    group, rank = ours(), dist.get_rank()
    part = torch.empty(10)
    dist.reduce_scatter(part, list(mine(torch.float32, 3, 10).unbind()), group=group)
    assert equal(part, reduced(ReduceOp.SUM, torch.float32, 3, 10)[rank])

    shapes = [(3,), (2, 5), (1,)]
    tensors = [mine(torch.float32, *shape) for shape in shapes] + [mine(torch.int64, 4)]
    group._get_backend(torch.device("cpu")).allreduce_coalesced(tensors).wait()
    assert all(equal(t, reduced(ReduceOp.SUM, torch.float32, *s)) for t, s in zip(tensors, shapes, strict=False))
    assert equal(tensors[3], reduced(ReduceOp.SUM, torch.int64, 4))

    for asynchronous in (False, True):
        sums = [mine(torch.float32, *shape) for shape in shapes]
        with dist.distributed_c10d._coalescing_manager(group, async_ops=asynchronous) as manager:
            for tensor in sums:
                dist.all_reduce(tensor, group=group)
        if asynchronous:
            manager.wait()
        assert all(map(equal, sums, tensors))

        wholes, scattered = [torch.empty(3 * n) for n in (2, 7)], [torch.empty(n) for n in (2, 7)]
        with dist.distributed_c10d._coalescing_manager(group, async_ops=asynchronous) as manager:
            for whole, n in zip(wholes, (2, 7), strict=True):
                dist.all_gather_into_tensor(whole, mine(torch.float32, n), group)
        if asynchronous:
            manager.wait()
        assert all(equal(whole, torch.cat(values(torch.float32, n))) for whole, n in zip(wholes, (2, 7), strict=True))
        with dist.distributed_c10d._coalescing_manager(group, async_ops=asynchronous) as manager:
            for output, n in zip(scattered, (2, 7), strict=True):
                dist.reduce_scatter_tensor(output, mine(torch.float32, 3 * n), group=group)
        if asynchronous:
            manager.wait()
        for output, n in zip(scattered, (2, 7), strict=True):
            assert equal(output, reduced(ReduceOp.SUM, torch.float32, 3, n)[rank])

        with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu"), async_ops=asynchronous) as manager:
            copies = [mine(torch.float32, 4), mine(torch.int8, 3).as_strided((2,), (2,))]
            for tensor in copies:
                dist.broadcast(tensor, 2, group, async_op=asynchronous)
        if asynchronous:
            manager.wait()
        assert equal(copies[0], value(torch.float32, 2, 4))
        assert equal(copies[1], value(torch.int8, 2, 3)[::2])


@run_on_ranks(world=3, gloo=True, settings=None)
def test_object_collectives() -> None:
    group, rank = ours(), dist.get_rank()
    everybody: list[Any] = [None] * 3
    dist.all_gather_object(everybody, {"rank": rank, "text": "x" * rank * 1000}, group)
    assert [o["rank"] for o in everybody] == [0, 1, 2]
    objects = [rank, "from", rank]
    dist.broadcast_object_list(objects, 1, group)
    assert objects == [1, "from", 1]


@run_on_ranks(world=2, gloo=True, settings=None)
def test_works_and_futures() -> None:
    group = ours()
    tensor = torch.ones(3, 4).t()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    done = work.get_future().then(lambda future: future.value()[0] * 2)
    assert equal(done.wait(), torch.full((4, 3), 4.0))
    assert work.is_completed()
    assert work.is_success()
    assert equal(tensor, torch.full((4, 3), 2.0))
    assert work.result()[0] is tensor or equal(work.result()[0], tensor)
    work = dist.barrier(group, async_op=True)
    while not work.is_completed():
        pass
    assert work.get_future().wait() == []
    backend = group._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    dist.barrier(group)
    assert backend._get_sequence_number_for_group() == before + 1
    backend._set_sequence_number_for_group()
    assert backend.name() == "syncengine"
    assert (backend.rank(), backend.size()) == (dist.get_rank(), 2)


def fail_in_future() -> str:
    group = ours()
    future = dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group, async_op=True).get_future()
    with pytest.raises(Mismatch) as error:
        future.wait()
    with pytest.raises(Mismatch):
        dist.barrier(group)
    dist.barrier()  # Gloo's: not concerned
    return str(error.value)


def test_errors_reach_futures_and_later_calls(pool: RankPool):
    for text in pool.run(fail_in_future, gloo=True, settings=None):
        assert "all_reduce(sum, float32, 3 elements)" in text
        assert "all_reduce(sum, float32, 4 elements)" in text


@run_on_ranks(world=2, gloo=True, settings=None)
def test_what_can_not_work_is_refused_by_name() -> None:
    group = ours()
    backend = group._get_backend(torch.device("cpu"))
    with pytest.raises(InvalidUsage, match=r"all_reduce: ReduceOp.MAX has no meaning for dtype UInt16"):
        dist.all_reduce(torch.ones(2, dtype=torch.uint16), ReduceOp.MAX, group)
    with pytest.raises(InvalidUsage, match=r"ReduceOp.AVG has no meaning for dtype Int"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.AVG, group)
    with pytest.raises(InvalidUsage, match="dense CPU tensors, not one on meta"):
        backend.allreduce([torch.ones(2, device="meta")])
    with pytest.raises(InvalidUsage, match="dense CPU tensors, not one of layout Sparse"):
        backend.allreduce([torch.ones(2).to_sparse()])
    with pytest.raises(InvalidUsage, match=r"the larger tensor has 5 elements; it needs 2 times 2"):
        dist.all_gather_into_tensor(torch.empty(5), torch.ones(2), group)
    dist.barrier(group)  # nothing has failed


def group_at(timeout: float) -> dist.ProcessGroup:
    return ours(timeout=timedelta(seconds=timeout))


def wait_for_rank_1(how: str) -> str | None:
    group = group_at(0.3 if how == "group" else 60)
    if dist.get_rank() == 1:
        dist.barrier()
        return None
    with pytest.raises(syncengine.errors.Timeout) as error:
        if how == "group":
            dist.all_reduce(torch.ones(1), group=group)
        elif how == "set":
            group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=0.3))
            dist.all_reduce(torch.ones(1), group=group)
        elif how == "call":
            dist.barrier(group, timeout=timedelta(seconds=0.3))
        elif how == "wait":
            dist.all_reduce(torch.ones(1), group=group, async_op=True).wait(timedelta(seconds=0.3))
        elif how == "monitored":
            group._get_backend(torch.device("cpu")).monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
    assert isinstance(error.value, TimeoutError)
    dist.barrier()
    return str(error.value)


@pytest.mark.parametrize("how", ["group", "set", "call", "wait", "monitored"])
def test_timeouts_name_the_rank_that_is_missing(pool: RankPool, how: str):
    text = pool.run(wait_for_rank_1, how, gloo=True, settings=None)[0]
    assert "rank 0 waits for rank 1" in text
    assert ("monitored_barrier()" in text) == (how == "monitored")


@run_on_ranks(world=4, gloo=True, settings=None)
def test_groups_of_some_ranks() -> None:
    rank = dist.get_rank()
    evens, odds = dist.new_group([0, 2], backend="syncengine"), dist.new_group([3, 1], backend="syncengine")
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=odds if rank % 2 else evens)
    assert tensor[0] == (4 if rank % 2 else 2)
    if rank % 2 == 0:
        assert odds is dist.GroupMember.NON_GROUP_MEMBER
        dist.all_reduce(tensor, group=odds)  # a warning, as everywhere
    else:
        backend = odds._get_backend(torch.device("cpu"))
        assert backend.communicator.global_ranks == [1, 3]
        dist.broadcast(tensor := torch.full((1,), rank), 3, odds)
        assert tensor.item() == 3
    single = dist.new_group([rank], backend="syncengine", use_local_synchronization=True)
    dist.all_reduce(tensor := torch.full((2,), 7.0), group=single)
    dist.all_gather([gathered := torch.zeros(2)], tensor, group=single)
    assert gathered[0] == 7
    dist.destroy_process_group(odds if rank % 2 else evens)


@run_on_ranks(world=3, gloo=True, settings=None)
def test_a_backend_is_split() -> None:
    group, rank = ours(), dist.get_rank()
    backend = group._get_backend(torch.device("cpu"))
    half = backend.split([0, 2])
    assert backend.supports_splitting
    if rank == 1:
        assert half is None
    else:
        assert isinstance(half, _C.Backend)
        assert half.communicator.global_ranks == [0, 2]
        half.allreduce([tensor := mine(torch.float32, 5)]).wait()
        assert equal(tensor, value(torch.float32, 0, 5) + value(torch.float32, 2, 5))
        half.shutdown()
    # The way of torch's own split_group, whose Python front asks for an accelerator.
    part = group.split_group([2, 1], timeout=timedelta(seconds=20), group_desc="two")
    if rank == 0:
        assert part is None
    else:
        assert (part.rank(), part.size(), part.group_desc) == (rank - 1, 2, "two")
        part.broadcast(tensor := mine(torch.float32, 5), 1).wait()
        assert equal(tensor, value(torch.float32, 2, 5))
        part.shutdown()
    with pytest.raises(InvalidUsage, match="can be lowered only"):
        group.split_group([0, 1], timeout=timedelta(days=2))
    dist.barrier(group)


def whole_life(debug: bool) -> None:
    if debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
    rank = int(os.environ["RANK"])
    for backend, generation in (("syncengine", 0), ("cpu:syncengine", 1)):
        store = dist.PrefixStore(str(generation), launch_store.open_store())
        dist.init_process_group(backend, store=store, rank=rank, world_size=2)
        tensor = mine(torch.float32, 10)
        dist.all_reduce(tensor)
        assert equal(tensor, sum(values(torch.float32, 10)))
        dist.barrier()
        model = syncengine.Parallel(torch.nn.Linear(3, 3))
        assert model.communicator is group_communicator(dist.group.WORLD)
        model(torch.ones(2, 3)).sum().backward()
        dist.destroy_process_group()
        assert not dist.is_initialized()


@pytest.mark.parametrize("debug", [False, True])
def test_the_default_group(pool: RankPool, debug: bool):
    with pool.spawn_ranks(whole_life, debug, settings=None) as ranks:
        for rank in ranks:
            rank.result()
            assert rank.exit_code() == 0, rank.output()


def leave_or_die(how: str) -> str | None:
    group = ours()
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the data set is empty")
        if how == "die":
            os._exit(1)
        if how == "abort":
            group.abort()
            return None
        dist.destroy_process_group(group)
        return None
    with pytest.raises(syncengine.errors.SyncError) as error:
        for _ in range(2):
            dist.all_reduce(torch.ones(1), group=group)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "Aborted: rank 1: ValueError: the data set is empty"),
        ("die", "PeerLost: rank 1 died while rank 0 was in all_reduce"),
        ("abort", "Aborted: rank 1 aborted the process group"),
        ("destroy", "PeerLost: rank 1 has left"),
    ],
)
def test_a_rank_that_goes_is_named(pool: RankPool, how: str, text: str):
    with pool.spawn_ranks(leave_or_die, how, gloo=True, settings=None) as ranks:
        assert text in ranks[0].result()


def parallel_in_group() -> None:
    group = dist.new_group([0, 1], backend="syncengine")
    model = syncengine.Parallel(torch.nn.Linear(3, 3), process_group=group)
    assert model.communicator is group._get_backend(torch.device("cpu")).communicator
    assert model.process_group is group
    before = model.communicator.counters()["operations"]
    model(torch.ones(2, 3)).sum().backward()
    assert model.communicator.counters()["operations"] > before


def test_parallel_uses_the_engine_below_the_group(pool: RankPool):
    pool.run(parallel_in_group, gloo=True, settings=None)


def test_backend_is_registered():
    assert "syncengine" in dist.Backend.backend_list
    assert dist.Backend.backend_capability["syncengine"] == ["cpu"]
    assert issubclass(_C.Backend, torch._C._distributed_c10d.Backend)
