"""A class name of csrc/ has one home, but for those that docs/glossary.md justifies."""

import re
from collections import defaultdict

from repository import ROOT, cpp_sources

MOST = 8
# A definition, at any depth: no declaration, no enumeration, no specialization. `class A::B {` defines B.
DEFINED = re.compile(
    r"^\s*(?:class|struct)\s+(?:alignas\([^)]*\)\s+)?(?:\w+::)*(\w+)(?:\s+final)?\s*(?::[^{;]*)?\{", re.M
)


def with_two_homes(texts: dict[str, str]) -> dict[str, set[str]]:
    """The names of classes that several files define, and these files."""
    homes = defaultdict(set)
    for path, text in texts.items():
        for name in DEFINED.findall(re.sub(r"template\s*<[^<>]*>", "", text)):
            homes[name].add(path)
    return {name: files for name, files in homes.items() if len(files) > 1}


def test_the_glossary_has_each_name_with_two_homes():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in cpp_sources("csrc")}
    table = (ROOT / "docs" / "glossary.md").read_text().partition("## Class names with several homes")[2]
    justified = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    found = with_two_homes(texts)
    assert found.keys() == justified, {name: files for name, files in found.items() if name not in justified}
    assert len(found) <= MOST


def test_names_with_two_homes_are_found():
    a = "struct One final : public Two {\n  class Inner {\n  };\n};\ntemplate <class T>\nclass alignas(64) Three\n{};\n"
    b = "class One;\nenum class Inner : int { A };\nclass Outer::Three : std::map<int, Two> {\n};\nTwo two{};\n"
    assert with_two_homes({"a.h": a, "b.h": b}) == {"Three": {"a.h", "b.h"}}
    assert with_two_homes({"a.h": a, "b.h": "struct Inner {};\nstruct Inner {};\n"}) == {"Inner": {"a.h", "b.h"}}
