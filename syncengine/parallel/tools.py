"""What torch and other tools expect of a DDP model, mostly by private names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncengine.errors import InvalidUsage
from syncengine.parallel.broadcast import broadcast_named
from syncengine.parallel.groups import check_group, resolve_group
from syncengine.parallel.logging import Logger
from syncengine.parallel.model import Model
from syncengine.parallel.reducer import ModelReducer
from syncengine.parallel.summary import stats_of


class ForTools(Model):
    """To be inherited from."""

    logger: Logger
    reducer: ModelReducer  # a NoReducer unless `_reduces`

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

        ``backwards`` (so far), ``buckets``, ``reduced_bytes``, ``copied_bytes`` by the reason for which gradients could
        not be reduced where autograd left them, ``staged_bytes`` by the reason for which this rank's did not lie where
        peers reduce them in place, and ``shortage``: with the numbers, why no more memory could be had for them, or "".
        """
        return self.reducer.statistics()

    def stats(self) -> dict[str, float]:
        """Numbers for a logger (``self.log_dict(model.stats())``); the same keys at any time, 0 for what is not known.

        ``steps``: synchronized backwards that ended well. Medians of the last 1024, in milliseconds: ``step_ms``, from
        the end of one backward to the end of the next, and ``exposed_sync_ms``, how long the host waited at its end for
        averages (on CUDA streams wait, not the host); ``exposed_sync_percent`` of a step. ``total_reduced_bytes`` of
        all steps. Of the last step: ``reduced_bytes``, ``copied_bytes``, ``staged_bytes`` and ``buckets``, as
        ``sync_stats``. Of this rank; does not communicate.
        """
        return stats_of(self)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """For hooks on buffers, by DDP's ``_default_broadcast_coalesced``; ``buffer_size`` has no effect."""
        names = {id(buffer): name for name, buffer in self.named_module_buffers.items()}
        named = [(names.get(id(tensor), f"tensor {i}"), tensor) for i, tensor in enumerate(tensors)]
        broadcast_named(self.communicator, "the tensors of a hook on buffers", named, self.device, authoritative_rank)

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _remove_autograd_hooks(self) -> None:
        self.reducer._remove_autograd_hooks()
        if self._delayed is not None:
            self._delayed.remove_hook()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Times the first 10 steps for ``_get_ddp_logging_data``, and then one of ``sample_rate``."""
        if sample_rate < 1:
            self._log_and_throw(InvalidUsage, "DDP runtime logging sample rate should be equal or greater than 1")
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)
        self.logger._set_sample_rate(sample_rate)

    def _update_process_group(self, new_process_group: Any) -> None:
        """From now on gradients are averaged over another group. Ranks that are not in it stay as they are."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        check_group(new_process_group)
        self.reducer._remove_autograd_hooks()
        self._number = None  # of the ranks before
        self.communicator, self.process_group = resolve_group(new_process_group, None)
        self._build_reducer()
        if self._delayed is not None:
            self._delayed.communicator = self.communicator
