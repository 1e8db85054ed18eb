"""Threads allocate, free and log until the process has ended: no object that they use may be destroyed before."""

import re
from pathlib import Path

import pytest
from repository import ROOT

CSRC = ROOT / "csrc"
# A static object: `static Type name;`, `= ...`, `{...}`; not a function, a pointer or a reference.
STATIC = re.compile(r"^\s*static (?!constexpr)(?:const )?([\w:]+(?:<.*>)?) \w+(?:;| =|\{)", re.MULTILINE)
WITHOUT_DESTRUCTOR = {"int", "bool", "size_t", "uint64_t", "std::mutex", "std::once_flag"}
WITHOUT_DESTRUCTOR |= {"Isa", "ReduceFunction", "CudaDriver"}  # of an enum, a pointer, pointers


def destroyed_at_exit(source: str) -> list[str]:
    types = STATIC.findall(source)
    return [t for t in types if t not in WITHOUT_DESTRUCTOR and not t.startswith("std::atomic<")]


def test_the_pattern_finds_what_it_is_for():
    assert destroyed_at_exit("  static PoolAllocator allocator;\n  static std::map<int, int> known{};\n") == [
        "PoolAllocator",
        "std::map<int, int>",
    ]
    assert destroyed_at_exit("  static const Fault fault = read_fault();\n") == ["Fault"]
    assert destroyed_at_exit("static void run();\n static auto* one = new One;\n  static std::mutex mutex;\n") == []


@pytest.mark.parametrize("path", sorted(CSRC.rglob("*.cpp")), ids=lambda path: str(path.relative_to(CSRC)))
def test_no_static_object_is_destroyed(path: Path):
    assert destroyed_at_exit(path.read_text()) == []
