"""What an installation needs: a wheel the torch that it was built with, sources any that the documents name."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from command import environ_of
from pool import RankPool
from programs import run_programs
from repository import ROOT


def requirements(metadata: str) -> list[str]:
    lines = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    return [line for line in lines if "extra ==" not in line]


@pytest.mark.thorough
def test_who_needs_which_torch(programs: RankPool, tmp_path: Path):
    """A wheel without what is compiled; the metadata by which pip chooses before it builds one; a source archive's."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("csrc", "syncengine", "syncengine_autoload"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "prepared").mkdir()
    prepare = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('prepared')"
    (folder / "prepare.py").write_text(prepare)
    bdist, info = ["setup.py", "-q", "bdist_wheel", "--skip-build"], ["setup.py", "-q", "egg_info"]
    for arguments in (["prepare.py"], bdist, [*info, "--egg-base", "prepared"]):
        (told,) = run_programs(programs, arguments, [environ_of(PYTHONPATH=str(folder))])
        assert told.returncode == 0, told.stdout + told.stderr
    (wheel,) = folder.glob("dist/*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        built = opened.read(name).decode()
    (prepared,) = folder.glob("prepared/*.dist-info/METADATA")
    (source,) = folder.glob("prepared/*.egg-info/PKG-INFO")
    pinned = [f"torch=={torch.__version__.partition('+')[0]}", "numpy"]
    assert requirements(built) == requirements(prepared.read_text()) == pinned
    assert requirements(source.read_text()) == ["torch>=2.11", "numpy"]
