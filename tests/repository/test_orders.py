"""docs/threads.md names the atomic words that the code has, and those that it accesses with relaxed order.

So it does with plain words, to which kernels, streams and other processes store.
"""

import re

from repository import ROOT, cpp_sources

SOURCES = {path: re.sub(r"//.*", "", path.read_text()) for path in cpp_sources("csrc")}
DECLARED = re.compile(r"std::atomic<[^;(){}]*>+\s+(\w[^;()]*);")
NAMES = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?:=[^,]*|\{[^}]*\})?(?:,|$)")
SCOPE = re.compile(r"(?:class|struct)\s+(?:alignas\(\w+\)\s+)?(\w+)(?:\s+final)?(?:\s*:[^;{}()]*)?\s*$")
PARENS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
USED = re.compile(
    rf"(\w+)(?:{PARENS}|\[[^\]]*\])*\s*(?:\.|->)\s*(?:load|store|exchange|fetch_\w+|compare_exchange_\w+)({PARENS})"
)
# Words in memory that devices reach, and the functions that access them; what no std::atomic does.
PLAIN = re.compile(r"\buint(?:32|64)_t\*?\s+(\w[^;()]*);")
ACCESSED = re.compile(
    r"(?<![\w.>:])(?:(?:(?:get|set|write|wait_for)_word|(?:get|put)_mark)\(&|(?:load|store)\(\*?)"
    r"(?:\w+(?:\(\))?(?:\[[^\]]*\])*(?:\.|->))+(\w+)"
)
RAW = re.compile(r"__atomic_\w+\(|(?<!asm )\bvolatile\b|\basm volatile\(\"(?:ld|st)\.|\batomic[A-Z]\w+\(")


def scope(text: str, at: int) -> str | None:
    """The class around what is at this place."""
    depth = 0
    for place in range(at - 1, -1, -1):
        depth += {"}": 1, "{": -1}.get(text[place], 0)
        if depth < 0:
            depth = 0
            if found := SCOPE.search(text[:place]):
                return found[1]
    return None


def declared(sources: dict, pattern: re.Pattern = DECLARED) -> set[str]:
    """``Class::word``; outside of classes the file's name stands for the class."""
    found = set()
    for path, text in sources.items():
        for match in pattern.finditer(text):
            where = scope(text, match.start()) or path.stem
            found |= {f"{where}::{name}" for name in NAMES.findall(match[1])}
    return found


def relaxed(sources: dict) -> set[str]:
    """Words without their classes, which a use does not say."""
    uses = [match for text in sources.values() for match in USED.finditer(text)]
    return {match[1] for match in uses if "memory_order_relaxed" in match[2]}


def plain(sources: dict) -> set[str]:
    """``Class::word`` of words that functions for words in the memory of devices access."""
    accessed = {match[1] for text in sources.values() for match in ACCESSED.finditer(text)}
    return {word for word in declared(sources, PLAIN) if word.split("::")[1] in accessed}


def words(text: str) -> set[str]:
    return set(re.findall(r"`(\w+::\w+)`", text))


def last(names: set[str]) -> set[str]:
    return {name.split("::")[1] for name in names}


def test_the_page_has_the_words_of_the_code():
    section = (ROOT / "docs/threads.md").read_text().split("## Memory orders")[1].split("\n## ")[0]
    everything, of_relaxed = words(section), words(section.split("**Relaxed**")[1])
    of_devices = plain({path: text for path, text in SOURCES.items() if ROOT / "csrc/cuda" in path.parents})
    in_code = declared(SOURCES) | of_devices
    # The third column of the first table names functions.
    published = {word for line in section.splitlines() for word in words("|".join(line.split("|")[:3]))}
    assert in_code - everything == set()
    assert published - in_code == set()
    assert of_relaxed - in_code == set()
    names = relaxed(SOURCES)
    assert last(of_relaxed) == names
    rows = section.split("**Plain words**")[1].split("\n\n")[1]
    assert words(rows) == of_devices
    raw = {str(path.relative_to(ROOT / "csrc")) for path, text in SOURCES.items() if RAW.search(text)}
    assert set(re.findall(r"`(\w+/[\w/]+\.\w+)`", rows)) == raw


def test_what_the_code_has_is_found():
    header = ROOT / "csrc/some.h"
    text = "struct A { alignas(64) std::atomic<int> a[2]; class B final : C { std::atomic<X*> b_{0}, c_ = 1; }; };"
    assert declared({header: text + "std::atomic<bool> d = false;"}) == {"A::a", "B::b_", "B::c_", "some::d"}
    text = "x->a[f(1)].store(g(2), std::memory_order_relaxed); b(1, c(2)).load(std::memory_order_acquire); d.load();"
    assert relaxed({header: text}) == {"a"}
    text = "struct A { uint32_t a[2]; uint64_t b, c; uint32_t* d; };"
    assert plain({header: text + "load(*x->d); set_word(&y().z[1].a[0], 1);"}) == {"A::a", "A::d"}
