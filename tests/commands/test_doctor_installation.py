"""`syncengine doctor` where syncengine is broken: an extension that does not load, or of another build; no torch."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from command import alone, by_hand, syncengine
from doctor_ranks import PATIENT, finding, report_of
from installation import copy_of_packages
from marks import mostly_nightly
from pool import RankPool

from syncengine import _C


def copied(folder: Path, change: Callable[[bytes], bytes]) -> dict[str, str]:
    """The environment to use packages of their own in `folder`, with an extension that `change` has made of ours."""
    copy_of_packages(folder, change)
    return {"PYTHONPATH": str(folder)}


def damaged(extension: bytes) -> bytes:
    return bytes(len(extension))


def of_another_torch(extension: bytes) -> bytes:
    """Which wants a function that this one does not have."""
    name = b"_ZN3c1010TensorImpl12mutable_gradEv\0"
    assert name in extension
    return extension.replace(name, name.replace(b"mutable", b"altered"))


def of_another_build(extension: bytes) -> bytes:
    """With another build number: the constant that the code returns."""
    number = struct.pack("<Q", int(_C.build_id, 16))
    assert number in extension
    return extension.replace(number, struct.pack("<Q", 0x0123456789ABCDEF))


def test_an_extension_that_cannot_be_loaded(programs: RankPool, tmp_path: Path):
    environ = copied(tmp_path, of_another_torch)
    text = alone(programs, "doctor", environ=environ)
    assert text.returncode == 2, text.stderr
    for part in (f"{Path(_C.__file__).name} can't be loaded: ", "undefined symbol", "install syncengine-torch again"):
        assert part in text.stdout
    other = alone(programs, "bench", environ=environ)
    assert other.returncode == 2
    assert "can't be imported: ImportError: syncengine's extension" in other.stderr
    assert "Traceback" not in text.stdout + text.stderr + other.stderr


@pytest.mark.parametrize("broken", mostly_nightly([0, 1], 1))
def test_one_rank_cannot_load_it(programs: RankPool, tmp_path: Path, unused_port: int, broken: int):
    environs = [copied(tmp_path, damaged) if rank == broken else {} for rank in range(2)]
    results = by_hand(programs, environs, unused_port, "doctor", "--json", *PATIENT)
    assert [result.returncode for result in results] == [2, 0], [result.stderr for result in results]
    assert results[1].stdout == ""
    report = report_of(results[0])
    found = finding(report, "extension")
    assert found["ranks"] == [broken]
    assert found["text"].startswith(f"rank {broken} on ")
    assert report["self_test"] == {}


@pytest.mark.thorough
def test_one_rank_has_another_build(programs: RankPool, tmp_path: Path, unused_port: int):
    """As init() says it."""
    other = copied(tmp_path, of_another_build)
    results = by_hand(programs, [{}, other], unused_port, "doctor", "--json", *PATIENT)
    assert [result.returncode for result in results] == [2, 0], [result.stderr for result in results]
    found = [found for found in report_of(results[0])["findings"] if found["name"] == "self-test"]
    # Each rank compares for itself, or has heard of it from the other one before: each text names both builds.
    for words in ("runs another build of syncengine", "0123456789abcdef", _C.build_id):
        assert [one for one in found if words not in one["text"]] == []
    assert {one["remedy"] for one in found} == {"install the same one on all hosts"}


@pytest.mark.parametrize(
    "error", mostly_nightly(["ImportError('libtorch.so is of another libc')", "OSError('no libgomp.so.1')"], 1)
)
def test_a_torch_that_cannot_be_imported(tmp_path: Path, error: str):
    """It is what imports syncengine that fails then: `import torch` comes first there."""
    environ = copied(tmp_path, damaged)
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    text = syncengine("doctor", environ=environ, cwd=tmp_path)
    assert text.returncode == 2
    assert f"PyTorch can't be imported: {eval(error)}\n   install PyTorch: pip install torch\n" in text.stdout
    assert text.stderr == ""
    report = report_of(syncengine("doctor", "--json", environ=environ, cwd=tmp_path))
    assert finding(report, "torch")["severity"] == "fatal"
    assert report["status"] == "can't run"


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "--help"], ["--help"], []])
def test_other_commands_say_so_without_a_traceback(tmp_path: Path, arguments: list[str]):
    environ = copied(tmp_path, damaged)
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is of another libc')\n")
    said = syncengine(*arguments, environ=environ, cwd=tmp_path)
    assert said.returncode == 2
    first, second = said.stderr.splitlines()
    assert first == "syncengine can't be imported: ImportError: libtorch.so is of another libc"
    assert "syncengine doctor" in second
    assert said.stdout == ""
