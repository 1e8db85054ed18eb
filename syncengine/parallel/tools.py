"""What torch and other tools ask of a DDP model, mostly by private names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from syncengine._C import Communicator, Reducer
from syncengine.errors import InvalidUsage
from syncengine.parallel.delayed import DelayedParameters
from syncengine.parallel.groups import Group, check_group, resolve_group
from syncengine.parallel.replication import StateBroadcast


class ForTools(DistributedDataParallel):
    """To be inherited from."""

    communicator: Communicator
    reducer: Reducer  # if `_reduces`
    _reduces: bool
    _delayed: DelayedParameters | None

    @property
    def broadcast_buffers(self) -> bool:
        """DDP's older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def _distributed_rank(self) -> int:
        return self.communicator.rank

    def sync_stats(self) -> dict[str, Any]:
        """What the last synchronized backward moved.

        ``backwards`` (so far), ``buckets``, ``reduced_bytes``, and ``copied_bytes`` by the reason for which gradients
        could not be reduced where autograd left them.
        """
        return self.reducer.statistics()

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """For hooks on buffers, by DDP's ``_default_broadcast_coalesced``; ``buffer_size`` has no effect."""
        StateBroadcast(self.communicator, tensors)(authoritative_rank)

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _remove_autograd_hooks(self) -> None:
        self.reducer._remove_autograd_hooks()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Times the first 10 steps for ``_get_ddp_logging_data``, and then one of ``sample_rate``."""
        if sample_rate < 1:
            self._log_and_throw(InvalidUsage, "DDP runtime logging sample rate should be equal or greater than 1")
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _update_process_group(self, new_process_group: Group) -> None:
        """From now on gradients are averaged over another group. Ranks that are not in it stay as they are."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        check_group(new_process_group)
        self._remove_autograd_hooks()
        self.communicator, self.process_group = resolve_group(new_process_group, None)
        self._build_reducer()
        if self._delayed is not None:
            self._delayed.communicator = self.communicator
