"""The stream of one DistributedOptimizer: which gradients are reduced together, and in which order, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from syncengine._C import Communicator, Work
from syncengine.horovod.reductions import ReduceOp, engine_op
from syncengine.horovod.requests import Request
from syncengine.horovod.streams import Round, Stream

MIB = 1024 * 1024
_CAP = MIB  # bytes after which a bucket is closed
LARGE = MIB // 4  # bytes from which on a gradient goes alone, if possible where it lies

Plan = list[list[int]]  # indices of parameters, one list a bucket, in the order in which buckets are reduced


def plan_buckets(order: Sequence[int], sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Plan:
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


class GradientStream(Stream):
    """Reduces buckets of gradients, each as one flat tensor.

    It has a communicator of its own, so a script may call other collectives between backward and step. Every step
    begins with one announcement; then every rank reduces all buckets of the plan, in its order.
    """

    def __init__(
        self,
        communicator: Communicator,
        name: str,
        like: Sequence[torch.Tensor],
        wire: Callable[[torch.dtype], torch.dtype],
        op: ReduceOp,
        groups: Plan | None,
    ) -> None:
        super().__init__(communicator)
        self.name = name
        self._elements: list[int] = []
        self._bytes: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._wire = wire
        self._op = op
        self._grouped = groups is not None
        self.plan: Plan = []
        self.extend(like)
        self.plan = groups or self.plan

    def extend(self, like: Sequence[torch.Tensor]) -> None:
        """More parameters, in buckets behind the others."""
        first = len(self._elements)
        self._elements += [tensor.numel() for tensor in like]
        self._bytes += [tensor.nbytes for tensor in like]
        self._dtypes += [tensor.dtype for tensor in like]
        newcomers = range(first, len(self._elements))[::-1]  # backward mostly runs in reverse
        self.plan = [*self.plan, *plan_buckets(newcomers, self._bytes, self._dtypes)]
        self._fixed = self._grouped

    def request(self, kind: str = "step", what: str = "") -> Request:
        """How a step is announced."""
        return Request(kind, self.name, what)

    def elements(self, bucket: int) -> int:
        """Of all its gradients."""
        return sum(self._elements[i] for i in self.plan[bucket])

    def wire(self, bucket: int) -> torch.dtype:
        """In which it travels."""
        return self._wire(self._dtypes[self.plan[bucket][0]])

    def reduce(self, flat: torch.Tensor) -> Work:
        """Starts to reduce the next bucket in place."""
        return self.communicator.all_reduce(flat, engine_op(flat.dtype, self._op), async_op=True)

    def end_step(self, order: Sequence[int]) -> bool:
        """Plans anew after the first step: for rank 0's `order` of readiness. Returns whether it did. Collective."""
        if self._fixed:
            return False
        self._fixed = True
        agreed = torch.tensor(order or range(len(self._elements))[::-1], dtype=torch.int64, device="cpu")
        self.communicator.broadcast(agreed, 0)
        self.plan = plan_buckets(agreed.tolist(), self._bytes, self._dtypes)
        return True

    def shadow(self, round: Round) -> None:
        """A step of the others: adds zeros to it."""
        if round.agreed is not None and round.agreed.kind != "step":
            self.refuse_joined(round)
        flats = [
            torch.zeros(self.elements(bucket), dtype=self.wire(bucket), device="cpu")
            for bucket in range(len(self.plan))
        ]
        for work in [self.reduce(flat) for flat in flats]:
            work.wait()
        self.end_step([])
