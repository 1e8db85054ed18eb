"""Comments in csrc/ and the pages of docs/ name only C++ files that exist."""

import re

from repository import ROOT, cpp_sources

FILES = [path.relative_to(ROOT).as_posix() for path in cpp_sources("csrc", "tests")]
TEXTS = [*(ROOT / "docs").glob("*.md"), *cpp_sources("csrc")]
NAME = re.compile(r"(?<![\w/.<*])((?:[a-z0-9_]+/)*[a-z0-9][a-z0-9_]*\.(?:h|cpp|cu))\b")


def unknown_names(text: str, comments_only: bool) -> list[str]:
    if comments_only:
        text = "\n".join(re.findall(r"//(.*)", text))
    return [name for name in NAME.findall(text) if not any(f"/{path}".endswith(f"/{name}") for path in FILES)]


def test_files_that_comments_and_pages_name_exist():
    found = {path.name: unknown_names(path.read_text(), path.suffix != ".md") for path in TEXTS}
    assert {path: names for path, names in found.items() if names} == {}


def test_names_of_no_file_are_found():
    assert unknown_names("as in kernels/half.h\n", comments_only=False) == []
    names = unknown_names('#include "gone.h"  // see gone/half.h and half.cu', comments_only=True)
    assert names == ["gone/half.h", "half.cu"]
