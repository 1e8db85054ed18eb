"""What syncengine prints goes through the logger "syncengine", to the program's handlers or to stderr."""

import contextlib
import io
import logging
import os
import sys

import pytest
from command import environ_of
from marks import mostly_nightly
from programs import run_programs

from syncengine import lines

PROGRAM = """
import logging, sys
{configure}
from syncengine.lines import print_line
print_line("a line")
logging.getLogger("syncengine").debug("too small")
logging.getLogger("syncengine").warning("a %s", "warning")
"""
OURS = "syncengine: a line\nsyncengine: a warning\n"


@pytest.mark.parametrize(
    ("configure", "expected"),
    mostly_nightly(
        [
            ("", OURS),
            ("logging.basicConfig(format='root %(message)s')", "root a line\nroot a warning\n"),
            ("logging.getLogger('syncengine').addHandler(logging.StreamHandler())", "a line\na warning\n"),
            ("logging.getLogger('syncengine').setLevel(logging.WARNING)", "syncengine: a warning\n"),
        ],
        0,
    ),
    ids=["nothing", "root", "own", "level"],
)
def test_lines_go_where_the_program_has_them(programs, tmp_path, configure, expected):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(configure=configure))
    (told,) = run_programs(programs, [str(script)], [environ_of()])
    assert (told.returncode, told.stderr) == (0, expected)


def test_a_stream_in_the_place_of_stderr_gets_lines(monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # without pytest's, which it adds anew for each part of a test
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines.print_line("a line", at_end=True)
    logging.getLogger("syncengine").info("%d ranks", 2)
    assert sys.stderr.getvalue() == "syncengine: a line\nsyncengine: 2 ranks\n"


def test_a_stderr_that_is_not_there_raises_nothing(monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    closed = io.StringIO()
    closed.close()
    read, write = os.pipe()
    os.close(read)
    unread = os.fdopen(write, "w")
    for stream in (None, closed, unread):
        monkeypatch.setattr(sys, "stderr", stream)
        assert lines.print_line("a line", at_end=True) is None
    with contextlib.suppress(BrokenPipeError):
        unread.close()


def test_a_logger_that_keeps_its_records_to_itself_still_prints(monkeypatch):
    """Handlers of the root logger get nothing then."""
    monkeypatch.setattr(logging.getLogger("syncengine"), "propagate", False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines.print_line("a line")
    assert sys.stderr.getvalue() == "syncengine: a line\n"
