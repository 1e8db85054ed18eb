"""Every collective, dtype, op, size, kind of memory, algorithm and order of additions, bit by bit, among 1 to 8 ranks.

Ranks are processes on however many GPUs there are, and late by turns. Each world, algorithm and order draws its cases.
"""

import itertools
import os
import random
from functools import cache, partial, reduce
from typing import NamedTuple

import pytest
import torch
from cuda_ranks import SOFTWARE
from cuda_training import on_gpus
from models.workload import same_bits

import syncengine

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
OPS = ["sum", "avg", "product", "min", "max"]
SIZES = [0, 1, 37, 40_000]
LARGE = 300_001 if SOFTWARE else 5_000_001  # more than staging holds at once, or slots between hosts
NUMERICS = ["rank_order", "ring"]
WAYS = list(itertools.product(["auto", "direct", "staged", "one_shot"], NUMERICS))


class Case(NamedTuple):
    collective: str
    dtype: torch.dtype
    size: int  # of the larger tensor; up to one element for each rank more, where it has a part for each
    memory: str
    op: str = "sum"


def is_supported(dtype: torch.dtype, op: str) -> bool:
    return dtype.is_floating_point if op == "avg" else dtype is not torch.bool or op != "sum"


CASES = [
    Case(collective, dtype, size, memory, op)
    for dtype, memory in itertools.product([*FLOATS, *INTEGERS, torch.bool], ["ordinary", "empty"])
    for size in SIZES + [LARGE] * (dtype in (torch.bfloat16, torch.float32))
    for collective in ("all_reduce", "broadcast", "reduce_scatter", "all_gather")
    for op in (OPS if "reduce" in collective and size < LARGE else ["sum"])
    if "reduce" not in collective or is_supported(dtype, op)
]
# Of them, by a world, algorithm and order.
DRAWN = 12 if SOFTWARE else int(os.environ.get("SYNCENGINE_TEST_CASES", "240"))
ONE_OF_EACH_PATH = [
    Case("all_reduce", torch.float32, size, memory)
    for size, memory in [(37, "ordinary"), (40_000, "ordinary"), (LARGE, "empty")]
]


PERIOD = 40_009  # elements: a prime, so that nobody's part or piece looks like another


def repeated(pattern: torch.Tensor, size: int) -> torch.Tensor:
    return pattern.repeat(-(-size // PERIOD))[:size]


@cache
def pattern(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives: any bits.

    Every other floating number is of about the size of the other ranks', so that rounding tells orders apart.
    """
    generator = torch.Generator().manual_seed(rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (PERIOD,), generator=generator).to(dtype)
    any_bits = torch.randint(0, 256, (PERIOD * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    if not dtype.is_floating_point:
        return any_bits
    exponents = torch.randint(-30, 15, (PERIOD,), generator=generator).float()
    tensor = (torch.randn(PERIOD, generator=generator) * exponents.exp2()).to(dtype)
    tensor[::2] = any_bits[::2]  # subnormals, infinities and NaN are among them
    tensor[100 + rank * 7] = float("inf")
    tensor[500] = float("nan") if rank == 1 else 1.0
    return tensor


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return repeated(pattern(rank, dtype), size)


def added(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if op in ("min", "max"):
        return torch.where((b < a if op == "min" else b > a) | b.isnan(), b, a)
    return a * b if op == "product" else a + b


@cache
def reduced(world: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """The ranks' patterns in rank order; 16-bit floats in float32. An oracle that shares nothing with the engine."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = reduce(partial(added, op), [pattern(rank, dtype).to(wide) for rank in range(world)])
    return (total * (1.0 / world) if op == "avg" else total).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """In all bits, but for those of NaN."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and same_bits(a.masked_fill(nan, 1), b.masked_fill(nan, 1))


def part_of(case: Case, world: int) -> int:
    return -(-case.size // world)


def carried_out(
    case: Case, communicator: syncengine.Communicator, whole: torch.Tensor, part: torch.Tensor
) -> torch.Tensor:
    """The case's result, on the device of memory that has room for it."""
    rank, world = communicator.rank, communicator.size
    small = part[: part_of(case, world)]
    if case.collective == "reduce_scatter":
        large = whole[: small.numel() * world]
        large.copy_(values(rank, large.numel(), case.dtype))
        communicator.reduce_scatter(small.fill_(1), large, case.op)
        return small
    if case.collective == "all_gather":
        large = whole[: small.numel() * world].fill_(1)
        communicator.all_gather(large, small.copy_(values(rank, small.numel(), case.dtype)))
        return large
    tensor = whole[: case.size].copy_(values(rank, case.size, case.dtype))
    if case.collective == "broadcast":
        communicator.broadcast(tensor, case.size % world)
    else:
        communicator.all_reduce(tensor, case.op)
    return tensor


def expected(case: Case, communicator: syncengine.Communicator) -> torch.Tensor:
    """By the oracle, or, in the order of a ring, by the CPU's engine, which has Gloo for its oracle elsewhere."""
    rank, world = communicator.rank, communicator.size
    part = part_of(case, world)
    if case.collective == "broadcast":
        return values(case.size % world, case.size, case.dtype)
    if case.collective == "all_gather":
        return torch.cat([values(peer, part, case.dtype) for peer in range(world)])
    if communicator.numerics != "rank_order":
        return carried_out(case, communicator, *(torch.empty(n, dtype=case.dtype) for n in (part * world, part)))
    result = reduced(world, case.dtype, case.op)
    if case.collective == "all_reduce":
        return repeated(result, case.size)
    return repeated(result, part * world)[rank * part :][:part]


def conformance(communicator: syncengine.Communicator, seed: str, most: int) -> None:
    """As many cases, which all ranks draw alike. Ranks are late by turns."""
    rank, world = communicator.rank, communicator.size
    room = (LARGE + 2 * world) * 8
    memories = {
        "ordinary": [torch.empty(room, dtype=torch.uint8, device="cuda") for _ in range(2)],
        "empty": [communicator.empty([room], torch.uint8, torch.device("cuda")) for _ in range(2)],
    }
    delays = random.Random(rank)
    order = random.Random(f"{world} {communicator.numerics} {seed}")
    for case in order.sample(CASES, most) + ONE_OF_EACH_PATH:
        if delays.random() < 0.2:
            torch.cuda._sleep(delays.randrange(1_000_000))
        start = case.size % 2 if case.memory == "empty" else rank % 3  # kernels' vectors begin elsewhere
        whole, part = (memory.view(case.dtype)[start:] for memory in memories[case.memory])
        result = carried_out(case, communicator, whole, part)
        assert same(result.cpu(), expected(case, communicator)), case


def check_paths(communicator: syncengine.Communicator, algorithm: str) -> None:
    """That the algorithm's own path has been taken; by "auto" each of three."""
    counters = communicator.counters()
    for path in ("one_shot", "staged", "direct") if algorithm == "auto" else (algorithm,):
        assert communicator.size == 1 or counters[f"cuda_{path}_bytes"] > 0, counters


@on_gpus(in_job=False)
@pytest.mark.parametrize("world", range(1, 9))
def test_processes(rank: int, world: int):
    for algorithm, numerics in WAYS:
        os.environ["SYNCENGINE_TEST_ALGORITHM"] = algorithm
        communicator = syncengine.init(numerics=numerics, timeout=60.0)
        conformance(communicator, algorithm, DRAWN)
        check_paths(communicator, algorithm)
        syncengine.shutdown()
