"""Checks that ranks have the same model: compares facts about it, and refuses tensors that can't be copied."""

import hashlib
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage, Mismatch, SyncError, error_text, to_utf8


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raises ``InvalidUsage`` for a tensor that can't be copied into: its elements share memory, or have none."""
    if is_freed(tensor):
        raise InvalidUsage(
            f"the memory of {name} of shape {tuple(tensor.shape)} was freed (by untyped_storage().resize_()?), all "
            "or a part of it: nothing can be copied into it or out of it. Give it memory again"
        )
    if kind := _why_not_dense(tensor):
        raise InvalidUsage(
            f"{name} is {kind}, so rank 0's values can't be copied into it: name it in the module's "
            "_ddp_params_and_buffers_to_ignore, or keep it out of its parameters and buffers"
        )
    if is_wrapper(tensor):
        try:
            with torch.no_grad(), torch.inference_mode(tensor.is_inference()):  # as in plain_copy()
                tensor.detach().clone().copy_(plain_copy(tensor))
        except Exception as error:  # the code is the user's class's
            raise InvalidUsage(
                f"{name} is a {type(tensor).__name__}, into which nothing can be copied ({error_text(error)}): give "
                "that class __tensor_flatten__, or aten.clone and aten.copy_ from and to ordinary tensors, or name the "
                "tensor in the module's _ddp_params_and_buffers_to_ignore"
            ) from error
    elif torch._debug_has_internal_overlap(tensor) == 1:
        raise InvalidUsage(
            f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} has elements that share memory (made "
            "by expand()?), so rank 0's values can't be copied into it: clone() it before wrapping the module, or name "
            "it in the module's _ddp_params_and_buffers_to_ignore"
        )


# Dtypes with elements of less than a byte, which torch can copy only as bytes.
_BYTES = {getattr(torch, f"{kind}{bits}", None) for kind in ("int", "uint") for bits in range(1, 8)}


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor's class has its own ``__torch_dispatch__``, so that its memory may hold no elements."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor with the same values."""
    with torch.inference_mode(tensor.is_inference()):  # in inference mode detach() of many a class fails
        values = tensor.detach()
        if is_wrapper(values):
            values = values.contiguous().view(-1)  # as DDP does: many a class makes an ordinary tensor of it then
        found = torch.empty(values.shape, dtype=tensor.dtype, device=tensor.device)
        return found.copy_(values).view(tensor.shape)


def unwrapped(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Replaces each wrapper tensor by the tensors that it holds, such as a quantized weight's integers and scales.

    A wrapper without ``__tensor_flatten__`` stays as it is, and so does one that is refused. Elements of less than a
    byte become bytes. A tensor on meta has nothing to copy, and is left out.
    """
    found: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named:
        if is_wrapper(tensor) and is_traceable_wrapper_subclass(tensor) and not _why_not_dense(tensor):
            inner, _ = tensor.__tensor_flatten__()
            found += unwrapped((f"{name}.{attribute}", getattr(tensor, attribute)) for attribute in inner)
        elif not tensor.is_meta:
            found.append((name, tensor.detach().view(torch.uint8) if tensor.dtype in _BYTES else tensor))
    return found


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie behind the end of its storage, which was freed in part or whole."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel() or is_wrapper(tensor):
        return False
    try:
        there = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # of classes that have none
        return False
    return there < tensor.storage_offset() * tensor.element_size() + reach_of(tensor)


def reach_of(tensor: torch.Tensor) -> int:
    """The bytes from the tensor's first element to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _why_not_dense(tensor: torch.Tensor) -> str:
    """The kind of a tensor that is no dense block of elements, say "a nested tensor"; or an empty text."""
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_nested or tensor.is_quantized:
        return "a nested tensor" if tensor.is_nested else "a quantized tensor"
    distributed = sys.modules.get("torch.distributed.tensor")
    return "a DTensor" if distributed is not None and isinstance(tensor, distributed.DTensor) else ""


def check_same_on_all_ranks(
    communicator: Communicator,
    what: str,
    lines: Sequence[str],
    advice: str = "Build the same model with the same arguments on every rank.",
) -> None:
    """Raises ``Mismatch`` on every rank, unless ``lines`` are the same: names the first that differs, and both sides.

    ``what``: the error's subject and verb ("... differs"). ``advice``: the end of its text. All ranks call it.
    """
    text = "\n".join(lines)
    digest = hashlib.sha256(to_utf8(text)).digest()
    if set(gather_bytes(communicator, digest, len(digest))) == {digest}:
        return
    texts = gather_texts(communicator, text)
    expected = texts[0].split("\n")
    for rank, other_text in enumerate(texts):
        for ours, theirs in itertools.zip_longest(expected, other_text.split("\n"), fillvalue="nothing"):
            if ours != theirs:
                ranks = communicator.global_ranks
                raise Mismatch(
                    f"{what} between ranks: rank {ranks[0]} has [{ours}], rank {ranks[rank]} has [{theirs}]. {advice}"
                )


def own_name(communicator: Communicator) -> str:
    """The name of this rank in errors."""
    return f"rank {communicator.global_ranks[communicator.rank]}"


def fail_all(communicator: Communicator, error: SyncError, text: str | None = None) -> NoReturn:
    """Raises ``error`` here and on all ranks. The others raise it with ``text``, if that is given."""
    communicator.abort(text or str(error), type(error).__name__)
    try:
        raise error
    finally:
        del error  # otherwise error, traceback and frames are a cycle, which keeps what they hold (shared memory, say)


def gather_bytes(communicator: Communicator, data: bytes, size: int) -> list[bytes]:
    """Every rank's ``data``, padded with zeros to ``size``, which is the same on all ranks. All ranks call this."""
    own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    everyone = torch.empty(communicator.size * size, dtype=torch.uint8, device="cpu")
    communicator.all_gather(everyone, own)
    return list(map(bytes, map(torch.Tensor.tolist, everyone.view(communicator.size, size))))


def broadcast_bytes(communicator: Communicator, data: bytes, root: int) -> bytes:
    """Rank ``root``'s ``data``. All ranks call it."""
    size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    communicator.broadcast(size, root)
    if not size.item():
        return b""
    content = torch.frombuffer(bytearray(data if communicator.rank == root else int(size)), dtype=torch.uint8)
    communicator.broadcast(content, root)
    return content.numpy().tobytes()


def gather_texts(communicator: Communicator, text: str) -> list[str]:
    """Every rank's ``text``, of any length. All ranks call it."""
    data = to_utf8(text)
    sizes = gather_bytes(communicator, len(data).to_bytes(8, "little"), 8)
    lengths = [int.from_bytes(size, "little") for size in sizes]
    texts = gather_bytes(communicator, data, max(1, *lengths))
    return [other[:length].decode() for other, length in zip(texts, lengths, strict=True)]
