"""Importing syncengine: what it says where that can't work, and which version it is."""

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import environ_of
from installation import copy_of_packages
from pool import RankPool
from programs import Result, run_programs
from repository import ROOT

import syncengine
from syncengine import _C, _build

# Without the finder of an editable installation, which knows where the extension is.
AS_A_USER_HAS_IT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if not finder.__module__.startswith("__editable__")]
import syncengine
from syncengine import _C
print(syncengine._C is _C, _C.__file__)
"""


def imported_from(programs: RankPool, folder: Path, **environ: str) -> Result:
    """The program runs where that folder is the first of sys.path, as the working directory is for `python -c`.

    It runs in a fork, which has imported torch, and with it this checkout's `syncengine_autoload`.
    """
    script = folder / "program.py"
    script.write_text(AS_A_USER_HAS_IT)
    return run_programs(programs, [str(script)], [environ_of(PYTHONPATH=str(folder), **environ)])[0]


def last_line(told: Result) -> str:
    assert told.returncode == 1
    return told.stderr.splitlines()[-1]


def test_in_the_source_folder_it_says_so(programs: RankPool, tmp_path: Path):
    """Python finds the sources first, also where the package is installed."""
    copy_of_packages(tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    text = last_line(imported_from(programs, tmp_path))
    assert text.startswith("ModuleNotFoundError: No module named 'syncengine._C': ")
    assert f"{tmp_path} is the source folder" in text
    assert "leave it" in text
    assert "`make build`" in text


@pytest.mark.nightly
def test_an_installation_for_another_python_is_named_as_such(programs: RankPool, tmp_path: Path):
    folder = copy_of_packages(tmp_path).parent
    (folder / "_C.cpython-33m-x86_64-linux-gnu.so").touch()
    text = last_line(imported_from(programs, tmp_path))
    assert "_C.cpython-33m-x86_64-linux-gnu.so is for another Python" in text
    assert "install syncengine-torch again" in text


@pytest.mark.parametrize(
    ("version", "tag"),
    [
        ("2.13.0", "torch213"),
        ("2.13.1+cpu", "torch213"),
        ("2.14", "torch214"),
        ("2.14.0a0+git1234567", "torch-2.14.0a0+git1234567"),
        ("2.15.0.dev20261101+cu132", "torch-2.15.0.dev20261101+cu132"),
        ("2.15.0rc2", "torch-2.15.0rc2"),
    ],
)
def test_releases_of_one_minor_share_an_extension_and_other_versions_do_not(version: str, tag: str):
    assert _build.tag(version) == tag


def test_another_minors_extension_is_never_tried(programs: RankPool, tmp_path: Path):
    """The file would load, but bears the name of another release."""
    extension = copy_of_packages(tmp_path, lambda ours: ours)
    extension.parent.rename(extension.parent.with_name("torch299"))
    source = tmp_path / "syncengine" / "_ext" / "source"
    source.mkdir()
    (source / "id").write_text("0123")
    text = last_line(imported_from(programs, tmp_path))
    assert text == (
        f"ModuleNotFoundError: No module named 'syncengine._C': this is torch {torch.__version__}, and syncengine has "
        "been built for torch299: compile it for this one, once, by `python -m syncengine build`, which needs g++ and "
        "some minutes"
    )


def test_the_users_own_extension_is_taken_if_nobody_else_may_write_there(programs: RankPool, tmp_path: Path):
    extension = copy_of_packages(tmp_path, lambda ours: ours)
    source = tmp_path / "syncengine" / "_ext" / "source"
    source.mkdir()
    (source / "id").write_text("0123")
    own = tmp_path / "cache" / "syncengine" / f"torch-{torch.__version__}-0123" / extension.name
    own.parent.mkdir(parents=True)
    extension.rename(own)
    told = imported_from(programs, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert told.stdout == f"True {own}\n", told.stderr
    own.parent.chmod(0o777)
    told = imported_from(programs, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert f"{own.parent} belongs to another user, or others may write to it: remove it" in told.stderr
    assert told.stderr.endswith(f": remove {own.parent} and run `python -m syncengine build`\n")


@pytest.mark.nightly
def test_build_names_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The command `python -m syncengine build` runs where no extension, no compiler and no header are there."""
    copy_of_packages(tmp_path)
    source = tmp_path / "syncengine" / "_ext" / "source"
    source.mkdir()
    (source / "id").write_text("0123")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": "no-such-compiler"}
    command = [sys.executable, "-m", "syncengine", "build"]
    told = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600)
    assert told.returncode == 2
    assert told.stderr == (
        "syncengine build: no-such-compiler is not on the PATH: install g++ 12 or later, or name another by CXX\n"
    )
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(_build.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(_build.BuildError, match=r"Python\.h is missing: install Python's headers"):
        _build._compile_own(_build.Torch.installed(), tmp_path / "cache" / "syncengine" / "torch" / "_C.so")


def test_build_compiles_nothing_where_there_is_an_extension(programs: RankPool):
    (told,) = run_programs(programs, ["-m", "syncengine", "build"], [environ_of()])
    assert told.returncode == 0
    assert told.stdout == f"{_C.__file__} is there for PyTorch {torch.__version__}: nothing is to be compiled\n"


def test_version_says_which_build_this_is(programs: RankPool):
    (told,) = run_programs(programs, ["-m", "syncengine", "--version"], [environ_of()])
    assert told.stdout == f"syncengine {syncengine.__version__}, build {_C.build_id}, torch {torch.__version__}\n"


def test_other_modules_that_are_missing_are_named_as_ever(tmp_path: Path):
    copy_of_packages(tmp_path)
    (tmp_path / "torch.py").write_text("import nowhere_to_be_found")
    command = [sys.executable, "-c", "import syncengine"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert last_line(told) == "ModuleNotFoundError: No module named 'nowhere_to_be_found'"


def test_the_version_is_the_installed_one():
    assert syncengine.__version__ == importlib.metadata.version("syncengine-torch")
    assert f'version = "{syncengine.__version__}"' in (ROOT / "pyproject.toml").read_text()
