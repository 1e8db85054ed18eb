"""hvd.SyncBatchNorm: that of `Parallel`, whose exchanges are announced as all calls are, so that ranks may join."""

from __future__ import annotations

import torch

import syncengine.parallel.sync_batch_norm as engine
from syncengine.horovod.calls import Calls
from syncengine.horovod.process import calls
from syncengine.horovod.requests import Request, dtype_name
from syncengine.parallel.compiled import not_compiled

FORWARD, BACKWARD = "SyncBatchNorm", "backward of SyncBatchNorm"


class SyncBatchNorm(engine.SyncBatchNorm):
    """Normalizes by the mean and variance of all ranks' batches together, each sample counting once.

    A rank that has joined counts as one without samples. Every training forward and its backward are collective.
    """

    @not_compiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes; with other ranks only in training mode and on the CPU."""
        if not self.training or self.process_group is not None:
            return super().forward(input)  # type: ignore[no-any-return]
        with calls().refusing(FORWARD):
            return super().forward(input)  # type: ignore[no-any-return]

    def _communicator(self) -> engine.Exchange:
        if self.process_group is not None:
            return super()._communicator()
        return _Announcing(calls())


class _Announcing:
    """The exchanges of one forward and its backward, among the calls of the script."""

    def __init__(self, stream: Calls) -> None:
        self._stream = stream
        self.size, self.global_ranks = stream.size, stream.communicator.global_ranks

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        announcement = self._stream.announce(_request(FORWARD, input))
        with announcement.explains():
            self._stream.communicator.all_gather(output, input)
        announcement.wait()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        announcement = self._stream.announce(_request(BACKWARD, tensor))
        with announcement.explains():
            self._stream.communicator.all_reduce(tensor.view(-1))  # as it is for those who have joined
        announcement.wait()


def _request(kind: str, values: torch.Tensor) -> Request:
    channels = values.shape[-1]
    return Request(kind, what=f"{channels} channels", flat=[(dtype_name(values.dtype), values.numel())], how="sum")
