"""What an installation needs, and what a wheel holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command import environ_of
from pool import RankPool
from programs import run_programs
from repository import ROOT
from test_layers import LAYERS

from syncengine import _build


def requirements(metadata: str) -> list[str]:
    lines = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    return [line for line in lines if "extra ==" not in line]


@pytest.mark.thorough
def test_any_torch_from_2_11_on_will_do(programs: RankPool, tmp_path: Path):
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
    for metadata in (built, prepared.read_text(), source.read_text()):
        assert requirements(metadata) == ["torch>=2.11", "numpy"]


def test_the_sources_in_a_wheel_are_complete(tmp_path: Path):
    """Each header that the part with torch includes is there, and none of the rest's sources."""
    (tmp_path / "core.a").write_bytes(b"an archive")
    _build.put_sources(ROOT / "csrc", tmp_path / "core.a", tmp_path / "source")
    csrc = tmp_path / "source" / "csrc"
    assert {path.relative_to(csrc).parts[0] for path in csrc.rglob("*.cpp")} == set(_build.WITH_TORCH)
    builder = _build.Builder(csrc, tmp_path / "out")
    for unit in builder._units(with_torch=True):
        preprocess = [*_build.COMPILER, "-std=c++20", "-E", "-x", "c++", f"-I{csrc}", "-MM", "-MG"]
        said = subprocess.run([*preprocess, str(unit)], check=True, capture_output=True, text=True, timeout=600).stdout
        ours = [name for name in said.replace("\\\n", " ").split() if name.split("/")[0] in LAYERS]
        assert ours == []  # what is missing is named as it is included


@pytest.mark.nightly
def test_a_wheel_compiles_what_it_lacks(tmp_path: Path):
    """Without the extension for this torch it names `python -m syncengine build`, which makes it: minutes."""
    environ = environ_of(
        SYNCENGINE_TORCHES=str(_build.Torch.installed().folder), XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    bdist = ["setup.py", "-q", "bdist_wheel", "-d", str(tmp_path), "--bdist-dir", str(tmp_path / "bdist"), "build"]
    run = {"check": True, "env": environ, "timeout": 3000}
    subprocess.run([sys.executable, *bdist, "--build-lib", str(tmp_path / "lib")], cwd=ROOT, **run)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "installed")
    home = tmp_path / "installed"
    environ["PYTHONPATH"] = str(home)
    (extension,) = home.glob("syncengine/_ext/torch*/_C.*.so")
    extension.unlink()
    subprocess.run([sys.executable, "-m", "syncengine", "build"], cwd=home, **run)
    program = "import syncengine; from syncengine import _C; print(_C.build_id, _C.has_cuda, _C.__file__)"
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=home, capture_output=True, text=True, **run
    ).stdout.split()
    assert said[:2] == [_build.build_id(ROOT / "csrc"), "False"]
    assert Path(said[2]).is_relative_to(tmp_path / "cache" / "syncengine")
    assert Path(said[2]).parent.stat().st_mode & 0o777 == 0o700
