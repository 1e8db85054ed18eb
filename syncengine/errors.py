"""The errors that syncengine raises. The extension raises these same classes.

A text names the rank, parameter, bucket or variable at fault, and what to do about it.
"""

import re
from collections.abc import Iterable


class SyncError(RuntimeError):
    """Base of all errors of syncengine.

    After an error in a collective its communicator stays failed; Parallel and init() on all ranks open a new one.
    """


class PeerLost(SyncError):
    """Another rank died or left while this rank still needed it."""


class Timeout(SyncError, TimeoutError):
    """A deadline passed; the text names the ranks that did not arrive and what they were waited for."""


class Mismatch(SyncError):
    """Ranks called different collectives, or with different shapes, dtypes, layouts or settings."""


class Aborted(SyncError):
    """Another rank raised an exception, whose text this carries, or this rank was interrupted."""


class InvalidUsage(SyncError, ValueError):
    """A call, argument or environment variable that can't work, whatever the other ranks do."""


class NotFinite(SyncError, FloatingPointError):
    """A rank has brought NaN or Inf into a gradient (``Parallel(nonfinite="raise")``); the model can go on."""


class TornWeights(SyncError):
    """A rank ended or failed in the middle of an update of weights in shared memory: continue from a checkpoint."""


def blamed_rank(error: BaseException | None) -> int | None:
    """The rank of the job with which a PeerLost's or Aborted's text begins, as it has ended or failed; else None."""
    named = re.match(r"rank (\d+)\b", str(error)) if isinstance(error, PeerLost | Aborted) else None
    return None if named is None else int(named[1])


def error_text(error: BaseException, *, named: bool = True) -> str:
    """The text of an error for other ranks: ``"ValueError: ..."``, or without the class if not ``named``.

    Never raises, though a user's ``__str__`` may raise, and a text may contain a file name that is not UTF-8.
    """
    try:
        text = str(error)
    except Exception as why:
        text = f"(its text can't be had: {type(why).__name__})"
    return to_utf8(f"{type(error).__name__}: {text}" if named else text).decode()


def to_utf8(text: str) -> bytes:
    """Encodes ``text`` for other ranks, with backslash escapes for characters that UTF-8 can't encode."""
    return text.encode(errors="backslashreplace")


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks as error texts name them: "rank 3", "ranks 0-3, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [f"{a}" if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs]
    many = len(runs) > 1 or (runs and runs[0][0] != runs[0][1])
    return f"rank{'s' if many else ''} {', '.join(parts)}"
