"""Lines of prose have at most 120 columns. ruff and clang-format see to code and its comments, nothing to these."""

import re

import pytest
from repository import ROOT

LONGEST = 120
MARKDOWN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
MAKEFILES = [ROOT / "Makefile", *sorted((ROOT / "tests").rglob("Makefile"))]
# Tables, links alone in their line, and examples of output, which are indented as code.
MAY_BE_LONGER = re.compile(r"\s*\||!?\[[^]]*\]\([^)]*\)$| {4}")


def too_long(text: str, of_makefile: bool = False) -> list[str]:
    """The lines of prose in it that are."""
    wrong, fenced = [], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        prose = line.startswith("#") if of_makefile else not (fenced or MAY_BE_LONGER.match(line))
        if prose and len(line) > LONGEST:
            wrong.append(line)
    return wrong


@pytest.mark.parametrize("path", [*MARKDOWN, *MAKEFILES], ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_has_its_columns(path):
    assert too_long(path.read_text(), of_makefile=path.name == "Makefile") == []


def test_what_is_too_long_is_found():
    long = "word " * 25
    assert too_long(f"{long}\n- {long}\n") == [long, f"- {long}"]
    assert too_long(f"| {long} |\n    {long}\n![{long}](picture.svg)\n```\n{long}\n```\n") == []
    assert too_long(f"# {long}\n\t{long}\n", of_makefile=True) == [f"# {long}"]
