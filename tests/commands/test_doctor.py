"""`syncengine doctor` as users start it; test_launched.py has launchers."""

import pytest
from command import alone, syncengine
from doctor_ranks import PATIENT
from pool import RankPool

from syncengine import _C

CPUS = _C.machine()["available_cores"]


@pytest.mark.nightly
def test_alone_it_says_how_to_start():
    result = syncengine("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("syncengine doctor: 1 rank on 1 host\n")
    assert _C.build_id in result.stdout
    assert "\n0 findings\n" in result.stdout
    assert "torchrun --nproc-per-node 2 -m syncengine doctor" in result.stdout
    assert "syncengine doctor --ranks 2" in result.stdout


@pytest.mark.thorough
@pytest.mark.skipif(CPUS < 2, reason="two ranks on one CPU are a finding")
def test_it_starts_ranks_itself_and_prints_one_report(programs: RankPool):
    """With threads that are too many, as a user meets it."""
    result = alone(programs, "doctor", "--ranks", "2", *PATIENT, environ={"OMP_NUM_THREADS": str(CPUS)})
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.count("syncengine doctor:") == 1
    assert result.stdout.startswith("syncengine doctor: 2 ranks on 1 host, started by itself\n")
    assert "every result verified" in result.stdout
    assert f"\n1 finding:\n1. 2 ranks with {CPUS} threads each on {CPUS} CPUs of " in result.stdout
    assert f"\n   remedy: set OMP_NUM_THREADS={CPUS // 2}\n" in result.stdout
