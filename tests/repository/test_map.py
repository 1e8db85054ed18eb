"""CONTRIBUTING.md says of each source where its tests are."""

from __future__ import annotations

import re
from fnmatch import fnmatch

from repository import ROOT

SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("csrc", "syncengine", "syncengine_autoload")
    for kind in ("*.h", "*.cpp", "*.cu", "*.py")
    for path in (ROOT / folder).rglob(kind)
]
TESTS = [
    path.relative_to(ROOT).as_posix()
    for kind in ("test_*.py", "*_test.cpp", "*_test.cu")
    for path in (ROOT / "tests").rglob(kind)
]


def rows() -> dict[str, list[str]]:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("### Where the tests of a source are")[2]
    found = re.findall(r"^\| `(\S+)` \| (`.*`) \|$", table, re.MULTILINE)
    return {sources: re.findall(r"`(\S+)`", tests) for sources, tests in found}


def test_each_source_and_each_test_is_in_the_map():
    table = rows()
    assert [source for source in SOURCES if not any(source.startswith(row) for row in table)] == []
    patterns = {pattern for tests in table.values() for pattern in tests}
    assert [test for test in TESTS if not any(fnmatch(test, pattern) for pattern in patterns)] == []


def test_each_row_finds_something():
    table = rows()
    assert [row for row in table if not any(source.startswith(row) for source in SOURCES)] == []
    patterns = {pattern for tests in table.values() for pattern in tests}
    assert [pattern for pattern in patterns if not any(fnmatch(test, pattern) for test in TESTS)] == []
