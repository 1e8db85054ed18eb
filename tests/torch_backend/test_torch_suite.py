"""torch's own tests of DistributedDataParallel and of collectives, which its package has, over our backend: as they
are, and with Parallel in DDP's place."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from marks import mostly_nightly

# torch's logging data call each backend "custom" that is none of torch's; and of the buckets that there were before
# they were rebuilt, Parallel's say nothing.
DIFFERENT = {"test_ddp_logging_data_cpu"}


# All others want GPUs, or what this backend refuses: `torch_ranks.py`. Some want 4 ranks.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("patch", "world", "least"), mostly_nightly([("1", 2, 93), ("0", 2, 93), ("1", 4, 117), ("1", 8, 114)], 0)
)
def test_torchs_own_tests_pass(tmp_path: Path, patch: str, world: int, least: int):
    report = tmp_path / "report.xml"
    environment = {
        "BACKEND": "syncengine",
        "WORLD_SIZE": str(world),
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
    assert len([name for name, end in ends.items() if not end]) >= least, run.stdout[-2000:]
    replaced = "DistributedDataParallel is syncengine.Parallel" in run.stdout
    assert replaced == (patch == "1")
