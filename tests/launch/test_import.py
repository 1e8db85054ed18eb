"""Importing syncengine: what it says where that can't work, and which version it is."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installation import copy_of_packages
from repository import ROOT

import syncengine

# Without the finder of an editable installation, which knows where the extension is.
AS_A_USER_HAS_IT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if not finder.__module__.startswith("__editable__")]
import syncengine
"""


def imported_from(folder: Path) -> str:
    """The last line that Python says."""
    told = subprocess.run(
        [sys.executable, "-c", AS_A_USER_HAS_IT], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert told.returncode == 1
    return told.stderr.splitlines()[-1]


@pytest.mark.thorough
def test_in_the_source_folder_it_says_so(tmp_path: Path):
    """Python finds the sources first, also where the package is installed."""
    copy_of_packages(tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    text = imported_from(tmp_path)
    assert text.startswith("ModuleNotFoundError: No module named 'syncengine._C': ")
    assert f"{tmp_path} is the source folder" in text
    assert "leave it" in text
    assert "`make build`" in text


@pytest.mark.thorough
def test_an_installation_for_another_python_is_named_as_such(tmp_path: Path):
    copy_of_packages(tmp_path)
    (tmp_path / "syncengine" / "_C.cpython-33m-x86_64-linux-gnu.so").touch()
    text = imported_from(tmp_path)
    assert "_C.cpython-33m-x86_64-linux-gnu.so is for another Python" in text
    assert "install syncengine again" in text


def test_other_modules_that_are_missing_are_named_as_ever(tmp_path: Path):
    copy_of_packages(tmp_path)
    (tmp_path / "torch.py").write_text("import nowhere_to_be_found")
    assert imported_from(tmp_path) == "ModuleNotFoundError: No module named 'nowhere_to_be_found'"


def test_the_version_is_the_installed_one():
    assert syncengine.__version__ == importlib.metadata.version("syncengine-torch")
    assert f'version = "{syncengine.__version__}"' in (ROOT / "pyproject.toml").read_text()
