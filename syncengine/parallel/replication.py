"""The same model on every rank: its layout compared, rank 0's values copied to all."""

import hashlib
from collections.abc import Iterable, Sequence

import torch

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage, Mismatch

_PACKED_BYTES = 64 * 1024  # tensors up to this size travel together
_ALIGNMENT = 64


def describe_tensor(name: str, tensor: torch.Tensor) -> str:
    """One line with all that ranks must agree on."""
    grad = ", trained" if tensor.requires_grad else ""
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} strides {tensor.stride()}{grad}"


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raises ``InvalidUsage`` for a tensor whose elements share memory: nothing can be copied into it."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise InvalidUsage(
            f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} has elements that share memory (made "
            "by expand()?), so rank 0's values can't be copied into it: clone() it before wrapping the module, or name "
            "it in the module's _ddp_params_and_buffers_to_ignore"
        )


def check_same_on_all_ranks(communicator: Communicator, what: str, lines: Sequence[str]) -> None:
    """Raises ``Mismatch`` on every rank, naming the first line that differs and both sides, unless all ranks agree."""
    text = "\n".join(lines).encode()
    head = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little")
    heads = _gather_bytes(communicator, head, len(head))
    if all(other == head for other in heads):
        return
    longest = max(int.from_bytes(other[-8:], "little") for other in heads)
    texts = _gather_bytes(communicator, text, longest)
    expected = _lines(texts[0])
    for rank, other_text in enumerate(texts):
        other = _lines(other_text)
        if other == expected:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(expected, other, strict=False)) if a != b), min(len(expected), len(other))
        )
        ours, theirs = (lines[at] if at < len(lines) else "nothing" for lines in (expected, other))
        ranks = communicator.global_ranks
        raise Mismatch(
            f"{what} differs between ranks: rank {ranks[0]} has [{ours}], rank {ranks[rank]} has [{theirs}]. "
            "Build the same model with the same arguments on every rank."
        )


def check_not_replaced(
    communicator: Communicator, module: torch.nn.Module, names: Sequence[str], leaves: Sequence[torch.Tensor]
) -> None:
    """Raises ``InvalidUsage``, here and on all ranks, if one of ``leaves`` is the parameter of one of ``names``.

    For leaves that are none of the parameters that had these names when the module was wrapped.
    """
    if not any(isinstance(leaf, torch.nn.Parameter) for leaf in leaves):
        return
    current = dict(module.named_parameters())
    for name in names:
        if any(leaf is current.get(name) for leaf in leaves):
            rank = communicator.global_ranks[communicator.rank]
            text = (
                f"rank {rank}: parameter {name} of Parallel({type(module).__name__}) was replaced after wrapping, so "
                "it would not be synchronized. Wrap the module again, or write new values into the old one with copy_()"
            )
            communicator.abort(text)
            raise InvalidUsage(text)


class StateBroadcast:
    """Copies one rank's values of these tensors to all, as often as called. Small tensors travel in one message.

    All are on one device, the same on all ranks but for its number. On CUDA the constructor is collective.
    """

    def __init__(self, communicator: Communicator, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._communicator = communicator
        self._small: list[torch.Tensor] = []
        self._large: list[torch.Tensor] = []  # as bytes
        offsets: list[int] = []
        size = 0
        for tensor in map(torch.Tensor.detach, self.tensors):
            if tensor.nbytes > _PACKED_BYTES and (as_bytes := _memory_of(tensor)) is not None:
                self._large.append(as_bytes)
                continue
            self._small.append(tensor)
            offsets.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        device = self.tensors[0].device if self.tensors else None
        self._packed = communicator.empty([size], torch.uint8, device)
        self._views = [
            self._packed[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, self._small, strict=True)
        ]

    @torch.no_grad()
    def __call__(self, root: int = 0) -> None:
        """Copies those of rank `root`. Collective: every rank calls it."""
        is_root = self._communicator.rank == root
        if self._small:
            if is_root:
                torch._foreach_copy_(self._views, self._small)
            self._communicator.broadcast(self._packed, root)
            if not is_root:
                torch._foreach_copy_(self._small, self._views)
        for tensor in self._large:
            self._communicator.broadcast(tensor, root)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's memory as bytes, if it has no gaps."""
    dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    if not dense:
        return None
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _gather_bytes(communicator: Communicator, data: bytes, size: int) -> list[bytes]:
    own = torch.zeros(size, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = torch.empty(communicator.size * size, dtype=torch.uint8)
    communicator.all_gather(everyone, own)
    return [bytes(part.tolist()) for part in everyone.view(communicator.size, size)]


def _lines(padded: bytes) -> list[str]:
    return padded.rstrip(b"\0").decode().split("\n")
