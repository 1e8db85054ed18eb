"""Handles: numbers for operations that are under way, as Horovod has them."""

from __future__ import annotations

import itertools
from typing import Any

from syncengine.errors import InvalidUsage
from syncengine.horovod.streams import Operation

_numbers = itertools.count()
_pending: dict[int, Operation] = {}


def begin(operation: Operation) -> int:
    """Gives an operation a handle."""
    handle = next(_numbers)
    _pending[handle] = operation
    return handle


def forget_handles() -> None:
    """Forgets all handles: the communicator of their operations is gone."""
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


def _find(handle: int) -> Operation:
    operation = _pending.get(handle) if isinstance(handle, int) else None
    if operation is None:
        raise InvalidUsage(
            f"{handle!r} is no handle, or was synchronized before, or is older than the last init(): call "
            "synchronize() once for what each hvd.*_async() call has returned, and keep the result"
        )
    return operation
