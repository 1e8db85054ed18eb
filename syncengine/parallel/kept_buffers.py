"""Keeps the buffers of a model as they are when a step begins, puts them back, and copies one rank's to the others."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from typing import Any

import torch

from syncengine._C import Communicator
from syncengine._sending import pack, unpack
from syncengine.parallel.buffers import Buffers
from syncengine.parallel.replication import broadcast_bytes, is_freed, is_wrapper

# OfModule: a module's own buffers, and the names of those in no state_dict. OfModules: these of all modules, by path.
OfModule = tuple[dict[str, torch.Tensor | None], list[str]]
OfModules = dict[str, OfModule]

_VALUES = b"values"

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class KeptBuffers:
    """The buffers of ``module`` that are not ``ignored``, and copies of their values.

    Buffers that a forward has written are found by their values, since ``batch_norm`` does not change their versions.
    With ``most``, only dense buffers in this machine's memory are copied, and none if together they have more bytes
    than that. ``before``: an earlier object, whose copies are used again where values are the same. This object keeps
    the module's tensors alive.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        before: KeptBuffers | None = None,
        ignored: Collection[str] = (),
        most: int | None = None,
    ) -> None:
        self._module, self._ignored = module, ignored
        self._kept = [(path, one, _own_buffers(path, one, ignored)) for path, one in module.named_modules()]
        named = [(f"{path}.{key}", b) for path, _, (own, _) in self._kept for key, b in own.items()]
        tensors = {id(b): (name.lstrip("."), b) for name, b in named if b is not None}
        copied = {at: b for at, (_, b) in tensors.items() if _is_plain(b) or (most is None and not is_freed(b))}
        if most is not None and sum(b.nbytes for b in copied.values()) > most:
            copied.clear()
        earlier: dict[int, torch.Tensor] = {} if before is None else before._copies
        self._copies: dict[int, torch.Tensor] = {
            at: earlier[at] if _same_bits(b, earlier.get(at)) else b.detach().clone() for at, b in copied.items()
        }
        self._not_copied = [(name, b, _stamp(b)) for at, (name, b) in tensors.items() if at not in self._copies]

    def written(self) -> str:
        """The name of a buffer without a copy here whose version, shape or dtype has changed; or an empty text."""
        return next((name for name, buffer, stamp in self._not_copied if _stamp(buffer) != stamp), "")

    def put_back(self) -> None:
        """Puts all buffers back into their modules: with the copied values; those without a copy as they are now."""
        for path, module, (named, not_saved) in self._kept:
            own = {key: _written(b, self._value_of(b)) for key, b in named.items()}
            _give(path, module, own, not_saved, self._ignored)

    def share(self, communicator: Communicator, buffers: Buffers) -> None:
        """Gives all ranks, after a step, the last rank's buffers: it had the last micro-batch. All ranks call this."""
        root = communicator.size - 1
        if communicator.rank != root:
            self.put_back()
        news = broadcast_bytes(communicator, self._news() if communicator.rank == root else b"", root)
        if news == _VALUES:
            buffers.synchronize(root)
        elif news and communicator.rank != root:
            device = next((parameter.device for parameter in self._module.parameters()), None)
            write_buffers(self._module, unpack(news, device), self._ignored)

    def _news(self) -> bytes:
        """The message to others: empty if no buffer has changed, ``_VALUES`` if only values have, else all buffers."""
        kept = [{key: self._value_of(b) for key, b in named.items()} for _, _, (named, _) in self._kept]
        now = [_own_buffers(path, module, self._ignored)[0] for path, module, _ in self._kept]
        if [*map(_forms, now)] != [*map(_forms, kept)]:
            return pack(buffers_of(self._module, self._ignored))
        pairs = ((b, before[key]) for named, before in zip(now, kept, strict=True) for key, b in named.items())
        return b"" if all(_same_bits(b, value) for b, value in pairs) else _VALUES

    def _value_of(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        return self._copies.get(id(buffer), buffer)


def buffers_of(module: torch.nn.Module, ignored: Collection[str] = ()) -> OfModules:
    """The buffers of each module, by path. They are no copies."""
    return {path: _own_buffers(path, one, ignored) for path, one in module.named_modules()}


def write_buffers(module: torch.nn.Module, values: OfModules, ignored: Collection[str] = ()) -> None:
    """Gives each module the buffers in ``values``, and no others: written into its own if they fit, else as copies."""
    for path, one in module.named_modules():
        named, not_saved = values.get(path, ({}, []))
        own = {key: _written(one._buffers.get(key), value) for key, value in named.items()}
        _give(path, one, own, not_saved, ignored)


def _own_buffers(path: str, module: torch.nn.Module, ignored: Collection[str]) -> OfModule:
    named = module._buffers.copy()
    for key in ignored and [*named]:
        if f"{path}.{key}".lstrip(".") in ignored:
            del named[key]
    return named, [*module._non_persistent_buffers_set]


def _give(path: str, module: torch.nn.Module, named: Any, not_saved: list[str], ignored: Collection[str]) -> None:
    present = _own_buffers(path, module, ignored)[0]
    if [*present] != [*named] or any(b is not named[key] for key, b in present.items()):
        left_alone = {key: b for key, b in module._buffers.items() if key not in present}
        module._buffers.clear()
        module._buffers.update(named | left_alone)  # in their order, which counts where ranks compare theirs
        module._non_persistent_buffers_set = set(not_saved)


def _written(buffer: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor | None:
    """Returns ``buffer``, with ``value`` written into it, if that fits there; else a copy of ``value``."""
    if _same_bits(buffer, value):
        return buffer
    if value is None or buffer is None or _form(buffer) != _form(value) or not _is_plain(buffer):
        return None if value is None else value.detach().clone()
    with torch.inference_mode():  # in which tensors of every mode may be written
        return buffer.copy_(value)


def _stamp(buffer: torch.Tensor) -> tuple[Any, ...]:
    return 0 if buffer.is_inference() else buffer._version, _form(buffer)


def _form(buffer: torch.Tensor) -> tuple[Any, ...]:
    return buffer.shape, buffer.dtype, buffer.layout


def _forms(named: dict[str, torch.Tensor | None]) -> list[Any]:
    return [(key, b is not None and _form(b)) for key, b in named.items()]


def _is_plain(buffer: torch.Tensor) -> bool:
    """Whether the elements of ``buffer`` lie in memory of this machine, each in a place of its own."""
    is_here = buffer.is_cpu or buffer.is_cuda
    if not is_here or buffer.layout is not torch.strided or is_wrapper(buffer):
        return False
    if buffer.is_nested or buffer.is_quantized or buffer.is_conj() or buffer.is_neg() or is_freed(buffer):
        return False
    return torch._debug_has_internal_overlap(buffer) != 1


def _same_bits(buffer: torch.Tensor | None, copy: torch.Tensor | None) -> bool:
    if buffer is copy or buffer is None or copy is None:
        return buffer is copy
    if _form(buffer) != _form(copy) or not _is_plain(buffer):
        return False
    if buffer.stride() != copy.stride():  # it has gaps
        buffer = torch.empty_like(copy).copy_(buffer)
    if buffer.is_cuda:
        return torch.equal(_bytes_of(buffer), _bytes_of(copy))
    return bool(_compare(buffer.data_ptr(), copy.data_ptr(), copy.nbytes) == 0)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
