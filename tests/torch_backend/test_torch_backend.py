"""The torch.distributed backend "syncengine": integers at the limits of their dtypes."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from pool import run_on_ranks
from torch.distributed import ReduceOp
from torch_backend_values import INTEGERS, equal, ours


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
