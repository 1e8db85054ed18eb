"""Which process may use what `init` makes: the one that called it, and none that is forked from it."""

from __future__ import annotations

import os

from syncengine.errors import InvalidUsage

_owner: int | None = None


def refuse_forked_child() -> None:
    """Records the process that calls this first; its forked children, which share its connections, must not."""
    global _owner
    if _owner is None:
        _owner = os.getpid()
    elif _owner != os.getpid():
        raise InvalidUsage(
            "syncengine can't be used in a forked child (a DataLoader worker, say) of a process that called "
            "syncengine.init(): start such processes before init(), or by spawn"
        )


def is_owner() -> bool:
    """Whether this process has called it first."""
    return _owner == os.getpid()
