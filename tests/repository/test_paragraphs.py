"""A paragraph or list item of the documentation has at most six lines, so that it has one thought."""

import re

import pytest
from repository import ROOT

MOST_LINES = 6
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
ITEM = re.compile(r"\s*([-*]|\d+\.) ")
NO_PROSE = re.compile(r"[#|<>!]| {4}")


def paragraphs(text: str) -> list[list[str]]:
    """Paragraphs and list items, as lines; headings, tables, code and pictures are none."""
    found: list[list[str]] = [[]]
    fenced = False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        in_item = bool(found[-1]) and ITEM.match(found[-1][0]) is not None
        if fenced or not line.strip() or (NO_PROSE.match(line) and not in_item) or line.lstrip().startswith("```"):
            found.append([])
        elif ITEM.match(line):
            found.append([line])
        else:
            found[-1].append(line)
    return [lines for lines in found if lines]


def too_long(text: str) -> list[str]:
    """The first lines of paragraphs that have more lines."""
    return [lines[0] for lines in paragraphs(text) if len(lines) > MOST_LINES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paragraphs_are_short(page):
    assert too_long(page.read_text()) == []


def test_long_paragraphs_are_found():
    six, seven = "line\n" * 6, "line\n" * 7
    item = "- long\n" + "  more\n" * 6
    assert too_long(f"{six}\n{seven}") == ["line"]
    assert too_long(f"- first\n  more\n{item}- last\n") == ["- long"]
    assert too_long("- item\n" * 9 + "\n" + "| a | b |\n" * 9 + "\n" + "    code\n" * 9) == []
    assert too_long(f"```sh\n{seven}```\n# heading\n{six}") == []
