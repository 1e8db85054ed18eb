"""hvd.SyncBatchNorm: `Parallel`'s layer, which announces its exchanges like calls, so that it works beside join()."""

from collections.abc import Callable
from typing import cast

import torch

import syncengine.parallel.sync_batch_norm as engine
from syncengine._C import Communicator, Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.calls import Calls
from syncengine.horovod.process_sets import ProcessSet, global_process_set, refusing, stream_of
from syncengine.horovod.requests import dtype_name
from syncengine.horovod.streams import Plan
from syncengine.parallel.compiled import not_compiled

FORWARD, BACKWARD = "SyncBatchNorm", "backward of SyncBatchNorm"


class SyncBatchNorm(engine.SyncBatchNorm):
    """Normalizes by the mean and variance of all ranks' batches together, each sample counting once.

    A rank that has joined counts as a rank without samples. All ranks run each training forward and its backward.
    The arguments are Horovod's, then torch's `device` and `dtype`.
    """

    process_set: ProcessSet | None = global_process_set

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet | None = global_process_set,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(process_set, ProcessSet | None):
            raise InvalidUsage(f"SyncBatchNorm: process_set={process_set!r} is no hvd.ProcessSet")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, None, device, dtype)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: object = None) -> torch.nn.Module:
        """Converts as torch does, but into these layers: torch's own would silently exchange nothing here."""
        converted: torch.nn.Module = super().convert_sync_batchnorm(module, process_group)  # type: ignore[no-untyped-call]
        for layer in converted.modules():
            if type(layer) is torch.nn.SyncBatchNorm:
                layer.__class__ = cls
        return converted

    @not_compiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes by all ranks' samples in training on the CPU, else as torch does: on CUDA by torch.distributed."""
        if not self.training or self.process_group is not None:
            return super().forward(input)  # type: ignore[no-any-return]
        with refusing(self.process_set, FORWARD):
            return super().forward(input)  # type: ignore[no-any-return]

    def _communicator(self) -> Communicator:
        if self.process_group is not None:
            return super()._communicator()
        return cast(Communicator, _Announcing(stream_of(self.process_set, FORWARD)))


class _Announcing:
    """The communicator of a layer in one forward and its backward: announces each exchange among the script's calls."""

    def __init__(self, stream: Calls) -> None:
        self._stream = stream
        self.size, self.global_ranks = stream.size, stream.communicator.global_ranks

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self._run(FORWARD, input, lambda: self._stream.communicator.all_gather(output, input, async_op=True))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        flat = tensor.view(-1)  # flat, as on ranks that have joined
        self._run(BACKWARD, tensor, lambda: self._stream.communicator.all_reduce(flat, async_op=True))

    def _run(self, kind: str, values: torch.Tensor, begin: Callable[[], Work]) -> None:
        flat = ((dtype_name(values.dtype), values.numel()),)
        plan = Plan(f"{values.shape[-1]} channels", flat, "sum", begin=lambda _: [begin()])
        self._stream.submit(kind, None, plan).result()
