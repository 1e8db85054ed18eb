"""compute-sanitizer over a test of the CUDA core: no kernel reads or writes what is not there.

Skipped where there is no GPU, or no compute-sanitizer; `make gpu` builds what is checked, and runs it.
"""

import os
import re
import shutil
import subprocess

import pytest
from cuda_ranks import alone, marked, needs_real
from repository import ROOT

TESTS = ROOT / "build" / "core-gpu" / "cuda_tests"


def sanitizer() -> str:
    """Its path: it comes with nvcc, whose folder need not be on the PATH."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ] + ["/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes)]
    path = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    return path or pytest.skip("no compute-sanitizer")


@needs_real("machine code")
@alone
@marked
def test_memcheck_finds_nothing():
    if not TESTS.exists():
        pytest.skip(f"no {TESTS}: `make gpu STEPS=build` builds it")
    options = "--tool memcheck --target-processes all --report-api-errors no --error-exitcode 9"
    # Ranks as processes: the sanitizer may wait for a kernel on the host, where threads would wait for each other.
    command = [sanitizer(), *options.split(), str(TESTS), "gpu_processes_reduce"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    if "Device not supported" in run.stdout:
        pytest.skip("compute-sanitizer says: Device not supported")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert set(re.findall(r"ERROR SUMMARY: (\d+)", run.stdout)) == {"0"}, run.stdout[-4000:]
