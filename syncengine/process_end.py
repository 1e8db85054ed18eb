"""What runs when this process ends, normally or by an uncaught error."""

from __future__ import annotations

import atexit
import multiprocessing
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from types import TracebackType

from syncengine._C import Communicator
from syncengine.launch import mark_rank_process, tell_failure

_functions: list[Callable[[], None]] = []  # where multiprocessing is to call them


def at_end(function: Callable[[], None]) -> None:
    """Calls `function` at the end of this process, the last one given first: as by atexit, and also in a child that
    multiprocessing has forked, which it ends without a look at atexit.
    """
    atexit.register(function)
    if multiprocessing.parent_process() is None or multiprocessing.get_start_method() == "spawn":
        return
    if not _functions:
        Finalize(None, _finish, exitpriority=0)
    _functions.append(function)


def tell_peers_of_errors(communicators: Callable[[], Iterable[Communicator]]) -> None:
    """An uncaught error ends this process: the other ranks of these `communicators`, as they are then, raise its text
    at once instead of waiting.
    """
    previous = sys.excepthook

    def tell_peers(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception_only(kind, error)).strip()
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


def _finish() -> None:
    """Called as soon as the main thread is done. Others may not be, which atexit would wait for."""
    if _others():
        threading.Thread(target=_run, name="syncengine-end").start()  # waited for with them
    else:
        _run()


def _run() -> None:
    while others := _others():
        for thread in others:
            thread.join()
    while _functions:
        function = _functions.pop()
        atexit.unregister(function)
        try:
            function()
        except Exception:
            traceback.print_exc()


def _others() -> list[threading.Thread]:
    own = (threading.current_thread(), threading.main_thread())
    return [thread for thread in threading.enumerate() if not thread.daemon and thread not in own]
