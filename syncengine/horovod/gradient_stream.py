"""The stream of one DistributedOptimizer: which gradients are reduced together, and in which order, on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncengine._C import Communicator, Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.calls import gather, table
from syncengine.horovod.collective import Compressor
from syncengine.horovod.reductions import Average, Compression, ReduceOp, Sum, engine_op
from syncengine.horovod.requests import Request
from syncengine.horovod.streams import Operation, Plan, Stream
from syncengine.parallel.buckets import MIB, assign

LARGE = MIB // 4  # bytes from which on a gradient goes alone, if possible where it lies

Groups = int | Sequence[Sequence[torch.Tensor]] | None  # of parameters: how many groups, or their parameters
Buckets = list[list[int]]  # indices of parameters, one list a bucket, in the order in which buckets are reduced


@dataclass(frozen=True)
class Settings:
    """The arguments of a DistributedOptimizer, the same on all ranks. Raises InvalidUsage for unsupported ones."""

    compression: Compressor
    passes: int
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    groups: Groups

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum):
            raise InvalidUsage(f"DistributedOptimizer(op={self.op!r}) is not supported: give hvd.Average or hvd.Sum")
        if self.predivide != 1.0 and self.op is not Average:
            raise InvalidUsage("gradient_predivide_factor needs op=hvd.Average: it splits the average's division")
        if self.compression not in (Compression.none, Compression.fp16):
            raise InvalidUsage(
                f"compression={self.compression!r} is not supported: give hvd.Compression.none or fp16, or wrap the "
                "model in syncengine.Parallel, whose communication hooks may do anything"
            )
        if not isinstance(self.passes, int) or self.passes < 1:
            raise InvalidUsage(f"backward_passes_per_step={self.passes!r} must be a whole number from 1 on")

    def __str__(self) -> str:
        return (
            f"backward_passes_per_step={self.passes}, op={self.op.name}, compression={self.compression.__name__}, "
            f"gradient_predivide_factor={float(self.predivide)!r}, sparse_as_dense={self.sparse_as_dense}"
        )


class GradientStream(Stream):
    """Reduces buckets of gradients, each as one flat tensor.

    The stream has a communicator of its own, so a script may call other collectives between backward and step. A step
    begins with one announcement on each rank; buckets do not wait until all ranks have made it. Then every rank reduces
    all buckets of the plan, in the plan's order, and gathers the gradients in `sparse`.
    """

    joinable = frozenset(("step",))

    def __init__(
        self,
        communicator: Communicator,
        name: str,
        like: Sequence[torch.Tensor],
        settings: Settings,
        groups: Buckets | None,
    ) -> None:
        super().__init__(communicator)
        self.name = name
        self._like: list[torch.Tensor] = []  # the parameters, without their elements
        self._wire_dtype = settings.compression.wire
        self._op = settings.op if settings.predivide == 1.0 else Sum
        self._grouped = groups is not None
        self.sparse: list[int] = []  # parameters with sparse gradients: known after the first step
        self.plan: Buckets = []
        self.extend(like)
        self.plan = groups or self.plan

    def extend(self, like: Sequence[torch.Tensor]) -> None:
        """Appends parameters to the plan, in new buckets behind the others."""
        first = len(self._like)
        self._like += [torch.empty_like(tensor, device="meta") for tensor in like]
        newcomers = range(first, len(self._like))[::-1]  # backward mostly runs in reverse
        self.plan = [*self.plan, *self._buckets(newcomers)]
        self._fixed = self._grouped

    def _buckets(self, order: Sequence[int]) -> Buckets:
        """Buckets for gradients in `order` of readiness, closed at 1 MiB. A gradient of 256 KiB or more goes alone."""
        return assign(order, self._like, [MIB], [tensor.nbytes >= LARGE for tensor in self._like])

    def announce(self, kind: str = "step", what: str = "") -> Operation:
        """Tells all ranks of this rank's next step, without waiting for theirs."""
        refused, self.refused = self.refused, None
        if refused is not None:  # the step before: waits until it is known whether all ranks have
            refused.result()
        return self.submit(kind, None, Plan(f"{self.name}{what and ', '}{what}"))

    def elements(self, bucket: int) -> int:
        """The number of elements of all gradients in a bucket."""
        return sum(self._like[i].numel() for i in self.plan[bucket])

    def wire(self, bucket: int) -> torch.dtype:
        """The dtype in which a bucket travels."""
        return self._wire_dtype(self._like[self.plan[bucket][0]].dtype)

    def reduce(self, flat: torch.Tensor) -> Work:
        """Starts to reduce the next bucket in place."""
        return self.communicator.all_reduce(flat, engine_op(flat.dtype, self._op._value_), async_op=True)

    def gather_sparse(self, i: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """The sum of all ranks' gradients of parameter `i`, which are sparse. None counts as zeros."""
        own = torch.zeros_like(self._like[i], device="cpu").to_sparse(1) if gradient is None else gradient
        dims = own.sparse_dim() or 1  # of the result: in one of them all ranks' fit together
        own = own if own.layout == torch.sparse_coo and dims == 1 else own.to_dense().to_sparse(1)
        counts = [count for (count,) in table(self.communicator, [own._nnz()])]
        (at, moving), (values, more) = (
            gather(self.communicator, part.detach().cpu().contiguous(), counts)
            for part in (own._indices().t(), own._values())
        )
        for work in [*moving, *more]:
            work.wait()
        total = torch.sparse_coo_tensor(at.t(), values, own.shape).to(own.device)
        return total if dims == 1 else total.to_dense().to_sparse(dims)

    def end_step(self, order: Sequence[int], sparse: Sequence[int] = ()) -> bool:
        """Plans the buckets anew after the first step with these parameters, unless the user has given groups.

        The plan follows rank 0's `order`, in which gradients became ready there, without those that were `sparse` on
        some rank. Returns whether there is a new plan. All ranks call it.
        """
        if self._fixed:
            return False
        self._fixed = True
        count = len(self._like)
        flags = torch.zeros(count, dtype=torch.uint8, device="cpu")
        flags[list(sparse)] = 1
        self.communicator.all_reduce(flags, "max")
        agreed = torch.tensor(order or range(count)[::-1], dtype=torch.int64, device="cpu")
        self.communicator.broadcast(agreed, 0)
        self.sparse = flags.nonzero().view(-1).tolist()
        self.plan = self._buckets([i for i in agreed.tolist() if i not in self.sparse])
        return True

    def shadow(self, request: Request) -> Sequence[Work]:
        """Takes part in a step of the other ranks, with zeros for gradients."""
        buckets = range(len(self.plan))
        flats = [torch.zeros(self.elements(bucket), dtype=self.wire(bucket), device="cpu") for bucket in buckets]
        for work in [self.reduce(flat) for flat in flats]:
            work.wait()
        for i in self.sparse:
            self.gather_sparse(i, None)
        self.end_step([])
        return ()
