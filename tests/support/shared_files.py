"""Files in /dev/shm: those that tests leave there must not be taken for those of other programs, nor the other way."""

import contextlib
from pathlib import Path


def shared_files(pattern: str = "*") -> set[Path]:
    """Those whose names match."""
    return set(Path("/dev/shm").glob(pattern))


def is_mapped(file: Path) -> bool:
    """Whether a process maps it now."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            if f"{file}\n" in maps.read_text():
                return True
    return False
