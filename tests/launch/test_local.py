"""Ranks that `syncengine run` starts: their variables, their output, and their ends."""

import contextlib
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from command import alone, environ_of
from pool import RankPool
from programs import run_programs

from syncengine.launch import local

# Variables of torchrun's that `run` does not set, or not to the same value.
OTHERWISE = {
    "MASTER_ADDR",  # the host's name, at which torchrun's store listens
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",  # is another one in each launch
    "TORCHELASTIC_ERROR_FILE",  # a file that torchrun itself reads
    "TORCHELASTIC_SIGNALS_TO_HANDLE",  # an option of torchrun's that it keeps there for itself
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # a setting of NCCL's, which has a default
}
# Rank 2 fails when the others are ready for the worst. They would live for a minute, if nobody ended them.
READY = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def ready():
    (folder / rank).write_text(str(os.getpid()))
def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)
"""
SURVIVES = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == "2":
    wait_for("0", "1")
    sys.exit(3)
ready()
if rank == "1":
    signal.raise_signal(signal.SIGSTOP)
time.sleep(60)
(folder / "survived").touch()
"""
PRINTS = """
if rank == "0":
    print("said", end="")
    ready()
    time.sleep(60)
wait_for("0")
sys.exit(3)
"""
ASKED_TWICE = """
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGTERM))
ready()
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(20)
"""
# The launcher is asked to end when it has seen the rank's end.
FAILS = """
import os, signal, time
launcher, rank = os.getppid(), os.getpid()
if os.fork() > 0:
    os._exit(3)
try:
    while True:
        os.kill(rank, 0)
        time.sleep(0.01)
except ProcessLookupError:
    os.kill(launcher, signal.SIGTERM)
"""


def lives(pid: Path) -> bool:
    """Whether the process of this number lives. It does not for long."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGKILL)
        return True
    return False


def test_ranks_that_survive_sigterm_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(local, "_END_WITHIN", 0.1)
    assert local.run_script(3, ["-c", READY + SURVIVES, str(tmp_path)], False, False) == 3
    assert not (tmp_path / "survived").exists()
    assert not any(lives(tmp_path / rank) for rank in "01")


def test_a_second_signal_leaves_no_rank_behind(programs: RankPool, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(READY + ASKED_TWICE)
    assert alone(programs, "run", "-n", "1", str(script), str(tmp_path)).returncode == 128 + signal.SIGTERM
    assert not lives(tmp_path / "0")


class SignalledLock:
    """Popen's own lock; SIGTERM arrives the first two times that the lock has just been taken."""

    def __init__(self) -> None:
        self._lock, self._signals = threading.Lock(), 2

    def acquire(self, blocking: bool = True) -> bool:
        assert self._lock.acquire(False), "a signal's handler has left the lock taken"
        self._signals -= 1
        if self._signals >= 0:
            signal.raise_signal(signal.SIGTERM)
        return True

    def release(self, *_: Any) -> None:
        self._lock.release()

    __enter__, __exit__ = acquire, release


@pytest.mark.parametrize("moment", ["rank started", "rank looked at"])
def test_a_signal_at_a_bad_moment(monkeypatch: pytest.MonkeyPatch, moment: str):
    class Signalled(subprocess.Popen):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            started.append(self)
            if moment == "rank started":
                signal.raise_signal(signal.SIGTERM)
            else:
                self._waitpid_lock = SignalledLock()

    started: list[subprocess.Popen[bytes]] = []
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(subprocess, "Popen", Signalled)
    with pytest.raises(SystemExit, match="143"):
        local.run_script(1, ["-c", "import time\ntime.sleep(60)"], False, False)
    assert started[0].returncode in (-signal.SIGTERM, -signal.SIGKILL)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP)],
)
def test_the_exit_code_is_the_signals(programs: RankPool, tmp_path: Path, number: int, code: int):
    script = tmp_path / "script.py"
    script.write_text(f"import os\nimport time\nos.kill(os.getppid(), {int(number)})\ntime.sleep(60)\n")
    assert alone(programs, "run", "-n", "1", str(script)).returncode == code


def fill_stderr(_: int) -> None:
    _reader, writer = os.pipe()  # the reader stays open
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    os.dup2(writer, 2)


def test_a_signal_when_nobody_reads_what_is_told(programs: RankPool, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    assert alone(programs, "run", "-n", "1", str(script), prepare=fill_stderr).returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("logs", [False, True])
def test_what_a_rank_has_said_is_there_when_another_ends_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, logs: bool
):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    log_dir = tmp_path if logs else None
    assert local.run_script(2, ["-c", READY + PRINTS, str(tmp_path)], False, False, log_dir) == 3
    assert ((tmp_path / "rank0.log").read_text() if logs else capfd.readouterr().out) == "said"


def test_ranks_have_the_variables_that_torchrun_gives(programs: RankPool, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import json, os\nprint(json.dumps(dict(os.environ)))\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    theirs = json.loads(run_programs(programs, torchrun, [environ_of()])[0].stdout)
    ours = json.loads(alone(programs, "run", "-n", "1", str(script)).stdout)
    assert {"RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID"} <= theirs.keys() & ours.keys()
    assert {name for name, value in theirs.items() if ours.get(name) != value} <= OTHERWISE
