"""Lines that syncengine prints by itself. None of them makes a rank wait, whoever reads stderr or does not."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys

from syncengine._C import await_said, say

atexit.register(await_said)


def print_line(text: str, *, at_end: bool = False) -> None:
    """Writes ``syncengine: text`` to stderr, or to the object in its place, as in a notebook.

    ``at_end``: the process ends after this line, perhaps as a child of multiprocessing, which does not run atexit.
    """
    if sys.stderr is None:
        return
    line = f"syncengine: {text}\n"
    with contextlib.suppress(OSError, ValueError):  # closed at the other end, or here
        if sys.stderr is sys.__stderr__:
            say(line)
            if at_end:
                await_said()
        else:
            sys.stderr.write(line)
            sys.stderr.flush()


class _OwnHandler(logging.Handler):
    """Prints warnings of the logger "syncengine" if the program has no handler for them, as logging would."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers and _logger.handlers == [self]:
            print_line(self.format(record))


_logger = logging.getLogger("syncengine")
_logger.addHandler(_OwnHandler(logging.WARNING))
