"""Lines that syncengine prints by itself, through the logger "syncengine".

While neither that logger nor the root logger has a handler of the program's, a handler of this module writes the lines
to stderr, INFO included. A thread of its own writes them, so that no rank waits for whoever reads stderr.
"""

import atexit
import contextlib
import logging
import sys

from syncengine._C import await_said, say

atexit.register(await_said)


def print_line(text: str, *, level: int = logging.INFO, at_end: bool = False) -> None:
    """Logs ``text``. ``at_end``: waits until it is written, since a child of multiprocessing's may run no atexit."""
    _logger.log(level, "%s", text)
    if at_end:
        await_said()


class _OwnHandler(logging.Handler):
    """Writes lines to stderr, or to the stream in its place, as in a notebook, if the program has no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or _logger.handlers != [self] or (_logger.propagate and logging.root.handlers):
            return
        line = f"syncengine: {self.format(record)}\n"
        with contextlib.suppress(OSError, ValueError):  # closed at the other end, or here
            if sys.stderr is sys.__stderr__:
                say(line)
            else:
                sys.stderr.write(line)
                sys.stderr.flush()


_logger = logging.getLogger("syncengine")
_logger.addHandler(_OwnHandler())
if _logger.level == logging.NOTSET:  # the root logger's level would drop the summary of a run
    _logger.setLevel(logging.INFO)
