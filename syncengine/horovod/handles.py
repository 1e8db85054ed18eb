"""Handles: numbers for operations that are under way, as Horovod has them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from syncengine.errors import InvalidUsage


class Pending(Protocol):
    """What a handle stands for."""

    def is_completed(self) -> bool:
        """Whether `result` would return at once."""

    def result(self) -> Any:
        """Blocks until it has ended. Once."""


class _Group:
    """Several operations under way, as one."""

    def __init__(self, members: Sequence[Pending]) -> None:
        self._members = members

    def is_completed(self) -> bool:
        """See Pending."""
        return all(member.is_completed() for member in self._members)

    def result(self) -> Any:
        """See Pending."""
        return [member.result() for member in self._members]


_numbers = itertools.count()
_next = 0
_pending: dict[int, Pending] = {}


def begin(operation: Pending) -> int:
    """The handle of an operation."""
    global _next
    handle = next(_numbers)
    _next = handle + 1
    _pending[handle] = operation
    return handle


def begin_group(handles: Sequence[int]) -> int:
    """One handle in the place of several; its result is a list."""
    return begin(_Group([_pending.pop(handle) for handle in handles]))


def forget_handles() -> None:
    """Those of a communicator that is gone."""
    _pending.clear()


def poll(handle: int) -> bool:
    """Whether the operation has ended, so that `synchronize(handle)` would not block."""
    return _find(handle).is_completed()


def synchronize(handle: int) -> Any:
    """Blocks until the operation has ended; returns its result, and gives up the handle.

    Raises the operation's error; Mismatch if the ranks' calls differ; InvalidUsage for a handle that was synchronized.
    """
    operation = _find(handle)
    del _pending[handle]
    return operation.result()


def _find(handle: int) -> Pending:
    operation = _pending.get(handle) if isinstance(handle, int) else None
    if operation is not None:
        return operation
    if isinstance(handle, int) and 0 <= handle < _next:
        raise InvalidUsage(
            f"handle {handle} was synchronized before, or is older than the last init(): call synchronize() once for "
            "each handle, and keep what it returns"
        )
    raise InvalidUsage(f"{handle!r} is no handle: give what an hvd.*_async() call has returned")
