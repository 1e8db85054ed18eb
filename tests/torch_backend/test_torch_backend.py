"""The torch.distributed backend "syncengine": collectives beside Gloo's in the same processes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import run_on_ranks
from torch.distributed import ReduceOp
from torch_backend_values import COMPLEX, FLOATS, INTEGERS, OTHERS, equal, mine, ours, value, values

from syncengine.errors import InvalidUsage

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


def of_everybody(tensor: torch.Tensor) -> list[torch.Tensor]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, tensor)
    return everybody


@run_on_ranks(world=3, gloo=True, settings=None)
def test_averages_of_integers_are_sums_divided_exactly() -> None:
    group, rank = ours(), dist.get_rank()
    for dtype in (*INTEGERS, torch.uint16, torch.uint32, torch.uint64):
        limits = torch.iinfo(dtype)
        choose = random.Random(rank)
        numbers = [rank - 4, 7 - 5 * rank, 1 << 20, 3, 100 + rank, limits.max, limits.min, limits.max - rank, 5]
        numbers += [choose.randrange(limits.min, limits.max + 1) for _ in range(12)]
        numbers = [max(limits.min, min(limits.max, n)) for n in numbers]
        if dtype in (torch.int64, torch.uint64):
            numbers = [int(n / 3) if dtype is torch.int64 else n // 3 for n in numbers]  # a sum that wraps is no sum
        everybody: list[Any] = [None] * 3
        dist.all_gather_object(everybody, numbers)
        sums = [sum(column) for column in zip(*everybody, strict=True)]
        expected = torch.tensor([abs(n) // 3 * (1 if n >= 0 else -1) for n in sums], dtype=dtype)
        tensor = torch.tensor(numbers, dtype=dtype)
        dist.all_reduce(tensor, ReduceOp.AVG, group)
        assert equal(tensor, expected), (dtype, tensor, expected)
        tensor = torch.tensor(numbers, dtype=dtype)
        dist.all_reduce(tensor, ReduceOp.AVG, group, async_op=True).get_future().wait()
        assert equal(tensor, expected), dtype
        part = torch.empty(7, dtype=dtype)
        dist.reduce_scatter_tensor(part, torch.tensor(numbers, dtype=dtype), ReduceOp.AVG, group)
        assert equal(part, expected[7 * rank : 7 * rank + 7]), dtype
        tensor = torch.tensor(numbers, dtype=dtype)
        dist.reduce(tensor, 1, ReduceOp.AVG, group)
        assert equal(tensor, expected if rank == 1 else torch.tensor(numbers, dtype=dtype)), dtype
    counter = torch.tensor(5 + rank)  # what Lightning's self.log(sync_dist=True) averages
    dist.all_reduce(counter, ReduceOp.AVG, group)
    assert counter.item() == 6


@run_on_ranks(world=3, gloo=True, settings=None)
def test_extrema_of_unsigned_integers() -> None:
    group, rank = ours(), dist.get_rank()
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        limit = torch.iinfo(dtype).max
        choose = random.Random(rank)
        numbers = [0, limit, limit // 2 + rank, limit - rank, rank, 8]
        numbers += [choose.randrange(limit + 1) for _ in range(15)]
        everybody: list[Any] = [None] * 3
        dist.all_gather_object(everybody, numbers)
        for op, choice in ((ReduceOp.MIN, min), (ReduceOp.MAX, max)):
            expected = torch.tensor([choice(column) for column in zip(*everybody, strict=True)], dtype=dtype)
            tensor = torch.tensor(numbers, dtype=dtype).view(3, 7).t()
            dist.all_reduce(tensor, op, group)
            assert equal(tensor.t().reshape(-1), expected), (dtype, op)
            part = torch.empty(7, dtype=dtype)
            dist.reduce_scatter(part, list(torch.tensor(numbers, dtype=dtype).chunk(3)), op, group)
            assert equal(part, expected[7 * rank : 7 * rank + 7]), (dtype, op)


@run_on_ranks(world=3, gloo=True, settings=None)
def test_float8_is_reduced_in_float32_and_rounded_once() -> None:
    group, rank = ours(), dist.get_rank()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        given = torch.randn(30, generator=torch.Generator().manual_seed(rank)).to(dtype)
        stack = torch.stack(of_everybody(given.float()))
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            if op == ReduceOp.AVG:
                expected = (stack[0] + stack[1] + stack[2]) * (1 / 3)
            elif op == ReduceOp.SUM:
                expected = stack[0] + stack[1] + stack[2]
            elif op == ReduceOp.PRODUCT:
                expected = stack[0] * stack[1] * stack[2]
            else:
                expected = REFERENCE[op](stack)
            tensor = given.clone()
            dist.all_reduce(tensor, op, group)
            assert equal(tensor, expected.to(dtype)), (dtype, op)
            part = torch.empty(10, dtype=dtype)
            dist.reduce_scatter_tensor(part, given, op, group)
            assert equal(part, expected.to(dtype)[10 * rank : 10 * rank + 10]), (dtype, op)


@run_on_ranks(world=3, gloo=True, settings=None)
def test_reduce_scatter_of_different_sizes() -> None:
    group, rank = ours(), dist.get_rank()
    for dtype, op in ((torch.float32, ReduceOp.SUM), (torch.int64, ReduceOp.AVG), (torch.int32, ReduceOp.BOR)):
        sizes = [5, 0, 3]
        inputs = [mine(dtype, size, 2) + size for size in sizes]
        kept = [t.clone() for t in inputs]
        everybody = [of_everybody(t) for t in inputs]
        stack = torch.stack(everybody[rank])
        expected = stack[0] | stack[1] | stack[2] if op == ReduceOp.BOR else stack.sum(0)
        if op == ReduceOp.AVG:
            expected = expected.div(3, rounding_mode="trunc")
        output = torch.empty(sizes[rank], 2, dtype=dtype)
        work = dist.reduce_scatter(output, inputs, op, group, async_op=True)
        work.wait()
        assert equal(output, expected), (dtype, op)
        assert all(map(equal, inputs, kept))


@run_on_ranks(gloo=True, settings=None)
def test_all_gather_coalesced() -> None:
    group, rank = ours(), dist.get_rank()
    inputs = [torch.full((3,), rank + 1.0), torch.full((2, 2), 10.0 * rank).t()]
    for asynchronous in (False, True):
        outputs = [[torch.zeros(3), torch.zeros(2, 2).t()] for _ in range(2)]
        future = dist.all_gather_coalesced(outputs, inputs, group, async_op=asynchronous)
        if asynchronous:
            future.wait()
        for r in range(2):
            assert equal(outputs[r][0], torch.full((3,), r + 1.0))
            assert equal(outputs[r][1], torch.full((2, 2), 10.0 * r))


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
            shaped = [mine(dtype, 2, 3), mine(dtype, 3, 2), mine(dtype, 6)]  # of one size
            dist.reduce_scatter(part := torch.empty(6, dtype=dtype), shaped, op, group)
            assert equal(part, combine(combine(*values(dtype, 6)[:2]), value(dtype, 2, 6))), (dtype, op)
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


@run_on_ranks(gloo=True, settings=None)
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


@run_on_ranks(gloo=True, settings=None)
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
