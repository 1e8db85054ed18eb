"""Tables for the terminal, and result files that say where and how they were measured."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from .ranks import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"
CPU_FIELDS = (
    "Architecture", "Model name", "CPU(s)", "Thread(s) per core", "Core(s) per socket", "Socket(s)", "NUMA node(s)",
    "L1d cache", "L2 cache", "L3 cache", "CPU max MHz", "Hypervisor vendor",
)  # fmt: skip
PACKAGES = ("torch", "numpy", "mpi4py", "syncengine-torch")


def table(rows: list[tuple[str, ...]]) -> str:
    """A table with columns as wide as they need to be: the first to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def save(path: Path, benchmark: str, options: dict, results: list[dict], **versions: str) -> None:
    """Writes one result file."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--worker"]  # as the user gave them
    document = {
        "benchmark": benchmark,
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *arguments]),
        "options": {name: value for name, value in options.items() if name not in ("worker", "out")},
        "commit": commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version()} | installed() | versions,
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
    print(f"\nwritten: {path}")


def machine() -> dict[str, object]:
    """Facts of the machine by which a reader judges a timing. The load average tells if anything else was running."""
    pairs = dict(line.split(":", 1) for line in said("env", "LC_ALL=C", "lscpu").splitlines() if ":" in line)
    cpu = {field: pairs[field].strip() for field in CPU_FIELDS if field in pairs}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    usable = len(os.sched_getaffinity(0))
    return cpu | {
        "usable CPUs": usable,
        "memory GiB": round(memory, 1),
        "kernel": platform.release(),
        "load average at the end": os.getloadavg()[0],
        "core to core and back, ns (10th percentile, median), at the end": round_trip(),
    }


def round_trip() -> list[int] | None:
    """Nanoseconds of a round trip between two cores, on which exchanges depend; None where it can't be measured."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder, "round_trip"))
        compile_it = ["g++", "-O2", "-std=c++20", "-o", program, str(Path(__file__).with_name("round_trip.cpp"))]
        try:
            subprocess.run(compile_it, check=True, capture_output=True)
            run = subprocess.run([program], check=True, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            return None
    return [int(word) for word in run.stdout.split()]


def installed() -> dict[str, str]:
    """Versions of the packages whose speed is measured."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> str:
    """The commit, with `-dirty` where anything but results has changed; outside a git checkout what COMMIT says."""
    head = said("git", "rev-parse", "--short=12", "HEAD")
    if not head:
        return os.environ.get("COMMIT", "")
    changes = said("git", "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!README.md")
    return f"{head}-dirty" if changes else head


def said(*command: str) -> str:
    """The output of a program; empty if it fails, or is not there."""
    try:
        run = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""
