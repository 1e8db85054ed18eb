"""Installations of their own: without an extension, or with one that is broken, or of another build."""

import shutil
from collections.abc import Callable
from pathlib import Path

from repository import ROOT

from syncengine import _C


def copy_of_packages(folder: Path, change: Callable[[bytes], bytes] | None = None) -> Path:
    """The packages in `folder`; the place of their extension, which is: what `change` makes of ours, if it is given."""
    for package in ("syncengine", "syncengine_autoload"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("_C.*.so", "__pycache__"))
    ours = Path(_C.__file__)
    extension = folder / ours.relative_to(ROOT)
    if change is not None:
        extension.write_bytes(change(ours.read_bytes()))
    return extension
