"""torch's own tests of DistributedDataParallel and of collectives, which its package has, over our backend: as they
are, and with Parallel in DDP's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

# torch's logging data call each backend "custom" that is none of torch's; and of the buckets that there were before
# they were rebuilt, Parallel's say nothing.
DIFFERENT = {"test_ddp_logging_data_cpu"}


@pytest.mark.thorough
@pytest.mark.parametrize("patch", [pytest.param("0", marks=pytest.mark.nightly), "1"])
def test_torchs_own_tests_pass(tmp_path: Path, patch: str):
    report = tmp_path / "report.xml"
    environment = {
        "BACKEND": "syncengine",
        "WORLD_SIZE": "2",
        "TEMP_DIR": str(tmp_path),
        "MASTER_ADDR": "127.0.0.1",
        "SYNCENGINE_PATCH": patch,
    }
    suite = Path(__file__).with_name("torch_ranks.py")
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:logging"]
    command += [f"--junitxml={report}"]
    run = subprocess.run(
        [*command, suite], env={**os.environ, **environment}, capture_output=True, text=True, timeout=900, check=False
    )
    assert report.exists(), run.stdout[-10_000:] + run.stderr[-10_000:]
    ends = {
        case.attrib["name"]: {child.tag for child in case} & {"failure", "error", "skipped"}
        for case in ElementTree.parse(report).iter("testcase")
    }
    assert {name for name, end in ends.items() if end & {"failure", "error"}} == DIFFERENT, run.stdout[-10_000:]
    assert len([name for name, end in ends.items() if not end]) >= 65, run.stdout[-2000:]  # the others want GPUs
    replaced = "DistributedDataParallel is syncengine.Parallel" in run.stdout
    assert replaced == (patch == "1")
