"""Requests: descriptions of calls, of SIZE bytes each, which all ranks exchange before they make a call.

With them, ranks match their calls by name, describe a mismatch in the script's words, learn how many rows each rank
brings, and, once they have joined, know in which operations to take part.
"""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

import torch

from syncengine.errors import Aborted, InvalidUsage, Mismatch, SyncError, error_text, to_utf8

SIZE = 640  # bytes of a request
_MOST_TEXT = 150  # bytes of a key or a description: longer ones are cut, but compared as a whole, by their digest
_REASON = 390  # bytes of why a call is refused
_SEPARATOR = "\x1f"

Flat = tuple[tuple[str, int], ...]


class Request(NamedTuple):
    """The description of one call of one rank, for all ranks."""

    kind: str  # the function called
    key: str = ""  # matches the ranks' calls: "allreduce.loss", or "#3" for the third that has no name
    what: str = ""  # all else that must be the same on all ranks, for messages: "float32 (2, 3), op=Average"
    flat: Flat = ()  # dtype and elements of each flat tensor that is reduced or broadcast
    how: str = ""  # the engine's op, or the root
    own: int = 0  # rows, or bytes, which may differ between ranks
    digest: str = ""  # a hash of all that must be the same

    def encode(self) -> bytes:
        """The request in SIZE bytes."""
        kind, key, what, flat, how, own, _ = self
        head = f"{key}{_SEPARATOR}{own}".encode(errors="backslashreplace")
        return (head + _text(kind, what, flat, how)).ljust(SIZE, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """The request that `encode` has made these bytes of."""
        key, own, kind, what, flat, how, digest = data.rstrip(b"\0").decode().split(_SEPARATOR)
        parts = [part.split(":") for part in flat.split(",") if part]
        return cls(kind, key, what, tuple((dtype, int(count)) for dtype, count in parts), how, int(own), digest)

    def __str__(self) -> str:
        if self.kind == WAITING:
            return self.what
        name = "" if self.key.startswith("#") else f" {self.key.removeprefix(self.kind + '.')!r}"
        return f"{self.kind}{name}" + (f" of {self.what}" if self.what else "")


JOIN = "join"
REFUSED = "refused"  # the kind of a request that is none: this rank has raised in place of it
WAITING = "waiting"  # likewise: this rank has nothing to announce, and waits for others to call what is at this key


def as_told(error: Exception) -> tuple[type[SyncError], str]:
    """The class and the text of the error that the other ranks raise for an error of one rank alone."""
    if isinstance(error, (InvalidUsage, Mismatch)):
        return type(error), str(error)
    return Aborted, error_text(error)


def told(rank: int, refused: Request, other: str) -> SyncError:
    """The error that ranks raise if `rank` has refused a call. `other` says which rank has called what meanwhile."""
    kind, _, call = refused.how.partition(" ")
    error = {"InvalidUsage": InvalidUsage, "Mismatch": Mismatch}.get(kind, Aborted)
    return error(f"rank {rank} in {call}, while {other}: {refused.what}")


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor, any_rows: bool = False) -> str:
    """Dtype and shape as a text; `any_rows` leaves out the first dimension."""
    shape = f"(*, {', '.join(map(str, tensor.shape[1:]))})" if any_rows else str(tuple(tensor.shape))
    return f"{dtype_name(tensor.dtype)} {shape}"


def key_of(kind: str, name: str) -> str:
    """The key of a call with a name: at most _MOST_TEXT bytes, different for different names."""
    key = f"{kind}.{name}"
    if len(key) <= _MOST_TEXT // 4 and key.isprintable():
        return key
    return f"{_cut(key, _MOST_TEXT - 20)} {hashlib.blake2b(to_utf8(key), digest_size=8).hexdigest()}"


@functools.lru_cache(1024)
def _text(kind: str, what: str, flat: Flat, how: str) -> bytes:
    """The parts of a request that must be the same on all ranks, and their digest."""
    parts = ",".join(f"{dtype}:{count}" for dtype, count in flat)
    digest = hashlib.blake2b(to_utf8("\0".join((kind, what, parts, how))), digest_size=8).hexdigest()
    what = _cut(what, _REASON if kind == REFUSED else 2 * _MOST_TEXT if kind == WAITING else _MOST_TEXT)
    return "".join(_SEPARATOR + part for part in (kind, what, parts, how, digest)).encode()


def _cut(text: str, most: int) -> str:
    data = to_utf8(text.replace(_SEPARATOR, " ").replace("\0", " "))
    return data.decode() if len(data) <= most else data[: most - 3].decode(errors="ignore") + "..."
