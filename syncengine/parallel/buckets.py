"""Which parameters are reduced together, and in which order: pure functions of sizes and of the order of readiness."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

MIB = 1024 * 1024

DDP_CAP = 25 * MIB

Plan = list[list[int]]  # indices of parameters, one list a bucket, in the order in which buckets are expected to fill


@dataclass(frozen=True)
class BucketPlanner:
    """Plans the buckets of one model.

    In ``rank_order`` the bits do not depend on the plan, so it is the fastest: buckets small enough to be reduced
    while their gradients are still in the cache. In ``ring`` they do, and it is DDP's own timeline.
    """

    parameters: Sequence[torch.Tensor]
    first_cap: int  # bytes after which the first bucket is closed
    cap: int  # the same for all others
    follows_ddp: bool
    find_unused_parameters: bool

    @classmethod
    def create(
        cls, parameters: Sequence[torch.Tensor], numerics: str, bucket_cap_mb: float | None, find_unused: bool
    ) -> "BucketPlanner":
        """A planner with the caps that ``numerics`` asks for, or with the user's own."""
        follows_ddp = numerics == "ring"
        if bucket_cap_mb is not None:
            first_cap = cap = int(bucket_cap_mb * MIB)
        else:
            first_cap, cap = MIB, (DDP_CAP if follows_ddp else MIB)
        return cls(parameters, first_cap, cap, follows_ddp, find_unused)

    def with_cap(self, cap: int) -> "BucketPlanner":
        """The same, but for the size of its buckets."""
        return replace(self, first_cap=cap, cap=cap)

    @property
    def rebuilds(self) -> bool:
        """Whether a new plan follows from the first synchronized step's order of readiness.

        Always but where DDP's own does not: with unused parameters.
        """
        return not (self.follows_ddp and self.find_unused_parameters)

    def initial(self, trainable: Sequence[int]) -> Plan:
        """The plan before any order of readiness is known; ``trainable`` in order of registration."""
        if not self.follows_ddp:  # backward mostly runs in reverse
            return self._assign(trainable[::-1], [self.first_cap, self.cap])
        if not self.find_unused_parameters:
            caps = [sys.maxsize]
        else:
            caps = [self.first_cap, self.cap] if self.first_cap < self.cap else [self.cap]
        # As DDP: buckets of neighbors from the front, then the list of buckets reversed.
        relative = dist._compute_bucket_assignment_by_size([self.parameters[i] for i in trainable], caps)[0]
        return [[trainable[i] for i in bucket] for bucket in reversed(relative)]

    def rebuilt(self, order: Sequence[int]) -> Plan:
        """The plan for parameters that become ready in ``order``."""
        return self._assign(order, [self.first_cap, self.cap])

    def _assign(self, order: Sequence[int], caps: list[int]) -> Plan:
        """Cuts ``order`` into buckets of one dtype, each closed as soon as it holds its cap."""
        tensors = [self.parameters[i] for i in order]
        return dist._compute_bucket_assignment_by_size(tensors, caps, [], list(order))[0]
