"""Copies one rank's tensors to all ranks: small ones in one message, large ones directly from their memory."""

from collections.abc import Callable, Sequence

import torch

from syncengine._C import Communicator
from syncengine.parallel.refusal import refuse
from syncengine.parallel.replication import (
    check_same_on_all_ranks,
    check_writable,
    is_wrapper,
    plain_copy,
    reach_of,
    unwrapped,
)

Named = Sequence[tuple[str, torch.Tensor]]

_PACKED_BYTES = 64 * 1024  # tensors up to this size travel together
_ALIGNMENT = 64


def copy_each(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copies each value into its target tensor, by one call if torch can do that."""
    try:
        torch._foreach_copy_(targets, values)
    except RuntimeError:  # it can't write to tensors that are lazily conjugated or negated
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


class TensorBroadcast:
    """Copies one rank's tensors to all ranks. Holds the memory for the message, but none of the tensors.

    Make it from tensors on one device, and call it with any tensors of the same shapes and dtypes. All ranks must have
    the same shapes and dtypes, which is not checked here; memory and strides may differ.
    """

    def __init__(self, communicator: Communicator, like: Sequence[torch.Tensor], device: torch.device) -> None:
        self._communicator = communicator
        self._small = [i for i, tensor in enumerate(like) if tensor.nbytes <= _PACKED_BYTES and not is_wrapper(tensor)]
        self._large = sorted(set(range(len(like))).difference(self._small))
        offsets, size = [], 0
        for i in self._small:
            offsets.append(size)
            size += -(-like[i].nbytes // _ALIGNMENT) * _ALIGNMENT
        size = max(size, 1)  # there is always a message, which says what follows
        with torch.inference_mode(False):  # for all calls, whatever the mode of this one
            if device.type == "cpu":
                self._message = communicator.empty([size], torch.uint8)  # one copy less
            else:
                self._message = torch.empty(size, dtype=torch.uint8, device=device)
            self._views = [
                self._message[offset : offset + like[i].nbytes].view(like[i].dtype).view(like[i].shape)
                for offset, i in zip(offsets, self._small, strict=True)
            ]

    @torch.inference_mode()  # in which tensors of every mode may be written
    def __call__(self, tensors: Sequence[torch.Tensor], root: int, layout: str = "") -> None:
        """Copies rank ``root``'s tensors to all. All ranks call it. Raises ``Mismatch`` if their ``layout`` differs."""
        is_root = self._communicator.rank == root
        small = [tensors[i] for i in self._small]
        if is_root and small:
            torch._foreach_copy_(self._views, small)
        self._communicator.broadcast(self._message, root, layout=layout)
        if not is_root and small:
            copy_each(small, self._views)
        for i in self._large:
            if is_wrapper(tensors[i]):
                self._copy_wrapper(tensors[i], root)
                continue
            target = tensors[i].detach()
            is_plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
            values = target if is_plain else plain_copy(target)
            self._communicator.broadcast(values.view(-1).view(torch.uint8), root)
            if values is not target and not is_root:
                target.copy_(values)

    @torch.no_grad()
    def _copy_wrapper(self, target: torch.Tensor, root: int) -> None:
        """Copies by the tensor class's ``copy_()``, but not onto the same values, which it might round anew."""
        values = plain_copy(target)
        content = values.view(-1).view(torch.uint8)
        before = content.clone()
        self._communicator.broadcast(content, root)
        if not torch.equal(content, before):
            with torch.inference_mode(target.is_inference()):  # as in plain_copy()
                target.detach().copy_(values)


def describe_layout(named: Named, more: Callable[[torch.Tensor], str] = lambda tensor: "") -> list[str]:
    """A line for each tensor with the facts that must be the same on all ranks, so that values can be copied.

    ``more`` returns further facts of a tensor. Raises ``InvalidUsage`` naming a tensor that can't be copied into.
    """
    for name, tensor in named:
        if is_wrapper(tensor) and tensor.requires_grad:
            refuse(f"training parameter {name} of type {type(tensor).__name__}", "freeze it, or pass plain parameters")
    parts = unwrapped(named)
    for name, tensor in parts:
        check_writable(name, tensor)
    own = {id(tensor) for _, tensor in parts}
    facts = [(name, tensor, _context(tensor)) for name, tensor in named if id(tensor) not in own]
    facts += [(name, tensor, shares) for (name, tensor), shares in zip(parts, _sharing(parts), strict=True)]
    return [f"{name}:{_layout(tensor)}{more(tensor)}{fact}" for name, tensor, fact in facts]


def _layout(tensor: torch.Tensor) -> str:
    kind = f" {type(tensor).__name__}" if is_wrapper(tensor) else ""
    return f"{kind} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _context(tensor: torch.Tensor) -> str:
    """A subclass's ``__tensor_flatten__()`` context as text; empty with an address in it, which differs by rank."""
    text = str(tensor.__tensor_flatten__()[1]) if is_wrapper(tensor) else ""  # type: ignore[attr-defined]
    return f" {text}" if text and " at 0x" not in text else ""


@torch.inference_mode()
def broadcast_named(
    communicator: Communicator,
    what: str,
    named: Named,
    device: torch.device,
    root: int,
    lines: Sequence[str] | None = None,
) -> None:
    """Copies rank ``root``'s tensors to all. Raises ``Mismatch`` on every rank, naming a tensor whose layout differs.

    ``what``: the error's subject and verb ("... differ"). ``lines``: facts to compare, if more than the layout.
    """
    check_same_on_all_ranks(communicator, what, describe_layout(named) if lines is None else lines)
    tensors = [tensor for _, tensor in unwrapped(named)]
    TensorBroadcast(communicator, tensors, device)(tensors, root)


def _sharing(named: Named) -> list[str]:
    """A text for each tensor that says with which other one it shares memory; empty if with none.

    The texts must be the same on all ranks: where two tensors share memory on one rank alone, a copy would lose values
    there. Tensors that only interleave count as sharing.
    """
    found = [""] * len(named)
    first, start, end = 0, 0, 0  # the tensors before that share memory: the index of the first, and where they lie
    for at, i in sorted((tensor.data_ptr(), i) for i, (_, tensor) in enumerate(named) if tensor.numel()):
        tensor = named[i][1]
        if at < end:
            (name, _), (of, before) = named[i], named[first]
            found[i] = f", shares memory with {of} from byte {at - start} on, strides {tensor.stride()}"
            found[first] = found[first] or f", shares memory with {name}, strides {before.stride()}"
        else:
            first, start, end = i, at, 0
        end = max(end, at + reach_of(tensor))
    return found
