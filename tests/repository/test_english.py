"""Comments and docstrings are English: whole sentences, or noun phrases that name what follows.

A comment is read away from the code beside it, so it says what it is about. The rules find the habits that hide that:

C1  a first sentence that begins with a word for something else: What, Who, It, Those, Of, The same ...
C2  a later sentence that begins with Of, Those, Whose or Theirs
C3  a sentence that begins with a preposition or a conjunction, and never comes to a main clause
C4  a comment that names nothing: no identifier of the code, and no noun of the glossary

Comments behind code may be phrases, and are not checked. `python tests/repository/test_english.py FOLDER` lists
what the rules find there.
"""

import ast
import inspect
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "syncengine", "syncengine_autoload")

HEADLESS = re.compile(r"(What|Who|Whose|Whom|Those|It|Its|They|Them|Ours|Theirs|Of|The same|The others?)\b")
LATER = re.compile(r"(Of|Those|Whose|Theirs)\b")
HANGING = re.compile(
    r"(As|By|In|On|At(?! most| least)|For|From|With|Without|Behind|Before|After|To|Where|When|If|Until|Between|Beside)"
    r"\b(?![^,:;?]*[,:;?])"
)
# Words that are certainly code: in backticks, paths and calls, with an underscore, a capital inside, only capitals.
CODE = re.compile(
    r"`[^`]+`|\w_\w|\b_\w|\w::\w|\w\(|\w\.\w|(?<!\w)\.\w"
    r"|\b[a-z]+[A-Z]|\b[A-Z]\w*[a-z]\w*[A-Z]|\b[A-Z]{2}|\b[a-z]+\d"
)
# The words of a reader who knows PyTorch and an operating system, beside those of the glossary.
COMMON = (
    "address allocator argument autograd backend backward buffer byte caller cgroup class collective command "
    "connection contribution core deadline descriptor destructor device dtype element error event exception "
    "exchange exponent extension file fork forward frame function futex future gradient graph handshake hook host "
    "instruction integer interpreter iterator kernel layer link lock loop machine mantissa mapping memory message "
    "model module multicast mutex network node notice offset operand optimizer packet page parameter peer pointer "
    "process processor program queue receive reducer scale send signal size socket storage stream stride struct sum "
    "symbol tensor test thread time timeout torch trace transport type variable view weight wrapper "
)


class Block(NamedTuple):
    """A comment, or a docstring: the number of its first line, and its text without `//`, `#` or quotes."""

    line: int
    text: str


class Finding(NamedTuple):
    line: int
    rule: str
    sentence: str


def glossary(page: str) -> set[str]:
    """The words of the first cells of all tables whose first column is headed `term`."""
    words, of_terms = set(), False
    for row in page.splitlines():
        cell = row.split("|")[1].lower().strip() if row.startswith("|") and row.count("|") > 2 else ""
        of_terms = bool(cell) and (of_terms or cell == "term")
        words |= set(re.findall(r"[a-z]{3,}", cell)) if of_terms else set()
    return words - {"term", "and"}


def nouns_known() -> set[str]:
    """The nouns of the glossary, and common ones."""
    return glossary((ROOT / "docs/glossary.md").read_text(encoding="utf-8")) | set(COMMON.split())


def comments(code: str) -> list[Block]:
    """C++ comments on lines of their own, without lines that continue a comment behind code."""
    blocks: list[Block] = []
    last, column = -1, -1  # of a comment's line; where it begins, behind code
    for number, line in enumerate(code.splitlines(), 1):
        own = re.match(r"(\s*)//+ ?(.*)", line)
        if not own:
            behind = re.search(r"(?<!:)//(?=[^\"]*$)", line)
            column = behind.start() if behind else -1
            continue
        if len(own[1]) == column or re.match(r"(---|NOLINT|clang-format|CHECK)", own[2]):
            continue
        column = -1
        if last == number - 1 and blocks:
            blocks[-1] = blocks[-1]._replace(text=f"{blocks[-1].text}\n{own[2]}")
        else:
            blocks.append(Block(number, own[2]))
        last = number
    return blocks


def bound_docstrings(code: str) -> list[Block]:
    """String literals in pybind11's definitions that are sentences, but not texts of errors."""
    found = []
    for match in re.finditer(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+(?=[,)])', code):
        text = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', match[0])).replace('\\"', '"').replace("\\n", "\n")
        before = code[: match.start()].rstrip()
        if re.match(r"[A-Z`].* .*\.$", text, re.DOTALL) and before.endswith(",") and "Error(" not in before[-60:]:
            found.append(Block(code.count("\n", 0, match.start()) + 1, text))
    return found


def of_python(code: str) -> list[Block]:
    """Python docstrings, those of variables among them, and comments on lines of their own."""
    blocks = []
    for node in ast.walk(ast.parse(code)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                blocks.append(Block(statement.lineno, inspect.cleandoc(value.value)))
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type != tokenize.COMMENT or token.line[: token.start[1]].strip():
            continue
        text = token.string.lstrip("#").removeprefix(" ")
        if re.match(r"(!|type:|noqa|ruff:|mypy:|fmt:|---)", text):
            continue
        if last == token.start[0] - 1:
            blocks[-1] = blocks[-1]._replace(text=f"{blocks[-1].text}\n{text}")
        else:
            blocks.append(Block(token.start[0], text))
        last = token.start[0]
    return sorted(blocks)


def blocks_of(path: str, code: str) -> list[Block]:
    if path.endswith((".py", ".pyi")):
        return of_python(code)
    return sorted(comments(code) + (bound_docstrings(code) if "bindings/" in path else []))


def sentences(text: str) -> list[str]:
    """The sentences of all paragraphs and list items, without lines that are code, tables or drawings."""
    found: list[str] = []
    paragraph: list[str] = []

    def end() -> None:
        whole = " ".join(paragraph)
        paragraph.clear()
        whole = re.sub(r"\b(e\.g|i\.e|etc|cf|vs)\.(?=\s)", r"\1", whole)
        found.extend(part for part in re.split(r"(?<=[.!?])[\"')]*\s+(?=[A-Z`\"'(])", whole) if part)

    for line in text.splitlines():
        if not line.strip() or re.match(r"\s{4,}|\s*[|>+]|\s*::", line):
            end()
        elif item := re.match(r"\s*(?:[-*]|\d+\.|\(?[a-z\d]\))\s+(.*)", line):
            end()
            paragraph.append(item[1])
        else:
            paragraph.append(line.strip())
    end()
    return found


def names_something(text: str, nouns: set[str]) -> bool:
    if CODE.search(text):
        return True
    for word in re.findall(r"[A-Za-z]+", text.lower()):
        if {word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)} & nouns:
            return True
    return False


def findings(blocks: list[Block], nouns: set[str]) -> list[Finding]:
    """The sentences of a file's comments that break a rule."""
    found = []
    for number, block in enumerate(blocks):
        parts = sentences(block.text)
        if not parts:
            continue
        first = parts[0]
        of_file = number == 0 and block.line <= 2
        if HEADLESS.match(first) and not first.endswith("?") and not (of_file and names_something(first, nouns)):
            found.append(Finding(block.line, "C1", first))
        found += [Finding(block.line, "C2", part) for part in parts[1:] if LATER.match(part)]
        for part in parts:
            if HANGING.match(part) and not (part == first and of_file):
                found.append(Finding(block.line, "C3", part))
        if not names_something(block.text, nouns):
            found.append(Finding(block.line, "C4", first))
    return found


def sources(folder: str) -> list[Path]:
    path = ROOT / folder
    files = [path] if path.is_file() else path.rglob("*")
    return sorted(file for file in files if file.suffix in (".h", ".cpp", ".cu", ".py", ".pyi"))


def found_in(path: Path, nouns: set[str]) -> list[Finding]:
    name = path.relative_to(ROOT).as_posix()
    return findings(blocks_of(name, path.read_text(encoding="utf-8")), nouns)


def listing(folders: list[str]) -> None:
    """Prints all findings, and counts for each folder."""
    nouns, counts = nouns_known(), {}
    for folder in folders:
        for path in sources(folder):
            name, found = path.relative_to(ROOT).as_posix(), found_in(path, nouns)
            counter = counts.setdefault("/".join(name.split("/")[: 1 + (name.count("/") > 1)]), Counter())
            counter["blocks"] += len(blocks_of(name, path.read_text(encoding="utf-8")))
            for finding in found:
                counter[finding.rule] += 1
                print(f"{name}:{finding.line}: {finding.rule} {finding.sentence[:150]}")
    for key, counter in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(f"{key:24}", *(f"{what} {counter[what]:4}  " for what in ("blocks", "C1", "C2", "C3", "C4")))


@pytest.mark.parametrize("folder", FOLDERS)
def test_comments_are_english(folder):
    nouns, files = nouns_known(), sources(folder)
    assert files
    assert {str(path.relative_to(ROOT)): found for path in files if (found := found_in(path, nouns))} == {}


def rules_of(text: str, line: int = 9) -> list[str]:
    return [finding.rule for finding in findings([Block(line, text)], {"bucket", "rank", "lane"})]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("What each rank sends.", ["C1"]),
        ("The same for buckets.", ["C1"]),
        ("The others wait for this rank.", ["C1"]),
        ("It's the rank.", ["C1"]),
        ("Who waits for this rank?", []),
        ("Otherwise the rank waits. Of the others it knows nothing.", ["C2"]),
        ("Sums of a bucket.\n\n- Those of the rank, which come first.", ["C2"]),
        ("Before the rank sends.", ["C3"]),
        ("Ends the lane. As the rank does.", ["C3"]),
        ("Before the rank sends, the lane is empty.", []),
        ("At most one rank.", []),
        ("At one rank.", ["C3"]),
        ("One that waits for no other.", ["C4"]),
        ("Ends `x`.", []),
        ("Ends the_end.", []),
        ("Ends OldLane.", []),
        ("Ends like DDP.", []),
        ("Those.", ["C1", "C4"]),
        ("A rank:\n\n    Of this.\n    Of that.", []),
        ("", []),
    ],
)
def test_each_rule_finds_what_it_should(text, rules):
    assert rules_of(text) == rules


def test_a_file_may_begin_with_what_it_is_about():
    assert rules_of("What a rank sends.", line=1) == []
    assert rules_of("What is sent.", line=1) == ["C1", "C4"]


def test_comments_of_cpp_are_found():
    code = """\
// A file.
//
// Its contract.
#pragma once
int x;  // behind code
        // and on
  // Above y.
int y;  // behind
// Above z.
const char* z = "http://host";
}  // namespace
"""
    assert comments(code) == [Block(1, "A file.\n\nIts contract."), Block(7, "Above y."), Block(9, "Above z.")]


def test_docstrings_of_bindings_are_found():
    code = """\
module.def("f", &f, py::arg("x"),
           "Sums `x`. "
           "In order.");
throw Error(ErrorKind::InvalidUsage, "This rank is no rank.");
"""
    assert bound_docstrings(code) == [Block(2, "Sums `x`. In order.")]


def test_docstrings_and_comments_of_python_are_found():
    code = '''\
#!/usr/bin/env python
"""A module."""
x: int
"""A variable."""
# Above f,
# on two lines.
def f():  # behind code
    """A function.

    And more.
    """
    return "no docstring"  # noqa
'''
    assert of_python(code) == [
        Block(2, "A module."),
        Block(4, "A variable."),
        Block(5, "Above f,\non two lines."),
        Block(8, "A function.\n\nAnd more."),
    ]


def test_nouns_are_those_of_the_tables_of_terms():
    page = "| folder | x |\n| - | - |\n| shelf | x |\n\n| term | x |\n| --- | --- |\n| job, rank | y |\n"
    assert glossary(f"{page}\n| verb | x |\n| end | x |\n") == {"job", "rank"}
    assert {"bucket", "arena", "gradient"} <= nouns_known()


if __name__ == "__main__":
    listing(sys.argv[1:] or list(FOLDERS))
