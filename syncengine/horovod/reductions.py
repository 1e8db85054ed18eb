"""The reductions that Horovod names, in terms of the engine's."""

import enum
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from syncengine._C import Work
from syncengine.config import Op
from syncengine.errors import InvalidUsage

Begin = Callable[[Any], Sequence[Work]]


class ReduceOp(enum.Enum):
    """How the ranks' tensors become one; the value is the engine's word."""

    Average = "avg"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"


Average, Sum, Min, Max, Product = ReduceOp

_REDUCIBLE = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
)


def check_list(call: str, tensors: Any) -> None:
    """Raises InvalidUsage unless `tensors` is a list of dense tensors, before any other rank hears of the call."""
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise InvalidUsage(f"{call} needs a list of one or more tensors")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidUsage(
                f"{call} needs a tensor, not {'None' if tensor is None else type(tensor).__name__}: of numbers, lists "
                "and arrays make one by torch.as_tensor"
            )
        if tensor.layout != torch.strided:
            raise InvalidUsage(f"{call} needs a dense tensor, not one of layout {tensor.layout}: to_dense() it before")
        if tensor.is_nested or tensor.is_quantized:
            kind = "a nested" if tensor.is_nested else "a quantized"
            raise InvalidUsage(f"{call} needs a dense tensor, not {kind} one: give it what that consists of")
        if tensor.device.type not in ("cpu", "cuda"):
            raise InvalidUsage(f"{call} needs a tensor on the CPU or on a CUDA device, not on {tensor.device}")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor row by row in memory, with signs and conjugation applied; a copy only where that is needed."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def in_order(tensors: Sequence[torch.Tensor], begin: Begin) -> Begin:
    """Makes `begin`, which may run on another thread, use the CUDA streams that are current in this call."""
    streams = [torch.cuda.current_stream(device) for device in {each.device for each in tensors if each.is_cuda}]
    if not streams:
        return begin

    def on_streams(round: Any) -> Sequence[Work]:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            return begin(round)

    return on_streams


def check_reducible(call: str, tensor: Any, op: ReduceOp) -> None:
    """Raises InvalidUsage for a dense tensor that can't be reduced by `op`, before any other rank hears of it."""
    if tensor.dtype not in _REDUCIBLE:
        raise InvalidUsage(f"{call}: dtype {tensor.dtype} is not supported (a complex one: use torch.view_as_real)")
    if tensor.dtype is torch.bool and (op is Sum or op is Average):
        raise InvalidUsage(f"{call}: bool has no {op.name}: use hvd.Min, Max or Product, or convert it to an integer")


def engine_op(dtype: torch.dtype, word: str) -> Op:
    """The op for `word`. The engine can't average integers: it sums them, and `finish_average` divides the sum."""
    op: Op = "sum" if word == "avg" and not dtype.is_floating_point else word  # type: ignore[assignment]
    return op


# Every tensor may be written in inference mode, whichever mode it was made in.
@torch.inference_mode()
def assign(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copies `values` into `target`, which may require a gradient. Autograd records nothing."""
    target.copy_(values)


@torch.inference_mode()
def finish_average(tensor: torch.Tensor, size: int) -> None:
    """Divides a sum of integers in place, toward zero, as Horovod does."""
    tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))


@torch.inference_mode()
def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiplies in place. Products of integers are truncated."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point:
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.to(torch.float64).mul_(factor))


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def wire(dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of `dtype` travels."""
        return dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """`tensor` in the dtype in which it travels, and the context that `decompress` needs."""
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
