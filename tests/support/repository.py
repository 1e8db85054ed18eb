"""Where the repository is, and what tests share."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent


def cpp_sources(*folders: str) -> list[Path]:
    """The C++ and CUDA files of these folders of the repository."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in files if path.suffix in (".h", ".cpp", ".cu"))
