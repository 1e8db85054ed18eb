"""What the tests of faults share: how a rank suffers one and tells of it, and what must not be left afterwards."""

import contextlib
import gc
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pool import Rank, RankPool

import syncengine
from syncengine import _C

FAULT = "SYNCENGINE_TEST_FAULT"

# Seconds. The promise is one; a machine may be busy. Who waited for a timeout or for a silence took longer than this.
WITHIN = 15.0

needs_hooks = pytest.mark.skipif(
    not _C.has_test_hooks,
    reason="no test hooks in the extension: build it with SYNCENGINE_TEST_HOOKS=1 (make test does)",
)


def set_fault(rank: int, fault: str) -> None:
    """Arms `fault` ("point:n:action", see csrc/base/sync_point.h) if this is rank `rank`. Before init()."""
    if my_rank() == rank:
        os.environ[FAULT] = fault


def my_rank() -> int:
    """This process's rank, known before init(): as the pool says, or mpirun."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return next(int(os.environ[name]) for name in names if name in os.environ)


def live_on(hosts: str) -> int:
    """This rank's host, before init(): its letter. Returns the number of ranks."""
    os.environ["SYNCENGINE_HOST_ID"] = hosts[my_rank()]
    return len(hosts)


def memory_of_this_process(kind: str) -> int:
    """Bytes, as /proc/self/smaps_rollup counts them."""
    return 1024 * int(re.findall(rf"^{kind}:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)[0])


@dataclass
class Resources:
    """What of this process the engine could leave behind."""

    descriptors: set[str]
    mappings: set[str]
    threads: set[str]

    @classmethod
    def now(cls) -> "Resources":
        descriptors = set()
        for entry in Path("/proc/self/fd").iterdir():
            try:
                descriptors.add(f"{entry.name} -> {entry.readlink()}")
            except OSError:
                continue  # the directory's own
        maps = {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:syncengine" in line}
        names = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it ends meanwhile
                names.add(f"{task.name} {(task / 'comm').read_text().strip()}")
        return cls(descriptors, maps, {name for name in names if name.endswith(" syncengine")})

    def left(self) -> list[str]:
        """What this process has more by now: a shutdown must not leave any."""
        deadline = time.monotonic() + 60
        while (now := Resources.now()).threads - self.threads and time.monotonic() < deadline:
            time.sleep(0.01)  # the kernel lists a thread for a moment after it was joined
        return [one for kind, then in vars(self).items() for one in sorted(vars(now)[kind] - then)]


@dataclass
class Outcome:
    """How a rank's call ended."""

    error: str = ""  # name of the exception's class; "" if there was none
    text: str = ""
    seconds: float = 0.0  # that the failing call took
    at: float = 0.0  # time.monotonic() of the end, which all processes of a host share
    left: list[str] = field(default_factory=list)  # descriptors, mappings, threads, after shutdown()
    value: Any = None

    def check(self, error: str = "", *words: str, soon: bool = False) -> None:
        """It ended by this kind of error, or by none, and nothing is left."""
        assert (self.error, self.left) == (error, []), self
        assert all(part in self.text for part in words), self
        assert not soon or self.seconds < WITHIN, self


def others(ranks: Sequence[Rank], *but: int) -> list[Rank]:
    return [rank for number, rank in enumerate(ranks) if number not in but]


def check_killed(ranks: Sequence[Rank], victim: int, code: int = -signal.SIGKILL) -> None:
    """Every rank but `victim` has raised PeerLost naming it, in time, and has nothing left."""
    assert ranks[victim].exit_code() == code, ranks[victim].output()
    for rank in others(ranks, victim):
        rank.result().check("PeerLost", f"rank {victim} died", soon=True)


def ended(pool: RankPool, function: Callable[..., Any], *args: Any, **options: Any) -> list[tuple[Any, str]]:
    """What new processes return that call it, and what they write until they have ended without an error."""
    with pool.spawn_ranks(function, *args, **options) as ranks:
        results = [rank.result() for rank in ranks]
        assert [rank.exit_code() for rank in ranks] == [0] * len(ranks), [rank.output() for rank in ranks]
        return [(result, rank.output()) for result, rank in zip(results, ranks, strict=True)]


def in_child(function: Callable[[], Any]) -> tuple[int, str]:
    """Runs `function` in a forked child: its exit code, and what it returned or raised."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(function())
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode()[-3000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), text


def suffer(body: Callable[[Callable[[], None]], Any], **settings: Any) -> Outcome:
    """Runs init(**settings) and `body(step)`, and tells how it ended; then shuts down.

    `body` calls `step()` before each call that may fail.
    """
    before = Resources.now()
    outcome = Outcome()
    started = time.monotonic()

    def step() -> None:
        nonlocal started
        started = time.monotonic()

    try:
        syncengine.init(**settings)
        outcome.value = body(step)
    except (syncengine.errors.SyncError, KeyboardInterrupt) as error:
        outcome.error, outcome.text = type(error).__name__, str(error)
        traceback.clear_frames(error.__traceback__)  # they hold tensors
    outcome.at = time.monotonic()
    outcome.seconds = outcome.at - started
    syncengine.shutdown()
    gc.collect()
    outcome.left = before.left()
    return outcome


def interrupt(rank: Rank) -> float:
    """Ctrl-C, which ends the rank's call at once and leaves nothing behind. Returns when it was pressed."""
    pressed_at = time.monotonic()
    rank.signal(signal.SIGINT)
    outcome = rank.result()
    assert (outcome.error, outcome.left) == ("KeyboardInterrupt", []), outcome
    assert outcome.at - pressed_at < WITHIN
    return pressed_at


def seconds_after(words: str, text: str) -> float:
    """The seconds that `text` names after `words`."""
    found = re.search(rf"{words} (\d+\.\d) s", text)
    assert found, text
    return float(found[1])


def come_last(come: str) -> None:
    """On rank 1: when the test has made the file `come`. Each rank tells the test that it has come."""
    if my_rank() == 1:
        wait_for_file(come)
    Path(f"{come}.{my_rank()}").touch()


def wait_for_waiting(ranks: Sequence[Rank], come: Path, *numbers: int) -> None:
    """Blocks until these ranks have come and sleep, as they do when they wait for a peer."""
    for number in numbers:
        wait_for_file(f"{come}.{number}")
        wait_until("S", ranks[number].pid)


def wait_for_failure() -> None:
    """Blocks until this rank has heard that another one's error has ended the default communicator."""
    communicator = syncengine.default_communicator()
    with contextlib.suppress(syncengine.errors.SyncError):
        while True:
            communicator.check_peers()
            time.sleep(0.005)


def wait_for_file(*paths: str | Path, timeout: float = 120.0) -> None:
    """Blocks until another process has made the file, or one of them."""
    deadline = time.monotonic() + timeout
    while not any(Path(path).exists() for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {' or '.join(map(str, paths))}")
        time.sleep(0.005)


def wait_until(state: str, pid: int, timeout: float = 120.0) -> None:
    """Blocks until the main thread of the process is in `state` for a while: "S" asleep, "T" stopped."""
    deadline = time.monotonic() + timeout
    looks = 0
    while looks < 5:
        now = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        looks = looks + 1 if now == state else 0
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} is in state {now}, not {state}")
        time.sleep(0.005)
