"""One collective of one size: its memory, its call, and its right result.

Bandwidths are by the formulas of nccl-tests (doc/PERFORMANCE.md there): algbw = size / time; busbw = algbw times a
factor by collective, so that it compares with the speed of a link at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from syncengine._C import Communicator
from syncengine.config import Op
from syncengine.errors import InvalidUsage

# The period of the input is a prime, so pieces that end up in each other's place are noticed.
PERIOD = 251

# Values stay below these, so that sums over 64 ranks are exact in the dtype. Sums of bytes wrap around.
_BELOW = {torch.bfloat16: 5, torch.float16: 31, torch.int8: 127, torch.uint8: 127}


def values(rank: int, ranks: int, turn: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """One period of a rank's input, as int64. Each turn has other values."""
    place = torch.arange(PERIOD) + turn
    if op == "prod":  # one 2 at most among the ranks
        return torch.where(place % (ranks + 1) == rank, 2, 1)
    numbers = (place * 7 + 31 * rank + 1) % PERIOD % _BELOW.get(dtype, PERIOD)
    return numbers % 3 * ranks if op == "avg" else numbers


def reduced(ranks: int, turn: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """One period of the result of a reduction, as int64."""
    everyone = torch.stack([values(rank, ranks, turn, dtype, op) for rank in range(ranks)])
    if op == "prod":
        return everyone.prod(0)
    if op in ("min", "max"):
        return everyone.amin(0) if op == "min" else everyone.amax(0)
    return everyone.sum(0) // ranks if op == "avg" else everyone.sum(0)


def tile(period: torch.Tensor, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements of the endless repetition of `period`, from element `begin` on."""
    turned = period.roll(-(begin % PERIOD)).to(dtype)
    return turned.repeat(count // PERIOD + 1)[:count]


def count_wrong(result: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements differ: all, if the tensors have different sizes. A NaN is wrong."""
    if result.numel() != expected.numel():
        return expected.numel()
    return int(torch.count_nonzero(result.flatten() != expected))


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
REDUCES = ("all_reduce", "reduce_scatter")
_SPREADS = ("all_gather", "reduce_scatter", "all_to_all")  # one tensor has a part for each rank


def bus_factor(name: str, ranks: int) -> float:
    """The ratio of busbw to algbw for this collective."""
    if name == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if name in _SPREADS else 1.0


@dataclass(frozen=True)
class Shape:
    """A collective and its size: tensors of `count` elements, or of a part with `count` elements for each rank."""

    name: str
    ranks: int
    count: int
    dtype: torch.dtype
    op: str = "sum"  # also where nothing is reduced
    root: int = 0

    @classmethod
    def of_size(cls, name: str, ranks: int, size: int, dtype: torch.dtype, op: str, root: int) -> Shape:
        """The collective on as many elements as `size` bytes hold, but at least one."""
        parts = ranks if name in _SPREADS else 1
        count = 0 if name == "barrier" else max(1, size // dtype.itemsize // parts)
        return cls(name, ranks, count, dtype, op if name in REDUCES else "sum", root)

    @property
    def size(self) -> int:
        """Bytes of the larger of a rank's two tensors, as in nccl-tests."""
        return self.count * self.dtype.itemsize * (self.ranks if self.name in _SPREADS else 1)

    @property
    def input_count(self) -> int:
        """Elements of a rank's input."""
        return self.count * (self.ranks if self.name in ("reduce_scatter", "all_to_all") else 1)

    @property
    def output_count(self) -> int:
        """The number of elements of a rank's output."""
        return self.count * (self.ranks if self.name in ("all_gather", "all_to_all") else 1)


class Case:
    """One engine's collective, with memory of its own. `empty` makes the memory; `run` runs the collective on it."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        empty: Callable[[int, torch.dtype], torch.Tensor],
        run: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        self.shape, self.rank = shape, rank
        self.input = empty(shape.input_count, shape.dtype)
        in_place = shape.name in ("all_reduce", "broadcast", "barrier")
        self.output = self.input if in_place else empty(shape.output_count, shape.dtype)
        self._run = run

    def call(self) -> None:
        """Runs the collective once."""
        self._run(self.output, self.input)

    def check(self, turn: int, communicator: Communicator) -> int:
        """Runs the collective on this turn's inputs. Returns how many elements of the output differ from the result."""
        shape = self.shape
        self.output.fill_(77)  # the same everywhere: the output is wrong if nothing writes to it
        pattern = values(self.rank, shape.ranks, turn, shape.dtype, shape.op)
        self.input.copy_(tile(pattern, 0, shape.input_count, shape.dtype))
        communicator.barrier()  # nobody's result goes where another one still writes its input
        self.call()
        return count_wrong(self.output, self._expected(turn))

    def _expected(self, turn: int) -> torch.Tensor:
        shape = self.shape
        name, ranks, count, dtype = shape.name, shape.ranks, shape.count, shape.dtype
        begin = self.rank * count if name in ("reduce_scatter", "all_to_all") else 0
        if name in REDUCES:
            return tile(reduced(ranks, turn, dtype, shape.op), begin, count, dtype)
        senders = [shape.root] if name == "broadcast" else range(ranks)
        inputs = [values(rank, ranks, turn, dtype, shape.op) for rank in senders]
        return torch.cat([tile(period, begin, count, dtype) for period in inputs])


def engine_case(shape: Shape, communicator: Communicator, shared: bool) -> Case:
    """A case of syncengine. Only its torch.distributed backend has all_to_all: that runs over torch's default group."""
    call = _torch_call(shape, None) if shape.name == "all_to_all" else _engine_call(shape, communicator)
    empty = (lambda count, dtype: communicator.empty([count], dtype)) if shared else _empty
    return Case(shape, communicator.rank, empty, call)


def gloo_case(shape: Shape, group: dist.ProcessGroup) -> Case:
    """A case of Gloo's process group."""
    return Case(shape, group.rank(), _empty, _torch_call(shape, group))


def _empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="cpu")


def _engine_call(shape: Shape, communicator: Communicator) -> Callable[[torch.Tensor, torch.Tensor], object]:
    op = cast(Op, "product" if shape.op == "prod" else shape.op)
    if shape.name == "broadcast" and shape.root >= shape.ranks:
        raise InvalidUsage(f"--root {shape.root} is no rank of {shape.ranks}")
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "all_reduce": lambda output, input: communicator.all_reduce(input, op),
        "all_gather": lambda output, input: communicator.all_gather(output, input),
        "reduce_scatter": lambda output, input: communicator.reduce_scatter(output, input, op),
        "broadcast": lambda output, input: communicator.broadcast(input, shape.root),
        "barrier": lambda output, input: communicator.barrier(),
    }
    return calls[shape.name]


def _torch_call(shape: Shape, group: dist.ProcessGroup | None) -> Callable[[torch.Tensor, torch.Tensor], object]:
    op = getattr(dist.ReduceOp, "PRODUCT" if shape.op == "prod" else shape.op.upper())
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "all_reduce": lambda output, input: dist.all_reduce(input, op, group),
        "all_gather": lambda output, input: dist.all_gather_into_tensor(output, input, group),
        "reduce_scatter": lambda output, input: dist.reduce_scatter_tensor(output, input, op, group),
        "broadcast": lambda output, input: dist.broadcast(input, shape.root, group),
        "all_to_all": lambda output, input: dist.all_to_all_single(output, input, group=group),
        "barrier": lambda output, input: dist.barrier(group),
    }
    return calls[shape.name]
