"""How processes end: whom launchers show, and how a death is noticed where the kernel does not tell of it."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from command import alone, environ_of
from faults import in_child, my_rank
from marks import mostly_nightly
from pool import RankPool, run_on_ranks
from programs import run_programs
from refusals import may_unshare, needs_seccomp, refuse
from repository import ROOT, SUPPORT
from slurm import is_there, slurm

import syncengine
from syncengine import _C, connect
from syncengine.errors import PeerLost

# Rank 1 fails in step 3 by HOW; the others, which wait for it, must not be taken for the cause.
RAISES = """
import os, sys, torch, torch.distributed as dist
def rank_main(rank, port=None):
    if port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="3")
    torch.set_num_threads(1)
    {init}
    for step in range(8):
        if step == 3 and {rank} == 1:
            {how}
        {call}
if __name__ == "__main__":
    {main}
"""
CALL = "dist.all_reduce(torch.ones(1000))"
CATCHING = f"""try:
            {CALL}
        except Exception:
            sys.exit(1)"""
SPAWN = """
    import socket, torch.multiprocessing as mp
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.start_processes(rank_main, args=(port,), nprocs=3, start_method=sys.argv[1])"""
INIT = 'dist.init_process_group("syncengine")'
OWN_INIT = "import syncengine; syncengine.init()"
OWN_CALL = "syncengine.all_reduce(torch.ones(1000))"
RANK = {INIT: "dist.get_rank()", OWN_INIT: "syncengine.rank()"}
OWN = "own error of rank 1"
CLONE_NEWPID = 0x20000000
TRIES = int(os.environ.get("SYNCENGINE_TEST_TRIES", "1"))
PATHS = {"PYTHONPATH": f"{ROOT}:{SUPPORT}"}
PIECES = [min(20, TRIES - begin) for begin in range(0, TRIES, 20)]  # a piece ends within a test's limit of time
MORE = PIECES if TRIES > 1 else []


def script(folder: Path, how: str, call: str = CALL, main: str = "rank_main(0)", init: str = INIT) -> str:
    path = folder / "train.py"
    path.write_text(RAISES.format(how=how, call=call, main=main, init=init, rank=RANK[init]))
    return str(path)


@pytest.mark.parametrize("tries", mostly_nightly([2, *MORE], 0))
@pytest.mark.parametrize("method", mostly_nightly(["fork", "spawn"], 0))
def test_spawn_shows_the_rank_that_raised(programs: RankPool, tmp_path: Path, method: str, tries: int):
    path = script(tmp_path, f"raise ValueError('{OWN}')", main=SPAWN)
    for _ in range(tries):
        (ended,) = run_programs(programs, [path, method], [environ_of(**PATHS)])
        assert OWN in ended.stderr and "Process 1 terminated with the following" in ended.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("tries", mostly_nightly([1, *MORE], 0))
@pytest.mark.parametrize("call", mostly_nightly([CALL, CATCHING], 1), ids=["raises", "catches"])
@pytest.mark.parametrize(
    ("how", "code"), mostly_nightly([("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)], 0), ids=["exit", "kill"]
)
def test_run_returns_the_code_of_the_cause(
    programs: RankPool, tmp_path: Path, how: str, code: int, call: str, tries: int
):
    path = script(tmp_path, how, call)
    for _ in range(tries):
        assert alone(programs, "run", "-n", "3", path, environ=PATHS).returncode == code


# What each launcher says first of a rank that has failed: its number and its exit code.
SHOWN = {
    "run": r"^syncengine run: rank (\d) \(pid \d+\) ended with exit code (\d)$",
    "torchrun": r"Root Cause .*\n\[\d\]:\n(?:.*\n){2}  rank      : (\d) .*\n  exitcode  : (\d) ",
    "openmpi": r"Process name: \[\S+,(\d)\]\s+Exit code: +(\d)\n",
    "mpich": None,  # nothing, but it returns that code
    "srun": r"^srun: error: \S+: task (\d): Exited with exit code (\d)$",
}


def command_of(launcher: str) -> list[str]:
    if launcher == "run":
        return [sys.executable, "-m", "syncengine", "run", "-n", "3"]
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    if launcher == "srun":
        return ["srun", "-n", "3", "--overcommit", "--kill-on-bad-exit", sys.executable]
    folder = ROOT / f".venv-{launcher}" / "bin"
    if not (folder / "mpirun").exists():
        pytest.skip(f"no {folder}: run `make .venv-{launcher}/ready`")
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if launcher == "openmpi" else []
    return [str(folder / "mpirun"), *options, "-n", "3", str(folder / "python")]


@pytest.mark.nightly
@pytest.mark.parametrize("tries", PIECES)
@pytest.mark.parametrize(
    ("how", "code", "call"),
    [
        (f"raise ValueError('{OWN}')", 1, OWN_CALL),
        ("sys.exit(3)", 3, OWN_CALL),
        ("sys.exit(3)", 3, CATCHING.replace(CALL, OWN_CALL)),
    ],
    ids=["raises", "exits", "catches"],
)
@pytest.mark.parametrize("launcher", SHOWN)
def test_launchers_show_the_rank_that_failed(tmp_path: Path, launcher: str, how: str, code: int, call: str, tries: int):
    path = script(tmp_path, how, call, init=OWN_INIT)
    environ = environ_of(**PATHS)
    with contextlib.ExitStack() as running:
        if launcher == "srun":
            if not is_there:
                pytest.skip("no Slurm (Debian: slurm-wlm), or not root")
            (tmp_path / "slurm").mkdir()
            environ |= running.enter_context(slurm(tmp_path / "slurm"))
        for _ in range(tries):
            ended = subprocess.run(
                [*command_of(launcher), path], env=environ, capture_output=True, text=True, timeout=300, check=False
            )
            said = ended.stdout + ended.stderr
            if pattern := SHOWN[launcher]:
                shown = re.search(pattern, said, re.MULTILINE)
                assert shown and shown.groups() == ("1", str(code)), said
            assert (OWN in said) == ("raise" in how), said
            assert ended.returncode == code or launcher in ("torchrun", "srun"), said


def die_without_notice(refused: list[int]) -> str:
    if my_rank() in refused:
        refuse("set_robust_list")
    syncengine.init(timeout=50)
    syncengine.barrier()
    if my_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        syncengine.barrier()
    return str(caught.value)


@needs_seccomp
@pytest.mark.parametrize("refused", [[0, 1], [1]])
def test_a_death_without_robust_futexes(pool: RankPool, refused: list[int]):
    with pool.spawn_ranks(die_without_notice, refused, settings=None) as ranks:
        assert ranks[0].result().startswith("rank 1 died")  # before rank 0 called, or while it waited


def go_on_without_notice(way: str) -> list[int]:
    """By waits that are longer than the test's patience: whoever does not notice the death hangs."""
    refuse("set_robust_list")
    syncengine.init(timeout=1000)
    if way == "shrink":
        if my_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            syncengine.barrier()
        syncengine.shrink(patience=1000)
        syncengine.barrier()
        return syncengine.default_communicator().global_ranks
    model = syncengine.Parallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(elastic: syncengine.Elastic) -> None:
        for step in elastic.steps(3):
            if step == 1 and my_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    syncengine.elastic(train, patience=1000, model=model, optimizer=optimizer)
    return syncengine.default_communicator().global_ranks


@needs_seccomp
@pytest.mark.thorough
@pytest.mark.parametrize("way", mostly_nightly(["shrink", "elastic"], 1))
def test_the_others_go_on_without_robust_futexes(pool: RankPool, way: str):
    with pool.spawn_ranks(go_on_without_notice, way, world=3, settings=None) as ranks:
        assert [ranks[0].result(), ranks[2].result()] == [[0, 2], [0, 2]]


@needs_seccomp
@pytest.mark.parametrize(
    ("refused", "left"),
    [
        ((), ["robust futexes", "process handles"]),
        (("set_robust_list",), ["process handles"]),
        (("pidfd_open",), ["robust futexes"]),
        (("set_robust_list", "pidfd_open"), []),
    ],
)
@run_on_ranks(world=1, spawned=True, settings=None)
def test_what_the_kernel_tells_is_tried(refused: tuple[str, ...], left: list[str]):
    if refused:
        refuse(*refused)
    assert _C.death_notices() == left


def said_by_init(*refused: str) -> list[str]:
    if refused:
        refuse(*refused)
    with mock.patch.object(connect.logger, "warning") as warning:
        syncengine.init(timeout=50)
    return [call.args[1] for call in warning.call_args_list]


def said_by_the_blind(blind: list[int]) -> list[str]:
    return said_by_init(*["set_robust_list", "pidfd_open"] * (my_rank() in blind))


def said_in_namespaces(*refused: str) -> list[str]:
    """By rank 0, and by rank 1 from another PID namespace."""
    if my_rank() == 0:
        return said_by_init(*refused)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "no PID namespace")
    code, text = in_child(lambda: json.dumps(said_by_init(*refused)))
    assert code == 0
    return json.loads(text)


def check_said(said: list[list[str]], is_warned: bool) -> None:
    """Each of two ranks has warned of the other, once, or none has."""
    if not is_warned:
        assert said == [[], []]
        return
    for rank, (text,) in enumerate(said):
        refused = "the kernel or a sandbox refuses both ways to notice the death of rank"
        assert text.startswith(f"rank {rank}: {refused} {1 - rank} before the")
        assert "allow set_robust_list or pidfd_open" in text and "PID namespace" in text


@needs_seccomp
@pytest.mark.parametrize("blind", [[1], [0, 1]], ids=str)
def test_init_says_that_the_kernel_tells_of_no_death(pool: RankPool, blind: list[int]):
    """A rank that is refused both by itself sees the other's mark, and is seen by its process."""
    with pool.spawn_ranks(said_by_the_blind, blind, settings=None) as ranks:
        check_said([rank.result() for rank in ranks], is_warned=blind == [0, 1])


@needs_seccomp
@pytest.mark.parametrize("refused", [("set_robust_list",), pytest.param((), marks=pytest.mark.nightly)])
def test_init_says_that_processes_of_other_namespaces_are_not_seen(pool: RankPool, refused: tuple[str, ...]):
    if not may_unshare("--pid", "--fork"):
        pytest.skip("no right to make PID namespaces")
    with pool.spawn_ranks(said_in_namespaces, *refused, settings=None) as ranks:
        check_said([rank.result() for rank in ranks], is_warned=bool(refused))
