"""A number for each build: of the sources that define what lies in shared memory and what goes between hosts."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from marks import mostly_nightly
from repository import ROOT

import syncengine
from syncengine import _C, connect
from syncengine.errors import Mismatch


def build_id_of(root: Path) -> str:
    command = ["make", "-s", "-C", str(ROOT / "tests" / "core"), f"ROOT={root}", "build-id"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout.strip()


def test_both_builds_make_the_same_number() -> None:
    assert _C.build_id == build_id_of(ROOT)


@pytest.mark.parametrize(
    ("file", "counts"),
    mostly_nightly(
        [
            ("transport/shm/layout.h", True),
            ("transport/matching/frame.h", True),
            ("engine/hosts/message.h", True),
            ("collectives/interhost_plan.cpp", True),
            ("bindings/module.cpp", False),
            ("kernels/dispatch.cpp", False),
        ],
        0,
        4,
    ),
)
def test_what_defines_layouts_and_wire_changes_it(tmp_path: Path, file: str, counts: bool) -> None:
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    before = build_id_of(tmp_path)
    with (tmp_path / "csrc" / file).open("a") as source:
        source.write("// something else\n")
    assert (build_id_of(tmp_path) != before) == counts


def test_ranks_of_other_builds_are_named() -> None:
    def exchange_with(build: dict) -> None:
        def exchange(mine: bytes) -> list[bytes]:
            head, _, address = mine.partition(b"\n")
            theirs = {**json.loads(head), "host": "elsewhere"}
            del theirs["build"]
            return [mine, json.dumps({**theirs, **build}).encode() + b"\n" + address]

        return connect._agree(exchange, syncengine.config.Config(), b"an address", [0, 1])

    for build, text in (({"build": "0123456789abcdef"}, "0123456789abcdef"), ({}, "an older one")):
        with pytest.raises(Mismatch, match=f"rank 1 on elsewhere runs another build .* .{text}. than rank 0"):
            exchange_with(build)
    names, _, _ = exchange_with({"build": _C.build_id})
    assert names[1] == "elsewhere"


def test_ranks_with_another_minor_of_torch_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first rank warns, and all ranks go on."""

    def agree(rank: int, version: str) -> None:
        def exchange(mine: bytes) -> list[bytes]:
            head, _, address = mine.partition(b"\n")
            theirs = {**json.loads(head), "host": "elsewhere", "torch": version}
            other = json.dumps(theirs).encode() + b"\n" + address
            return [mine, other] if rank == 0 else [other, mine]

        connect._agree(exchange, syncengine.config.Config(), b"an address", [0, 1])

    major, minor, _ = torch.__version__.split(".", 2)
    agree(0, f"{major}.{minor}.99+cu999")
    agree(1, "2.99.0")
    assert caplog.messages == []
    agree(0, "2.99.0")
    agree(0, "2.99.0")
    (told,) = caplog.messages
    assert told.startswith(f"rank 0 has torch {torch.__version__}, rank 1 on elsewhere has 2.99.0: ")
