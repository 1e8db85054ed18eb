"""Random programs of calls on a group: what they leave is what the ranks' values make, whoever waits for them when.

The grammar: each method of `Calls` makes one call, of any dtype, sizes and operation, on tensors that lie in memory in
any way, on each rank in another. Several are in flight at a time. Each program follows from its number, which a failure
names.
"""

import itertools
import operator
import os
import random
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager
from torch_backend_values import COMPLEX, FLOATS, INTEGERS, equal, ours, value

COUNT = int(os.environ.get("SYNCENGINE_TEST_PROGRAMS", "0"))  # more of them, other ones for another number
PROGRAMS, LENGTH = 30, 12  # for each way that ranks live on hosts; calls in each
CPU = torch.device("cpu")

BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*FLOATS, *BYTES, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool)
SUMS, EXTREMA = (ReduceOp.SUM, ReduceOp.AVG), (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
OPERATIONS = {
    **dict.fromkeys(FLOATS, (*SUMS, *EXTREMA, ReduceOp.PREMUL_SUM)),
    **dict.fromkeys(BYTES, (*SUMS, *EXTREMA)),
    **dict.fromkeys(INTEGERS, (*SUMS, *EXTREMA, *BITS)),
    **dict.fromkeys(UNSIGNED, BITS),
    **dict.fromkeys(COMPLEX, SUMS),
    torch.bool: (ReduceOp.SUM, *EXTREMA, *BITS),
}
REDUCTIONS = [(dtype, op) for dtype, ops in OPERATIONS.items() for op in ops]
COMBINED: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}


def reduced(op: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks, small floating-point numbers in float32, and rounded once; integers exactly."""
    dtype = tensors[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(reduced(op, [torch.view_as_real(t) for t in tensors]))
    wide = torch.float64 if dtype is torch.float64 else torch.float32 if dtype.is_floating_point else torch.int64
    parts = [t.to(wide) for t in tensors]
    if op == ReduceOp.PREMUL_SUM:
        parts = [(0.5 + rank) * part for rank, part in enumerate(parts)]
    result = reduce(COMBINED.get(op, operator.add), parts)
    if op == ReduceOp.AVG:
        count = len(parts)
        result = result * (1 / count) if wide.is_floating_point else result.div(count, rounding_mode="trunc")
    return result.to(dtype)


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One behind the other, of any dtype."""
    return torch.cat([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)


class Program:
    def __init__(self, number: int, group: dist.ProcessGroup) -> None:
        self.rank, self.world, self.group = dist.get_rank(), dist.get_world_size(), group
        self.dice = random.Random(number)
        self.reductions = itertools.cycle(self.dice.sample(REDUCTIONS, len(REDUCTIONS)))
        self.own = random.Random(f"{number} {self.rank}")  # what is this rank's alone
        self.turn, self.kind = 0, ""
        self.reduction: tuple[torch.dtype, Any] | None = None  # of all calls, if they are to have one
        self.left: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # by which call, a target, what it will be
        self.drawn: set[str] = set()

    def shape(self) -> tuple[int, int]:
        rows = self.dice.choice([0, 1, 5, 40, 200, 1000, *[150_000] * (self.dice.random() < 0.1)])
        return rows, self.dice.choice([1, 5])

    def dtype(self) -> torch.dtype:
        return self.dice.choice(DTYPES)

    def operation(self) -> tuple[torch.dtype, Any, Callable[[list[torch.Tensor]], torch.Tensor]]:
        """A dtype, an operation that it has, and what that makes."""
        dtype, op = self.reduction or next(self.reductions)
        self.drawn.add(f"{op} of {dtype}")
        factor = self.own.choice([float, torch.tensor])(0.5 + self.rank)
        given = dist._make_nccl_premul_sum(factor) if op == ReduceOp.PREMUL_SUM else op
        return dtype, given, partial(reduced, op)

    def of_all(self, dtype: torch.dtype, *shape: int, part: int = 0) -> list[torch.Tensor]:
        """Each rank's, another one in each call."""
        return [value(dtype, rank + self.turn + part, *shape) for rank in range(self.world)]

    def parts_of_all(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """By sender and receiver; in half of the cases of different sizes."""
        rows, width = self.shape()
        uneven = self.dice.choice([0, 1])
        return [
            [value(dtype, r + self.turn + p, rows + uneven * (r + 2 * p), width) for p in range(self.world)]
            for r in range(self.world)
        ]

    def lay(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor with these values: dense, with gaps, or transposed."""
        how = self.own.choice(["dense", "dense", "gaps", "transposed"])
        if how == "gaps":
            return torch.empty(*values.shape, 2, dtype=values.dtype)[..., 0].copy_(values)
        return values.t().contiguous().t() if how == "transposed" else values.clone()

    def source(self, values: torch.Tensor) -> torch.Tensor:
        """It stays as it is."""
        return self.target(values, values)

    def target(self, expected: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        tensor = self.lay(torch.zeros_like(expected) if before is None else before)
        self.left.append((f"{self.turn}, {self.kind} of {tensor.dtype} {tuple(tensor.shape)}", tensor, expected))
        return tensor

    def run(self) -> list[str]:
        """What is not what it should be."""
        works: list[tuple[str, Any]] = []
        for self.turn in range(LENGTH):
            self.kind = self.dice.choice(KINDS)
            self.drawn.add(self.kind)
            begun = getattr(self, self.kind)(**self.dice.choice([{}, {"async_op": True}]))
            works += [(self.kind, work) for work in (begun if isinstance(begun, list) else [begun]) if work]
            while works and self.own.random() < 0.4:
                self.end(works.pop(self.own.randrange(len(works)))[1])
        if self.dice.random() < 0.3:  # what nobody waits for is there after the next call
            works = [(kind, work) for kind, work in works if kind in MESSAGES]
        self.own.shuffle(works)
        for _, work in works:
            self.end(work)
        dist.barrier(self.group)
        return [what for what, tensor, expected in self.left if not equal(tensor, expected)]

    def end(self, work: Any) -> None:
        if hasattr(work, "get_future") and self.own.random() < 0.3:
            work.get_future().wait()
        else:
            work.wait()


class Calls(Program):
    """Each method makes one call, and returns its work or works, if it is asynchronous."""

    def all_reduce(self, **how: bool) -> Any:
        dtype, op, make = self.operation()
        everyone = self.of_all(dtype, *self.shape())
        return dist.all_reduce(self.target(make(everyone), everyone[self.rank]), op, self.group, **how)

    def all_reduce_coalesced(self, **how: bool) -> Any:
        tensors = []
        for _ in range(3):
            everyone = self.of_all(self.dice.choice(FLOATS), *self.shape())
            tensors.append(self.target(reduced(ReduceOp.SUM, everyone), everyone[self.rank]))
        return self.group._get_backend(CPU).allreduce_coalesced(tensors)

    def reduce(self, **how: bool) -> Any:
        (dtype, op, make), root = self.operation(), self.dice.randrange(self.world)
        everyone = self.of_all(dtype, *self.shape())
        mine = everyone[self.rank]
        target = self.target(make(everyone) if self.rank == root else mine, mine)
        return dist.reduce(target, root, op, self.group, **how)

    def broadcast(self, **how: bool) -> Any:
        root = self.dice.randrange(self.world)
        everyone = self.of_all(self.dtype(), *self.shape())
        return dist.broadcast(self.target(everyone[root], everyone[self.rank]), root, self.group, **how)

    def all_gather(self, **how: bool) -> Any:
        everyone = [parts[0] for parts in self.parts_of_all(self.dtype())]
        return dist.all_gather(list(map(self.target, everyone)), self.source(everyone[self.rank]), self.group, **how)

    def all_gather_into_tensor(self, **how: bool) -> Any:
        everyone = self.of_all(self.dtype(), *self.shape())
        whole = self.target(joined(everyone))
        return dist.all_gather_into_tensor(whole, self.source(everyone[self.rank]), self.group, **how)

    def all_gather_coalesced(self, **how: bool) -> Any:
        dtype = self.dtype()
        several = [self.of_all(dtype, *self.shape()) for _ in range(2)]
        outputs = [[self.target(everyone[rank]) for everyone in several] for rank in range(self.world)]
        return dist.all_gather_coalesced(outputs, [self.source(e[self.rank]) for e in several], self.group, **how)

    def reduce_scatter(self, **how: bool) -> Any:
        dtype, op, make = self.operation()
        shapes = [self.shape() for _ in range(self.world)]
        inputs = [self.of_all(dtype, *shape, part=part) for part, shape in enumerate(shapes)]
        output = self.target(make(inputs[self.rank]))
        return dist.reduce_scatter(output, [self.source(i[self.rank]) for i in inputs], op, self.group, **how)

    def reduce_scatter_tensor(self, **how: bool) -> Any:
        dtype, op, make = self.operation()
        rows, width = self.shape()
        everyone = self.of_all(dtype, rows * self.world, width)
        output = self.target(make(everyone)[self.rank * rows : (self.rank + 1) * rows])
        return dist.reduce_scatter_tensor(output, self.source(everyone[self.rank]), op, self.group, **how)

    def gather(self, **how: bool) -> Any:
        root = self.dice.randrange(self.world)
        everyone = self.of_all(self.dtype(), *self.shape())
        outputs = list(map(self.target, everyone)) if self.rank == root else None
        return dist.gather(self.source(everyone[self.rank]), outputs, root, self.group, **how)

    def scatter(self, **how: bool) -> Any:
        root = self.dice.randrange(self.world)
        everyone = self.of_all(self.dtype(), *self.shape())
        inputs = list(map(self.source, everyone)) if self.rank == root else None
        return dist.scatter(self.target(everyone[self.rank]), inputs, root, self.group, **how)

    def all_to_all(self, **how: bool) -> Any:
        parts = self.parts_of_all(self.dtype())
        outputs = [self.target(of_rank[self.rank]) for of_rank in parts]
        return dist.all_to_all(outputs, list(map(self.source, parts[self.rank])), self.group, **how)

    def all_to_all_single(self, **how: bool) -> Any:
        parts = self.parts_of_all(self.dtype())
        received = [of_rank[self.rank] for of_rank in parts]
        output, mine = self.target(joined(received)), self.source(joined(parts[self.rank]))
        sizes = [list(map(len, received)), list(map(len, parts[self.rank]))]
        return dist.all_to_all_single(output, mine, *sizes, self.group, **how)

    def messages(self, **how: bool) -> list[Any]:
        """Two to the next rank, awaited in the other order."""
        everyone = self.of_all(self.dtype(), *self.shape())
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        works = [dist.isend(self.source(everyone[self.rank]), after, self.group, tag) for tag in (1, 2)]
        return works + [dist.irecv(self.target(everyone[before]), before, self.group, tag) for tag in (2, 1)]

    def batch(self, **how: bool) -> list[Any]:
        """Of messages from all to all."""
        parts, others = self.parts_of_all(self.dtype()), [r for r in range(self.world) if r != self.rank]
        calls = [dist.P2POp(dist.isend, self.source(parts[self.rank][p]), p, self.group) for p in others]
        calls += [dist.P2POp(dist.irecv, self.target(parts[r][self.rank]), r, self.group) for r in others]
        self.own.shuffle(calls)
        return dist.batch_isend_irecv(calls)

    def objects(self, **how: bool) -> None:
        root, everyone = self.dice.randrange(self.world), [(rank, "x" * 1000 * rank) for rank in range(self.world)]
        mine, got = everyone[self.rank], [[None] * self.world for _ in range(3)]
        dist.all_gather_object(got[0], mine, self.group)
        dist.gather_object(mine, got[1] if self.rank == root else None, root, self.group)
        dist.broadcast_object_list(sent := [mine, self.turn], root, self.group)
        dist.scatter_object_list(part := [None], everyone if self.rank == root else None, root, self.group)
        after = (root + 1) % self.world
        if self.rank == root:
            dist.send_object_list(everyone, after, self.group)
        elif self.rank == after:
            dist.recv_object_list(got[2], root, self.group)
            assert got[2] == everyone
        assert got[0] == everyone
        assert got[1] == everyone or self.rank != root
        assert sent == [everyone[root], self.turn]
        assert part == [mine]

    def one_kind_coalesced(self, **how: bool) -> Any:
        """Which torch makes one call of."""
        kind = self.dice.choice([self.all_reduce, self.all_gather_into_tensor, self.reduce_scatter_tensor])
        self.reduction = self.dice.choice([reduction for reduction in REDUCTIONS if reduction[1] == ReduceOp.SUM])
        with _coalescing_manager(self.group, async_ops=bool(how)) as manager:
            for _ in range(3):
                kind()
        self.reduction = None
        return manager if how else None

    def any_kinds_coalesced(self, **how: bool) -> Any:
        kinds = [self.reduce, self.broadcast, self.all_gather, self.gather, self.scatter, self.all_to_all]
        with _coalescing_manager(self.group, CPU, async_ops=bool(how)) as manager:
            for _ in range(3):
                self.dice.choice(kinds)(**how)
        return manager if how else None


KINDS = [name for name in vars(Calls) if not name.startswith("_")]
MESSAGES = {"gather", "scatter", "all_to_all", "all_to_all_single", "messages", "batch", "any_kinds_coalesced"}


def differences(first: int) -> tuple[list[str], set[str]]:
    """What is wrong in which program; what has been drawn."""
    group, wrong, drawn = ours(), [], set()
    for number in range(first, first + (COUNT or 1) * PROGRAMS):
        program = Calls(number, group)
        try:
            wrong += [f"program {number}: {what}" for what in program.run()]
        except Exception as error:
            raise AssertionError(f"program {number}: {program.turn}, {program.kind}") from error
        drawn |= program.drawn
    return wrong, drawn


@pytest.mark.thorough
def test_programs_leave_what_the_values_make(pool: RankPool) -> None:
    everything = {f"{op} of {dtype}" for dtype, op in REDUCTIONS} | {*KINDS}
    for number, hosts in enumerate(["aa", "aaa", "aaaa", "ab", "aba", "aabb"]):
        call = (differences, 1_000_000 * COUNT + 1000 * number)
        found = pool.run(*call, hosts=hosts, gloo=True, settings=None, timeout=120 * (COUNT or 1))
        for wrong, _ in found:
            assert not wrong, "\n".join(wrong)
        everything -= found[0][1]
    assert not everything, "has not been drawn"
