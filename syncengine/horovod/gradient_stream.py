"""The stream of one DistributedOptimizer: which gradients are reduced together, and in which order, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncengine._C import Communicator, Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.calls import gather
from syncengine.horovod.collective import Compressor
from syncengine.horovod.reductions import Average, Compression, ReduceOp, Sum, engine_op
from syncengine.horovod.streams import Operation, Plan, Round, Stream

MIB = 1024 * 1024
_CAP = MIB  # bytes after which a bucket is closed
LARGE = MIB // 4  # bytes from which on a gradient goes alone, if possible where it lies

Buckets = list[list[int]]  # indices of parameters, one list a bucket, in the order in which buckets are reduced


def plan_buckets(order: Sequence[int], sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Buckets:
    """Buckets of one dtype for gradients that become ready in `order`, in the order in which they fill.

    `sizes`: in bytes.
    """
    closed: list[list[tuple[int, int]]] = []  # of (position in `order`, index)
    open_buckets: dict[torch.dtype, list[tuple[int, int]]] = {}
    for position, i in enumerate(order):
        if sizes[i] >= LARGE:
            closed.append([(position, i)])
            continue
        bucket = open_buckets.setdefault(dtypes[i], [])
        bucket.append((position, i))
        if sum(sizes[j] for _, j in bucket) >= _CAP:
            closed.append(open_buckets.pop(dtypes[i]))
    closed.extend(open_buckets.values())
    return [[i for _, i in bucket] for bucket in sorted(closed, key=lambda bucket: bucket[-1][0])]


@dataclass(frozen=True)
class Settings:
    """What a DistributedOptimizer was asked for, on all ranks alike. Raises InvalidUsage for what is not supported."""

    compression: Compressor
    passes: int
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool

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
        check_passes(self.passes)

    def __str__(self) -> str:
        return (
            f"backward_passes_per_step={self.passes}, op={self.op.name}, compression={self.compression.__name__}, "
            f"gradient_predivide_factor={float(self.predivide)!r}, sparse_as_dense={self.sparse_as_dense}"
        )


def check_passes(passes: int) -> None:
    """Raises InvalidUsage for what is no number of backwards."""
    if not isinstance(passes, int) or passes < 1:
        raise InvalidUsage(f"backward_passes_per_step={passes!r} must be a whole number from 1 on")


class GradientStream(Stream):
    """Reduces buckets of gradients, each as one flat tensor.

    It has a communicator of its own, so a script may call other collectives between backward and step. Every step
    begins with one announcement, for which its buckets do not wait; then every rank reduces all buckets of the plan, in
    its order, and gathers the gradients in `sparse`.
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
        self._elements: list[int] = []
        self._bytes: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._wire = settings.compression.wire
        self._op = settings.op if settings.predivide == 1.0 else Sum
        self._grouped = groups is not None
        self._refusals: list[Operation] = []
        self.sparse: list[int] = []  # of the parameters: known after the first step
        self._shapes: list[torch.Size] = []
        self.plan: Buckets = []
        self.extend(like)
        self.plan = groups or self.plan

    def extend(self, like: Sequence[torch.Tensor]) -> None:
        """More parameters, in buckets behind the others."""
        first = len(self._elements)
        self._elements += [tensor.numel() for tensor in like]
        self._bytes += [tensor.nbytes for tensor in like]
        self._dtypes += [tensor.dtype for tensor in like]
        self._shapes += [tensor.shape for tensor in like]
        newcomers = range(first, len(self._elements))[::-1]  # backward mostly runs in reverse
        self.plan = [*self.plan, *plan_buckets(newcomers, self._bytes, self._dtypes)]
        self._fixed = self._grouped

    def announce(self, kind: str = "step", what: str = "") -> Operation:
        """Tells all ranks of this rank's next step; does not wait for theirs, unless this rank has refused the one
        before: then it begins nothing before it knows that all have.
        """
        for operation in self._refusals:
            operation.result()
        self._refusals.clear()
        return self.submit(kind, None, Plan(f"{self.name}{what and ', '}{what}"))

    def refuse(self, error: Exception, call: str, kind: str = "", name: str | None = None) -> Operation | None:
        """See Stream."""
        refusal = super().refuse(error, call, kind, name)
        self._refusals += [refusal] if refusal is not None else []
        return refusal

    def elements(self, bucket: int) -> int:
        """Of all its gradients."""
        return sum(self._elements[i] for i in self.plan[bucket])

    def wire(self, bucket: int) -> torch.dtype:
        """In which it travels."""
        return self._wire(self._dtypes[self.plan[bucket][0]])

    def reduce(self, flat: torch.Tensor) -> Work:
        """Starts to reduce the next bucket in place."""
        return self.communicator.all_reduce(flat, engine_op(flat.dtype, self._op._value_), async_op=True)

    def gather_sparse(self, i: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """The sum of all ranks' gradients of parameter `i`, which are sparse, or None: they count as zeros then."""
        shape, dtype = self._shapes[i], self._dtypes[i]
        own = torch.zeros(shape, dtype=dtype, device="cpu").to_sparse(1) if gradient is None else gradient
        if own.layout != torch.sparse_coo:
            own = own.to_sparse(1)
        layout = torch.zeros(self.size, 2, dtype=torch.int64, device="cpu")  # of each rank: how many, and of how many
        mine = torch.tensor([own._nnz(), own.sparse_dim()], dtype=torch.int64, device="cpu")
        self.communicator.all_gather(layout, mine)
        dims = {dims for count, dims in layout.tolist() if count} or {1}
        if len(dims) > 1:
            raise InvalidUsage(f"gradients of parameter {i} are sparse in {dims} dimensions on different ranks")
        (sparse_dim,) = dims
        total = int(layout[:, 0].sum())
        at = torch.empty(total, sparse_dim, dtype=torch.int64, device="cpu")
        values = torch.empty(total, *shape[sparse_dim:], dtype=dtype, device="cpu")
        row = values[:1].nbytes if total else 0
        counts = layout[:, 0].tolist()
        for whole, part, size in ((at, own._indices().t(), 8 * sparse_dim), (values, own._values(), row)):
            data = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
            for work in gather(self.communicator, whole.view(-1).view(torch.uint8), data, [n * size for n in counts]):
                work.wait()
        return torch.sparse_coo_tensor(at.t(), values, shape).to(own.device)

    def end_step(self, order: Sequence[int], sparse: Sequence[int] = ()) -> bool:
        """Plans anew after the first step: for rank 0's `order` of readiness, without those that were `sparse` on some
        rank. Returns whether it did. Collective.
        """
        if self._fixed:
            return False
        self._fixed = True
        count = len(self._elements)
        flags = torch.zeros(count, dtype=torch.uint8, device="cpu")
        flags[list(sparse)] = 1
        self.communicator.all_reduce(flags, "max")
        agreed = torch.tensor(order or range(count)[::-1], dtype=torch.int64, device="cpu")
        self.communicator.broadcast(agreed, 0)
        self.sparse = flags.nonzero().view(-1).tolist()
        dense = [i for i in agreed.tolist() if i not in self.sparse]
        self.plan = plan_buckets(dense, self._bytes, self._dtypes)
        return True

    def shadow(self, round: Round) -> Sequence[Work]:
        """A step of the others: adds zeros to it."""
        flats = [
            torch.zeros(self.elements(bucket), dtype=self.wire(bucket), device="cpu")
            for bucket in range(len(self.plan))
        ]
        for work in [self.reduce(flat) for flat in flats]:
            work.wait()
        for i in self.sparse:
            self.gather_sparse(i, None)
        self.end_step([])
        return ()
