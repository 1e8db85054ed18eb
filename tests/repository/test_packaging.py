"""What an installation needs: a wheel the torch that it was built with, sources any that the documents name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from repository import ROOT


def requirements(metadata: str) -> list[str]:
    lines = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    return [line for line in lines if "extra ==" not in line]


def run(folder: Path, *arguments: str) -> None:
    told = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stdout + told.stderr


def test_who_needs_which_torch(tmp_path: Path):
    """A wheel without what is compiled; the metadata by which pip chooses before it builds one; a source archive's."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("csrc", "syncengine", "syncengine_autoload"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "prepared").mkdir()
    prepare = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('prepared')"
    run(folder, "-c", prepare)
    run(folder, "setup.py", "-q", "bdist_wheel", "--skip-build")
    run(folder, "setup.py", "-q", "egg_info", "--egg-base", "prepared")
    (wheel,) = folder.glob("dist/*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        built = opened.read(name).decode()
    (prepared,) = folder.glob("prepared/*.dist-info/METADATA")
    (source,) = folder.glob("prepared/*.egg-info/PKG-INFO")
    pinned = [f"torch=={torch.__version__.partition('+')[0]}", "numpy"]
    assert requirements(built) == requirements(prepared.read_text()) == pinned
    assert requirements(source.read_text()) == ["torch>=2.11", "numpy"]
