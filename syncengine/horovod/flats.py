"""The buckets of one DistributedOptimizer as tensors: in memory that the peers read, or where large gradients lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncengine._C import owns_gradient
from syncengine.horovod.gradient_stream import LARGE, GradientStream


class Flat:
    """One bucket, with a view for each of its gradients."""

    def __init__(self, values: torch.Tensor, like: Sequence[torch.Tensor]) -> None:
        self.values = values
        self.views = [
            part.view(tensor.shape) for part, tensor in zip(values.split([t.numel() for t in like]), like, strict=True)
        ]


class Flats:
    """All of them, as long as the plan stays."""

    def __init__(self, stream: GradientStream) -> None:
        self._stream = stream
        self._kept: dict[int, Flat] = {}  # of what is copied

    def clear(self) -> None:
        """There is another plan, or none."""
        self._kept.clear()

    def fill(self, bucket: int, gradients: list[torch.Tensor], first: torch.Tensor) -> Flat:
        """The bucket with these gradients; `first`: the parameter of the first one."""
        wire = self._stream.wire(bucket)
        if _lies_alone(gradients, wire) and owns_gradient(first):
            return Flat(gradients[0].view(-1), gradients)
        flat = self._kept.get(bucket)
        if flat is None:
            elements = self._stream.elements(bucket)
            if gradients[0].device.type == "cpu":
                values = self._stream.communicator.empty([elements], wire)
            else:
                values = torch.empty(elements, dtype=wire, device=gradients[0].device)
            flat = self._kept[bucket] = Flat(values, gradients)
        torch._foreach_copy_(flat.views, gradients)
        return flat


def _lies_alone(gradients: list[torch.Tensor], wire: torch.dtype) -> bool:
    """Whether the bucket is one gradient that can be reduced where it lies, if nobody else sees it."""
    if len(gradients) > 1 or gradients[0].nbytes < LARGE:
        return False
    return gradients[0].dtype == wire and gradients[0].is_contiguous()
