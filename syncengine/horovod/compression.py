"""`hvd.Compression`: the dtype in which gradients travel."""

from __future__ import annotations

from typing import Any

import torch


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def wire(dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of `dtype` travels."""
        return dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """`tensor` as it travels, and what `decompress` needs."""
        return tensor.to(cls.wire(tensor.dtype)), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in its own dtype."""
        return tensor.to(ctx)


class FP16Compressor(NoneCompressor):
    """Floating tensors travel in float16. The engine adds and averages them in float32, and rounds once."""

    @staticmethod
    def wire(dtype: torch.dtype) -> torch.dtype:
        """float16 for floating dtypes."""
        return torch.float16 if dtype.is_floating_point else dtype


class Compression:
    """The choices for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
