"""Runs functions when this process ends, tells other ranks of its error, and lets the rank that caused it end first."""

import atexit
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from multiprocessing.util import Finalize
from types import TracebackType

from syncengine._C import Communicator
from syncengine.errors import blamed_rank, error_text
from syncengine.launch import mark_rank_process, tell_failure

_ENDS_WITHIN, _SEEN_WITHIN = 10.0, 2.0  # seconds

_uncaught: BaseException | None = None  # that ends this process
_given: set[Callable[[], None]] = set()  # to at_end() in this process
os.register_at_fork(after_in_child=_given.clear)


def at_end(function: Callable[[], None]) -> None:
    """Calls `function` once at the end of this process; the function given last is called first, as by atexit.

    In a child of multiprocessing's, Finalize calls it: atexit may not run there, or only when its error is forgotten.
    """
    if function in _given:
        return
    _given.add(function)
    if multiprocessing.parent_process() is None:
        atexit.register(function)
    else:
        Finalize(None, function, exitpriority=0)


@functools.cache
def tell_peers_of_errors(communicators: Callable[[], Iterable[Communicator]]) -> None:
    """Makes an uncaught error abort all `communicators()` of that moment, so that no peer waits for this rank."""
    previous = sys.excepthook

    def tell_them(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _uncaught
        _uncaught = error
        tell_peers(error, communicators())
        previous(kind, error, trace)

    sys.excepthook = tell_them


def what_ends() -> BaseException | None:
    """The error that ends this process, at its end; None if there is none.

    It is the error that nobody caught, or, in a child of multiprocessing's, the one that will be printed next. If the
    program has called sys.exit(1) while it handled an error, it is that error.
    """
    error = _uncaught or sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code not in (None, 0) else None
    return error


def tell_peers(error: BaseException, communicators: Iterable[Communicator]) -> None:
    """Aborts ``communicators`` with the text of ``error``: the peers raise that, unless they have failed before."""
    text = error_text(error)
    for communicator in communicators:
        communicator.abort(f"rank {communicator.global_ranks[communicator.rank]}: {text}")


def let_cause_end_first(error: BaseException | None, communicators: Collection[Communicator]) -> None:
    """Waits at the end of this process, behind everything else, if it ends because of another rank.

    Launchers show the process that ends first, and return its code. That should not be a process that ends by another
    rank's death or error. So this function waits until that rank has ended, for 10 s at most, and a little longer:
    then the launcher has looked, and does not find two processes that have ended.

    Without an `error` the failures of `communicators` count: the program may have caught one, and exit by itself.
    """
    own = {communicator.global_ranks[communicator.rank] for communicator in communicators}
    causes = [communicator.exception() for communicator in communicators] if error is None else list(_chain(error))
    cause = next((rank for each in causes if (rank := blamed_rank(each)) is not None and rank not in own), None)
    if cause is None:
        return
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # all ranks have to: at this process's end it would be too late for the one that is waited for
    knowing = [communicator for communicator in communicators if cause in communicator.global_ranks]
    deadline = time.monotonic() + _ENDS_WITHIN
    while knowing and time.monotonic() < deadline and not any(cause in each.ended() for each in knowing):
        time.sleep(0.01)
    time.sleep(_SEEN_WITHIN)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def tell_ranks_to_come(has_tried: Callable[[], bool]) -> None:
    """Lets the other ranks know if an uncaught error ends this rank before it `has_tried` to connect.

    They raise its text in their init(), where they would wait for this rank. A child of a rank's process tells nothing.
    """
    mark_rank_process()
    previous = sys.excepthook

    def tell_them(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if not has_tried():
            tell_failure(error, "before init", in_init=False)

    sys.excepthook = tell_them
