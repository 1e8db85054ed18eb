"""The torch.distributed backend "syncengine": integers at the limits of their dtypes."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import run_on_ranks
from torch.distributed import ReduceOp
from torch_backend_values import INTEGERS, equal, ours

from syncengine.errors import InvalidUsage


@run_on_ranks(world=3, gloo=True, settings=None)
def test_averages_of_integers_are_sums_divided_exactly() -> None:
    group, rank = ours(), dist.get_rank()
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        choose = random.Random(rank)
        numbers = [rank - 4, 7 - 5 * rank, 1 << 20, 3, 100 + rank, limits.max, limits.min, limits.max - rank, 5]
        numbers += [choose.randrange(limits.min, limits.max + 1) for _ in range(12)]
        numbers = [max(limits.min, min(limits.max, n)) for n in numbers]
        if dtype is torch.int64:
            numbers = [int(n / 3) for n in numbers]  # a sum that wraps is no sum
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


@run_on_ranks(gloo=True, settings=None)
def test_unsigned_integers_longer_than_a_byte_are_not_reduced() -> None:
    """As by Gloo and NCCL."""
    group = ours()
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            with pytest.raises(InvalidUsage, match=r"all_reduce: ReduceOp\..* dtype UInt\d\d in .* convert the tensor"):
                dist.all_reduce(torch.ones(3, dtype=dtype), op, group)
        dist.all_reduce(bits := torch.tensor([1 << dist.get_rank()]).to(dtype), ReduceOp.BOR, group)
        assert bits.tolist() == [3]
