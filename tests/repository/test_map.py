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


# Of a file's name in a comment or on a page: what it is called in the repository.
NAME = re.compile(r"(?<![\w/.<*])((?:[a-z0-9_]+/)*[a-z0-9][a-z0-9_]*\.(?:h|cpp|cu))\b")
HEADERS = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.h")]
TEXTS = [*(ROOT / "docs").glob("*.md"), *(path for path in map(ROOT.joinpath, SOURCES) if path.suffix != ".py")]


def unknown_names(text: str, comments_only: bool) -> list[str]:
    if comments_only:
        text = "\n".join(re.findall(r"//(.*)", text))
    known = [f"/{path}" for path in SOURCES + TESTS + HEADERS]
    return [name for name in NAME.findall(text) if not any(path.endswith(f"/{name}") for path in known)]


def test_files_that_comments_and_pages_name_exist():
    found = {path.name: unknown_names(path.read_text(), path.suffix != ".md") for path in TEXTS}
    assert {path: names for path, names in found.items() if names} == {}


def test_names_of_no_file_are_found():
    assert unknown_names("as in kernels/half.h\n", comments_only=False) == []
    assert unknown_names('#include "gone.h"  // see gone/half.h and half.cu', comments_only=True) == [
        "gone/half.h",
        "half.cu",
    ]


def test_each_thorough_test_exists():
    for line in (ROOT / "tests" / "thorough.txt").read_text().splitlines():
        if not line.startswith("#"):
            file, _, test = line.partition("[")[0].partition("::")
            there = f"def {test}(" if test else ""
            assert there in (ROOT / file).read_text(), f"tests/thorough.txt: {line} is gone"
