"""Waits for the other ranks at the start: with a deadline, interruptibly, and with a line that names missing ranks."""

import logging
import time
from collections.abc import Callable, Collection

from syncengine.errors import Aborted, InvalidUsage, SyncError, Timeout, error_text, name_ranks, to_utf8

logger = logging.getLogger("syncengine")

_SHORTEST, _LONGEST = 0.0005, 0.05  # seconds between two looks
_MOST_BYTES = 3500  # of a failure's text: MPI sends that much ahead


# The function that raise_if_ended() calls. syncengine.communicator, which knows this process's communicators, sets it.
knows_ended: Callable[[Collection[int]], object] = len


def raise_if_ended(ranks: Collection[int]) -> None:
    """Raises the error that has ended one of these ranks of the job, if this process knows that one has ended."""
    knows_ended(ranks)


def wait_for_ranks(
    missing: Callable[[], set[int]],
    what: str | Callable[[], str],
    timeout: float,
    log_after: float,
    check: Callable[[set[int]], None] = raise_if_ended,
) -> None:
    """Returns once `missing()`, which is called again and again, names no rank any more. All meetings wait here.

    `what`, or its result, completes the sentence "rank 3 did not ..." in the log line after `log_after` seconds and in
    the Timeout after `timeout` seconds. `check` raises if one of the missing ranks will not come.
    """

    def did_not(absent: set[int]) -> str:
        return f"{name_ranks(absent)} did not {what if isinstance(what, str) else what()}"

    start = time.monotonic()
    logged = False
    pause = _SHORTEST
    while absent := missing():
        check(absent)
        waited = time.monotonic() - start
        if waited >= timeout:
            raise Timeout(f"{did_not(absent)} within {timeout:g} s")
        if waited >= log_after and not logged:
            logger.warning("waiting since %.0f s: %s yet", waited, did_not(absent))
            logged = True
        time.sleep(min(pause, timeout - waited))
        pause = min(pause * 1.5, _LONGEST)


def failure_notice(rank: int, error: BaseException, where: str = "in init") -> bytes:
    """The message for the other ranks if `rank` fails before it has a communicator."""
    if is_of_all(error):
        kind, text = type(error).__name__, error_text(error, named=False)
    else:
        kind, text = Aborted.__name__, f"rank {rank} failed {where}: {error_text(error)}"
    return to_utf8(f"{kind} {text}")[:_MOST_BYTES]


def is_of_all(error: BaseException) -> bool:
    """Whether `error` concerns all ranks, which then raise it as it is: any SyncError but InvalidUsage."""
    return isinstance(error, SyncError) and not isinstance(error, InvalidUsage)


def as_error(failure_notice: bytes) -> SyncError:
    """The error that a rank raises for the failure notice of another."""
    kind, _, text = failure_notice.decode(errors="replace").partition(" ")
    kinds: list[type[SyncError]] = [SyncError, *SyncError.__subclasses__()]
    known = {error.__name__: error for error in kinds}
    return known[kind](text) if kind in known else Aborted(f"another rank failed in init: {kind} {text}")
