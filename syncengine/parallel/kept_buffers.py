"""The buffers of a model as a step of ``micro_batches()`` begins: kept, put back, and shared at the step's end."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Container, Iterator

import torch

from syncengine._C import Communicator
from syncengine.parallel.buffers import Buffers
from syncengine.parallel.replication import is_freed, is_wrapper

_MOST_BYTES = 16 << 20  # of all, of which copies are kept

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class KeptBuffers:
    """The buffers that are not ``ignored``, by module, and their values, unless these take too many bytes.

    Values and not versions tell what a forward has written, since ``batch_norm`` leaves versions as they are.
    ``before``: the buffers kept for the last step, whose copies serve again. Holds the module's tensors.
    """

    def __init__(self, module: torch.nn.Module, ignored: Container[str], before: KeptBuffers | None) -> None:
        self._ignored = ignored
        self._modules = dict(module.named_modules())
        self._kept = {name: self._buffers_of(name) for name in self._modules}
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}
        for name, kept in self._kept.items():
            for key, buffer in kept.items():
                if buffer is not None:
                    self._tensors[id(buffer)] = f"{name}.{key}".lstrip("."), buffer
        self._versions = {at: _version(buffer) for at, (_, buffer) in self._tensors.items()}
        self._forms = {at: _form(buffer) for at, (_, buffer) in self._tensors.items()}
        self._copies: dict[int, torch.Tensor] = {}
        if sum(buffer.nbytes for _, buffer in self._tensors.values()) > _MOST_BYTES:
            return
        for at, (_, buffer) in self._tensors.items():
            if _is_plain(buffer):
                copy = None if before is None else before._copies.get(at)
                kept_before = copy is not None and _same_bits(buffer, copy)
                self._copies[at] = copy if copy is not None and kept_before else buffer.detach().clone()

    def written(self) -> str:
        """The name of one that has another version, and of which no copy is kept, or nothing."""
        for at, (name, buffer) in self._tensors.items():
            if at not in self._copies and _version(buffer) != self._versions[at]:
                return name
        return ""

    def put_back(self) -> None:
        """All are what they were, but for what is ``written``."""
        for name, module in self._modules.items():
            kept = self._kept[name]
            present = self._buffers_of(name)
            if _differ(present, kept):
                for key in present.keys() - kept.keys():
                    del module._buffers[key]
                module._buffers.update(kept)
        with torch.inference_mode():  # in which tensors of every mode may be written
            for at, copy in self._copies.items():
                buffer = self._tensors[at][1]
                if _form(buffer) != _form(copy):
                    buffer.data = copy.clone()
                elif not _same_bits(buffer, copy):
                    buffer.copy_(copy)

    def share(self, communicator: Communicator, buffers: Buffers) -> None:
        """Behind a step: all ranks get what the last one has left, which had the last micro-batch. Collective."""
        root, news = communicator.size - 1, b""
        if communicator.rank != root:
            self.put_back()
        elif self._changed():
            news = json.dumps(list(self._news())).encode()
        size = torch.tensor([len(news)], dtype=torch.int64)
        communicator.broadcast(size, root)
        if not size.item():
            return
        content = torch.frombuffer(bytearray(news or bytes(int(size))), dtype=torch.uint8)
        communicator.broadcast(content, root)
        if communicator.rank != root:
            for name, key, dtype, shape in json.loads(bytes(content.tolist())):
                own = self._modules[name]._buffers
                if dtype == "gone":
                    own.pop(key, None)
                else:
                    own[key] = torch.empty(shape, dtype=getattr(torch, dtype)) if dtype else None
        buffers.synchronize(root)

    def _buffers_of(self, name: str) -> dict[str, torch.Tensor | None]:
        own = self._modules[name]._buffers
        if not own or not self._ignored:
            return dict(own)
        return {key: buffer for key, buffer in own.items() if f"{name}.{key}".lstrip(".") not in self._ignored}

    def _changed(self) -> bool:
        """Whether others than before, or written, as far as copies tell."""
        if any(_differ(self._buffers_of(name), kept) for name, kept in self._kept.items()):
            return True
        return any(not _same_bits(self._tensors[at][1], copy) for at, copy in self._copies.items())

    def _news(self) -> Iterator[tuple[str, str, str, list[int]]]:
        """Module, name, dtype and shape of each buffer that has another form than before."""
        for name, kept in self._kept.items():
            present = self._buffers_of(name)
            for key in kept | present:
                buffer, before = present.get(key), kept.get(key)
                if key not in present:
                    yield name, key, "gone", []
                elif buffer is None:
                    yield name, key, "", []
                elif before is None or self._forms[id(before)] != _form(buffer):
                    yield name, key, str(buffer.dtype).removeprefix("torch."), list(buffer.shape)


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _form(buffer: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return buffer.shape, buffer.dtype


def _differ(some: dict[str, torch.Tensor | None], others: dict[str, torch.Tensor | None]) -> bool:
    return some.keys() != others.keys() or any(some[key] is not others[key] for key in some)


def _is_plain(buffer: torch.Tensor) -> bool:
    """Whether its elements lie in memory of this machine, each in a place of its own."""
    if buffer.layout is not torch.strided or buffer.device.type != "cpu" or is_wrapper(buffer):
        return False
    if buffer.is_nested or buffer.is_quantized or buffer.is_conj() or buffer.is_neg() or is_freed(buffer):
        return False
    return torch._debug_has_internal_overlap(buffer) != 1


def _same_bits(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    if _form(buffer) != _form(copy):
        return False
    if buffer.stride() != copy.stride():  # it has gaps
        buffer = torch.empty_like(copy).copy_(buffer)
    difference: int = _compare(buffer.data_ptr(), copy.data_ptr(), copy.nbytes)
    return difference == 0
