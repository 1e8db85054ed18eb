"""What a rank is about to do, in a few bytes that all ranks exchange before they do it.

So a mismatch is named as the script wrote it, ranks may bring different numbers of rows, and those who have joined know
what to take part in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from syncengine.errors import Aborted, InvalidUsage, Mismatch, SyncError

SIZE = 640  # bytes of a request
_TEXT = 150  # bytes of a name or a description: longer ones are cut, but compared as a whole, by their digest
_REASON = 440  # bytes of why a call is refused
_SEPARATOR = "\x1f"


class Request(NamedTuple):
    """One call of one rank."""

    kind: str  # the function called
    name: str = ""  # what the user calls the tensor
    what: str = ""  # all else that must be the same on all ranks, for messages: "float32 (2, 3), op=Average"
    flat: Sequence[tuple[str, int]] = ()  # dtype and elements of each flat tensor that is reduced or broadcast
    how: str = ""  # the engine's op, or the root
    own: int = 0  # may differ between ranks: rows, or bytes
    digest: str = ""  # of all that must be the same

    def encode(self) -> bytes:
        """At most SIZE bytes."""
        flat = ",".join(f"{dtype}:{count}" for dtype, count in self.flat)
        same = (self.kind, self.name, self.what, flat, self.how)
        digest = hashlib.blake2b("\0".join(same).encode(), digest_size=8).hexdigest()
        what = _cut(self.what, _REASON if self.kind == REFUSED else _TEXT)
        fields = (self.kind, _cut(self.name, _TEXT), what, flat, self.how, digest, str(self.own))
        return _SEPARATOR.join(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """What `encode` made, padded with zeros."""
        kind, name, what, flat, how, digest, own = data.rstrip(b"\0").decode().split(_SEPARATOR)
        parts = [part.split(":") for part in flat.split(",") if part]
        return cls(kind, name, what, [(dtype, int(count)) for dtype, count in parts], how, int(own), digest)

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"{self.kind}{name}" + (f" of {self.what}" if self.what else "")


JOIN = Request("join")
REFUSED = "refused"  # the kind of a request that is none: this rank has raised in place of it


def refusal(call: str, error: Exception) -> Request:
    """Says that this rank can't make the call, and why."""
    kind, reason = as_told(error)
    return Request(REFUSED, call, reason, how=kind.__name__)


def as_told(error: Exception) -> tuple[type[SyncError], str]:
    """What the other ranks raise for what one has raised alone: the class, and the reason in its text."""
    if isinstance(error, (InvalidUsage, Mismatch)):
        return type(error), str(error)
    return Aborted, f"{type(error).__name__}: {error}"


def told_class(request: Request) -> type[SyncError]:
    """What the other ranks raise for a refusal."""
    return next((kind for kind in (InvalidUsage, Mismatch) if kind.__name__ == request.how), Aborted)


def dtype_name(dtype: torch.dtype) -> str:
    """As "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """As torch.float32."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def describe(tensor: torch.Tensor, any_rows: bool = False) -> str:
    """Dtype and shape; with `any_rows` but for the first dimension."""
    shape = f"(*, {', '.join(map(str, tensor.shape[1:]))})" if any_rows else str(tuple(tensor.shape))
    return f"{dtype_name(tensor.dtype)} {shape}"


def _cut(text: str, most: int) -> str:
    clean = text.replace(_SEPARATOR, " ").replace("\0", " ")
    data = clean.encode()
    return clean if len(data) <= most else data[: most - 3].decode(errors="ignore") + "..."
