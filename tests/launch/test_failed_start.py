"""A rank that fails between the start of its process and its communicator: who waits for it hears why, at once."""

from pathlib import Path

import pytest
from command import environ_of, ranks_by_hand, slurm_variables
from installation import copy_of_packages
from marks import mostly_nightly
from pool import RankPool
from programs import run_programs
from repository import ROOT, SUPPORT
from test_launchers_real import command_of, start

LATE = 100.0  # seconds that ranks would wait
PATHS = f"{ROOT}:{SUPPORT}"

# Rank 1 fails, and the others say what they hear. `COME` is how ranks come; `FAIL` is what goes wrong on rank 1.
SCRIPT = """
import os, sys, time
from datetime import timedelta
rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get(
    "OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))))
failing = {failing}
{before}
begin = time.monotonic()
try:
    if rank == failing:
        {fail}
    {come}
except BaseException as error:
    heard = f"{{type(error).__name__}}: {{error}}".splitlines()[0]
    os.write(1, f"rank {{rank}} after {{time.monotonic() - begin:.0f}} s: {{heard}}\\n".encode())
    {after}
"""
TORCH = "import torch, torch.distributed as dist"
IMPORT = f"{TORCH}\nimport syncengine"
GLOO = f"{IMPORT}\ndist.init_process_group('gloo', timeout=timedelta(seconds={LATE}))"
BACKEND = f"dist.init_process_group('syncengine', timeout=timedelta(seconds={LATE}))"
INIT = f"syncengine.init(timeout={LATE})"
OVER_GROUP = "syncengine.Parallel(torch.nn.Linear(1, 1), process_group=group)"
BAD = "os.environ['SYNCENGINE_NUMERICS'] = 'none'"
# An installation whose extension is broken, found first.
BROKEN = "sys.path.insert(0, os.environ['BROKEN']); __import__('importlib').invalidate_caches()"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a syncengine that can't be loaded."""
    folder = tmp_path_factory.mktemp("broken")
    copy_of_packages(folder, lambda _: b"of another time")
    return str(folder)


def script(folder: Path, before: str, fail: str, come: str, failing: int = 1, after: str = "raise") -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(before=before, fail=fail, come=come, failing=failing, after=after))
    return str(path)


def said(programs: RankPool, path: str, environs: list[dict[str, str]]) -> dict[int, str]:
    """What each rank of a job says, which nobody but the ranks themselves ends."""
    ended = run_programs(programs, [path], environs, LATE)
    return heard("".join(rank.stdout for rank in ended), "".join(rank.stderr for rank in ended))


def heard(output: str, errors: str) -> dict[int, str]:
    lines = [line for line in output.splitlines() if line.startswith("rank ")]
    assert lines, output + errors
    return {int(line.split()[1]): line.partition(" s: ")[2] for line in lines}


def by_hand(port: int, **more: str) -> list[dict[str, str]]:
    return ranks_by_hand([{"PYTHONPATH": PATHS, **more}] * 3, port)


def by_slurm(port: int, **more: str) -> list[dict[str, str]]:
    return [environ_of(PYTHONPATH=PATHS, **variables, **more) for variables in slurm_variables(3, port)]


def check_told(answers: dict[int, str], told: str) -> None:
    assert [answer.startswith(told) for answer in answers.values()] == [True, True], answers


SETTING = "InvalidUsage: SYNCENGINE_NUMERICS='none' is not allowed"


@pytest.mark.parametrize("failing", mostly_nightly([0, 1], 1))
@pytest.mark.parametrize("ranks", mostly_nightly([by_hand, by_slurm], 1))
def test_a_bad_setting(programs: RankPool, tmp_path: Path, unused_port: int, ranks, failing: int):
    """Also on rank 0, which serves the store; and on the rank itself it is the error that it is."""
    answers = said(programs, script(tmp_path, IMPORT, BAD, INIT, failing), ranks(unused_port))
    assert answers.pop(failing).startswith(SETTING)
    check_told(answers, f"Aborted: rank {failing} failed in init: {SETTING}")


@pytest.mark.thorough
def test_who_comes_last_hears_it_too(programs: RankPool, tmp_path: Path, unused_port: int):
    """Rank 0, which serves the store, has heard of the failure and is at its end by then."""
    late = f"{IMPORT}\nif rank == 2: time.sleep(3)"
    answers = said(programs, script(tmp_path, late, BAD, INIT), by_hand(unused_port))
    assert answers.pop(1).startswith(SETTING)
    check_told(answers, f"Aborted: rank 1 failed in init: {SETTING}")


@pytest.mark.thorough
def test_the_store_ends_with_rank_0(programs: RankPool, tmp_path: Path, unused_port: int):
    """The others, which have met before, come to a second meeting when the process that served the store is gone."""
    before = f"{IMPORT}\n{INIT}\npid = torch.tensor([os.getpid()])\nsyncengine.broadcast(pid, 0)"
    gone = "while os.path.exists(f'/proc/{pid.item()}'):\n        time.sleep(0.01)"
    come = f"{gone}\n    syncengine.init(torch_group=True)"
    path = script(tmp_path, before, "raise ValueError('shard 0 is empty')", come, failing=0)
    answers = said(programs, path, by_hand(unused_port))
    assert answers.pop(0) == "ValueError: shard 0 is empty"
    check_told(answers, "Aborted: rank 0: ValueError: shard 0 is empty")


@pytest.mark.parametrize("failing", mostly_nightly([0, 1], 1))
def test_an_import_that_fails(programs: RankPool, tmp_path: Path, unused_port: int, broken: str, failing: int):
    path = script(tmp_path, "import torch", BROKEN, f"import syncengine; {INIT}", failing)
    answers = said(programs, path, by_hand(unused_port, BROKEN=broken, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    assert answers.pop(failing).startswith("ImportError: syncengine's extension")
    error = f"ImportError: syncengine's extension {broken}"
    check_told(answers, f"Aborted: rank {failing} failed to import syncengine: {error}")


@pytest.mark.parametrize("failing", mostly_nightly([0, 2], 1))
def test_an_error_of_the_script_before_init(programs: RankPool, tmp_path: Path, unused_port: int, failing: int):
    path = script(tmp_path, IMPORT, "raise ValueError('the disk is full')", INIT, failing)
    answers = said(programs, path, by_slurm(unused_port))
    assert answers.pop(failing) == "ValueError: the disk is full"
    assert list(answers.values()) == [f"Aborted: rank {failing} failed before init: ValueError: the disk is full"] * 2


CASES = [
    (GLOO, BAD, INIT, f"in init: {SETTING}"),
    (GLOO, "raise ValueError('no data')", INIT, "before init: ValueError: no data"),
    (f"{GLOO}\ngroup = dist.new_group([0, 1, 2])", BAD, OVER_GROUP, f"in init: {SETTING}"),
    (IMPORT, BAD, BACKEND, f"in init: {SETTING}"),
    (TORCH, BROKEN, BACKEND, "in init: ImportError: syncengine's extension"),
]


@pytest.mark.parametrize(
    ("before", "fail", "come", "told"),
    mostly_nightly(CASES, 1, 2, 4),
    ids=["torch.distributed", "before init", "a group", "the backend", "the backend's import"],
)
def test_with_torch_distributed(
    programs: RankPool, tmp_path: Path, unused_port: int, broken: str, before, fail, come, told
):
    answers = said(programs, script(tmp_path, before, fail, come), by_hand(unused_port, BROKEN=broken))
    del answers[1]
    check_told(answers, f"Aborted: rank 1 failed {told}")


@pytest.mark.parametrize("late", mostly_nightly([0, 3], 1))
def test_the_patch(programs: RankPool, tmp_path: Path, unused_port: int, late: int):
    """Without an import of syncengine: the rank ends before it wraps its model. Rank 0, which serves the store, stays
    until a late one has heard, too."""
    before = f"{TORCH}\ndist.init_process_group('gloo', timeout=timedelta(seconds={LATE}))"
    come = f"time.sleep({late} if rank == 2 else 0); torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))"
    path = script(tmp_path, before, "raise ValueError('no data')", come)
    answers = said(programs, path, by_hand(unused_port, SYNCENGINE_PATCH="1"))
    del answers[1]
    assert list(answers.values()) == ["HeardError: rank 1 has ended by ValueError: no data"] * 2


# Rank 0 ends first: a launcher ends the others with the first that fails.
STAYS = """if rank == 0: open(__file__ + " has said", "w").close()
    while not os.path.exists(__file__ + " has said"): time.sleep(0.02)
    raise"""


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", mostly_nightly(["torchrun", "openmpi", "mpich"], 0))
def test_launchers(tmp_path: Path, launcher: str):
    told = start([*command_of(launcher), script(tmp_path, IMPORT, BAD, INIT, after=STAYS)])
    assert heard(told.stdout, told.stderr)[0].startswith(f"Aborted: rank 1 failed in init: {SETTING}")


@pytest.mark.nightly
def test_a_child_of_a_rank_is_no_rank(programs: RankPool, tmp_path: Path, unused_port: int):
    """It has the launcher's variables, and its errors are not the rank's."""
    child = "[sys.executable, '-c', 'import syncengine; raise ValueError(1)']"
    fail = f"__import__('subprocess').run({child})"
    come = f"{INIT}; raise SystemExit(str(syncengine.world_size()))"
    answers = said(programs, script(tmp_path, IMPORT, fail, come), by_hand(unused_port))
    assert answers == dict.fromkeys(range(3), "SystemExit: 3")
