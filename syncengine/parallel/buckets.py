"""Plans of buckets, as pure functions of the sizes of gradients and of the order in which they become ready."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

MIB = 1024 * 1024

DDP_CAP = 25 * MIB

Plan = list[list[int]]  # indices of parameters, one list a bucket, in the order in which buckets are expected to fill


@dataclass(frozen=True)
class BucketPlanner:
    """Plans the buckets of one model.

    With ``rank_order`` no bit of an average depends on the plan, so buckets have the fastest size: small enough that
    gradients are reduced while still in the cache, and that something crosses between hosts soon. With ``ring`` bits do
    depend on it, so its plans are DDP's. A communication hook sees the buckets, so it gets DDP's plans, too.
    """

    parameters: Sequence[torch.Tensor]
    sparse: Sequence[bool]  # whether each parameter's gradient is sparse, and goes alone
    caps: tuple[int, ...]  # bytes after which each bucket is closed; the last one for all that follow
    follows_ddp: bool
    looks_for_unused: bool  # whether each forward looks for unused parameters
    given_caps: bool  # whether the user gave a cap for each bucket

    @classmethod
    def create(
        cls,
        parameters: Sequence[torch.Tensor],
        sparse: Sequence[bool],
        follows_ddp: bool,
        looks_for_unused: bool,
        bucket_cap_mb: float | None,
        bucket_cap_mb_list: Sequence[float] | None,
        in_cache: bool = True,
        between_hosts: bool = False,
    ) -> "BucketPlanner":
        """Makes a planner with the user's caps on the size of buckets, or with caps of its own.

        `in_cache`: the processor that made the gradients reduces them where they lie, best in small buckets.
        `between_hosts`: they cross a network, idle until the first bucket is full, so a small model gets smaller ones.
        """
        if bucket_cap_mb_list:
            caps = tuple(int(cap * MIB) for cap in bucket_cap_mb_list)
        elif bucket_cap_mb is not None:
            caps = (int(bucket_cap_mb * MIB),)
        elif not in_cache or follows_ddp:
            caps = (MIB, DDP_CAP)
        else:
            part = sum(p.nbytes for p in parameters) // 4 if between_hosts else MIB
            caps = (min(max(part, MIB // 4), MIB),)
        return cls(parameters, sparse, caps, follows_ddp, looks_for_unused, bool(bucket_cap_mb_list))

    @property
    def cap(self) -> int:
        """The value of the attribute ``bucket_bytes_cap`` that DDP has."""
        return max(self.caps) if self.given_caps else self.caps[-1]

    @property
    def rebuilds(self) -> bool:
        """Whether a new plan is made after the first synchronized step, by the order in which gradients were ready."""
        return not (self.follows_ddp and self.looks_for_unused)  # DDP makes no new plan then

    def initial(self, trainable: Sequence[int]) -> Plan:
        """The plan before any order of readiness is known. ``trainable``: parameters in the order of registration."""
        if not self.follows_ddp:  # backward mostly runs in reverse
            return self.rebuilt(trainable[::-1])
        caps = self.caps if self.given_caps or self.looks_for_unused else (sys.maxsize,)
        # DDP takes neighbors from the front into buckets, and then reverses the list of buckets.
        return sorted(assign(trainable, self.parameters, caps, self.sparse), key=min, reverse=True)

    def rebuilt(self, order: Sequence[int]) -> Plan:
        """The plan for parameters that become ready in ``order``."""
        return assign(order, self.parameters, self.caps, self.sparse)


def assign(
    order: Sequence[int], parameters: Sequence[torch.Tensor], caps: Sequence[int], alone: Sequence[bool]
) -> Plan:
    """Cuts ``order`` into buckets of one dtype, each closed as soon as it holds its cap.

    A parameter that is marked in ``alone`` gets a bucket of its own. Buckets are sorted by when they fill: torch
    returns those below their caps in hash order, which depends on the device's number, and so on the rank.
    """
    if not order:  # all are frozen
        return []
    tensors, lonely = [parameters[i] for i in order], [alone[i] for i in order]
    plan = dist._compute_bucket_assignment_by_size(tensors, list(caps), lonely, list(range(len(order))))[0]
    return [[order[i] for i in bucket] for bucket in sorted(plan, key=max)]


def sparse_parameters(module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> list[bool]:
    """For each parameter: whether the first module that has it is an embedding with sparse gradients."""
    owners: dict[torch.Tensor, torch.nn.Module] = {}
    for submodule in module.modules():
        for parameter in submodule.parameters(recurse=False):
            owners.setdefault(parameter, submodule)
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [isinstance(owner := owners.get(p), kinds) and bool(owner.sparse) for p in parameters]
