"""What an installation needs, and what a wheel holds."""

import re
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


def compiled_for(devices: str, cuda: int = 13000) -> list[str]:
    flags = _build.architecture_flags(devices, cuda)
    assert all(flag.startswith("-gencode=arch=compute_") for flag in flags)
    return [flag.rpartition("code=")[2] for flag in flags]


def test_devices_that_the_cuda_side_is_compiled_for(tmp_path: Path):
    for unset in ("", " ", ";"):
        assert compiled_for(unset, 12060) == ["sm_80", "sm_90", "compute_90"]
        assert compiled_for(unset, 12080) == [*("sm_80", "sm_90", "compute_90"), *("sm_100", "sm_120", "compute_120")]
    assert compiled_for("5.2 6.1+PTX 7.0;8.6; 9.0a+PTX") == ["sm_70", "sm_86", "sm_90a", "compute_90a"]
    assert _build.architecture_flags("8.0", 12050) == ["-gencode=arch=compute_80,code=sm_80"]
    for name in ("Hopper", "native", "8", "9.0+ptx"):
        with pytest.raises(_build.BuildError, match=f"^TORCH_CUDA_ARCH_LIST: {re.escape(name)} is no number of a dev"):
            compiled_for(f"8.0;{name}")
    with pytest.raises(_build.BuildError, match="5.0;6.1 has no device from 7.0 on"):
        compiled_for("5.0;6.1")
    header = tmp_path / "include" / "cuda_runtime_api.h"
    header.parent.mkdir()
    header.write_text("/* CUDART_VERSION */\n#define CUDART_VERSION  12040\n#define OTHER_VERSION CUDART_VERSION\n")
    assert _build.cuda_version(tmp_path) == 12040


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
