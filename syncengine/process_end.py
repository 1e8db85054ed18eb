"""What runs when this process ends, normally or by an uncaught error."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from types import TracebackType

from syncengine._C import Communicator
from syncengine.errors import error_text
from syncengine.launch import mark_rank_process, tell_failure

_given: set[Callable[[], None]] = set()  # to at_end() in this process
os.register_at_fork(after_in_child=_given.clear)


def at_end(function: Callable[[], None]) -> None:
    """Calls `function` once at the end of this process, the last one given first: as by atexit, and also in a child
    that multiprocessing has forked, which it ends without a look at atexit.
    """
    if function in _given:
        return
    _given.add(function)
    if multiprocessing.parent_process() is None or multiprocessing.get_start_method() == "spawn":
        atexit.register(function)
    else:
        Finalize(None, function, exitpriority=0)


def tell_peers_of_errors(communicators: Callable[[], Iterable[Communicator]]) -> None:
    """An uncaught error ends this process: the other ranks of these `communicators`, as they are then, raise its text
    at once instead of waiting.
    """
    previous = sys.excepthook

    def tell_peers(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = error_text(error)
        for communicator in communicators():
            communicator.abort(f"rank {communicator.global_ranks[communicator.rank]}: {text}")
        previous(kind, error, trace)

    sys.excepthook = tell_peers


def tell_ranks_to_come(has_tried: Callable[[], bool]) -> None:
    """An uncaught error before this rank `has_tried` to connect: the other ranks raise its text in their init(), where
    they would wait for it.

    Not in a child of the rank's process.
    """
    mark_rank_process()
    previous = sys.excepthook

    def tell_them(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if not has_tried():
            tell_failure(error, "before init", in_init=False)

    sys.excepthook = tell_them
