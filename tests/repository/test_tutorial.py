"""The scripts of the tutorial do what its pages say. CI runs the first one, the night all of them."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from pool import RankPool
from ports import unused_ports
from repository import ROOT

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
RUN = ["-m", "syncengine", "run", "-n", "4"]
SCRIPTS = {path.stem for path in (ROOT / "examples" / "tutorial").glob("*.py")}


def said(launcher: list[str], script: str, *arguments: str, **variables: object) -> tuple[str, str]:
    """What a script's ranks print on stdout and stderr."""
    path = str(ROOT / "examples" / "tutorial" / f"{script}.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}
    command = [sys.executable, *launcher, path, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def said_on_this_rank(script: str, *arguments: str) -> str:
    path = str(ROOT / "examples" / "tutorial" / f"{script}.py")
    with mock.patch.object(sys, "argv", [path, *arguments]), contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


@pytest.mark.thorough
@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_one_line(pool: RankPool, by_torchrun: bool):
    said_by = []
    for arguments in ([], ["--ddp"]):
        if by_torchrun:
            said_by.append(said(TORCHRUN, "one_line", *arguments)[0])
        else:
            environ = {"MASTER_PORT": str(unused_ports()[0])}
            said_by += pool.run(said_on_this_rank, "one_line", *arguments, settings=None, environ=environ)[:1]
    (ours,), (theirs,) = ([line for line in text.splitlines() if "weights" in line] for text in said_by)
    assert ours.startswith("Parallel on 2 ranks: loss ")
    assert theirs == ours.replace("Parallel", "DistributedDataParallel")


@pytest.mark.nightly
def test_who_is_late():
    out, err = said(TORCHRUN, "who_is_late")
    assert "rank 1 is late, in its input" in out
    assert "RuntimeWarning: Parallel(Sequential): rank 1 is late in" in err


@pytest.mark.nightly
def test_several_machines():
    out, _ = said(RUN, "several_machines", "--pretend")
    sent = re.search(r"on hosts \[0, 0, 1, 1\]; rank 0 sent ([\d.]+) MiB", out)
    assert sent is not None, out
    assert 40 <= float(sent[1]) < 60  # 20 steps of half of 4 MiB, and the model's copy


@pytest.mark.nightly
def test_a_rank_is_killed():
    out, err = said([*RUN, "--keep-going"], "a_rank_is_killed")
    whole, _ = said(RUN, "a_rank_is_killed", "--nobody")
    assert "rank 2 died" in err
    assert "was killed by SIGKILL" in err
    assert out == whole.replace("4 ranks are left", "3 ranks are left")


@pytest.mark.nightly
def test_where_the_time_goes(tmp_path: Path):
    said(TORCHRUN, "where_the_time_goes", SYNCENGINE_TRACE=tmp_path)
    command = [sys.executable, "-m", "syncengine", "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-1] == str(tmp_path / "report.html")
    assert "Parallel(Sequential)" in (tmp_path / "report.html").read_text()


def test_each_script_has_a_test_and_a_page():
    assert len(SCRIPTS) == 5
    for script in SCRIPTS:
        assert f"test_{script}" in globals()
        page = ROOT / "docs" / "tutorial" / f"{script.replace('_', '-')}.md"
        assert f'--8<-- "examples/tutorial/{script}.py"' in page.read_text()


NEED_RANKS = ["hybrid", *(f"tutorial/{script}" for script in sorted(SCRIPTS - {"several_machines"}))]


@pytest.mark.nightly
@pytest.mark.parametrize("script", NEED_RANKS)
def test_a_wrong_number_of_ranks_is_one_line(script):
    environ = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    command = [sys.executable, str(ROOT / "examples" / f"{script}.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(rf"{Path(script).name}\.py needs \d ranks", line)
