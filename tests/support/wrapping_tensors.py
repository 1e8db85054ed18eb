"""Small subclasses of tensors that stand for those of torchao, bitsandbytes and others."""

from typing import Any

import torch
from torch import nn

aten = torch.ops.aten


class Opaque(torch.Tensor):
    """Integers and a scale, which nobody else knows of. A view or a copy of it is an ordinary tensor."""

    values: torch.Tensor
    scale: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> "Opaque":
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if function in (aten.detach.default, aten.alias.default):
            return type(first)(first.values, first.scale)
        if function is aten.clone.default:
            return type(first)(first.values.clone(), first.scale.clone())
        if function is aten.copy_.default and isinstance(first, Opaque):
            first.values.copy_((_plain(args[1]) / _plain(first.scale)).round())
            return first
        if function in (aten.view.default, aten.t.default, aten.mm.default, aten.addmm.default, aten.cat.default):
            return function(*map(_plain, args))
        raise NotImplementedError(f"{cls.__name__} has no {function}")


class Quantized(Opaque):
    """Tells what it holds, as torchao's."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], {"bits": 8}

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "Quantized":
        return Quantized(inner["values"], inner["scale"])


class Locked(Opaque):
    """Nothing can be copied into it."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.copy_.default:
            raise NotImplementedError("weights are locked")
        return super().__torch_dispatch__(function, types, args, kwargs)


class Packed(nn.Parameter):
    """Bytes in memory of its own, and a state beside them, as bitsandbytes'."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> "Packed":
        packed = torch.Tensor._make_subclass(cls, data, requires_grad)
        packed.quant_state = "absmax"
        return packed


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return _plain(value.values).float() * _plain(value.scale) if isinstance(value, Opaque) else value


def content(tensor: torch.Tensor) -> bytes:
    """All of its bits."""
    if isinstance(tensor, Opaque):
        return content(tensor.values) + content(tensor.scale)
    flat = tensor.detach().as_subclass(torch.Tensor).contiguous().view(-1)
    return b"meta" if tensor.is_meta else bytes(flat.view(torch.uint8).tolist())


def tensor_of(kind: str, seed: int) -> torch.Tensor:
    """One of 8 x 8, or of a size that travels alone."""
    generator = torch.Generator().manual_seed(seed)
    extent = 200 if kind.endswith("large") else 8
    numbers = torch.randint(-9, 9, (extent, extent), generator=generator, dtype=torch.int8)
    scale = torch.tensor(0.125)
    if kind == "nested":
        codes = torch.randint(1, 9, (), generator=generator, dtype=torch.int8)
        return Quantized(numbers, Quantized(codes, scale))
    if kind.startswith(("opaque", "quantized", "locked")):
        cls = {"opaque": Opaque, "quantized": Quantized, "locked": Locked}[kind.partition("_")[0]]
        return cls(numbers, scale)
    if kind == "packed":
        return Packed(numbers.view(torch.uint8))
    if kind in ("uint4", "int2", "float4_e2m1fn_x2", "bits8"):
        return numbers.view(torch.uint8).view(getattr(torch, kind))
    if kind == "meta":
        return numbers.to("meta")
    if kind.startswith("complex"):
        return torch.complex(numbers.float(), -numbers.float()).to(getattr(torch, kind))
    return numbers.to(getattr(torch, kind))


class Beside(nn.Module):
    """Trains a layer beside a frozen tensor, of which each rank has another."""

    def __init__(self, kind: str, place: str, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, odd = nn.Linear(8, 8), tensor_of(kind, rank)
        if place == "buffer":
            self.register_buffer("odd", odd)
        else:
            self.odd = odd if isinstance(odd, Packed) else nn.Parameter(odd, requires_grad=place == "trained")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self.odd if self.odd.dtype == torch.float32 and self.odd.shape == (8, 8) else self.layer.weight
        return self.layer(x) + nn.functional.linear(x, used)
