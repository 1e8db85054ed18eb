"""Fixtures of all tests, and the check that a test run leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import why_not
from hypothesis import settings
from pool import RankPool
from ports import unused_ports
from shared_files import is_mapped, shared_files

# torch asks DNS for the names of the addresses that its stores connect: don't wait long where there is no good answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Tests compare what programs write: those of the line at the end of a run switch it on again.
os.environ["SYNCENGINE_SUMMARY"] = "0"


# Files that take a worker minutes. They come first, so that no worker begins one when the others have ended.
LONG = (
    "test_torch_suite.py",
    "test_packaging.py",
    "test_hosts_split.py",
    "test_torch_backend_programs.py",
    "test_sharded_programs.py",
)

settings.register_profile("syncengine", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("syncengine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Takes torch and the tests away from the collector, which would go through all of them again and again."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says which tests a run of `tests` leaves out."""
    if "tests" in config.args:
        others = f"what `-m {config.option.markexpr!r}` leaves out; " if config.option.markexpr else ""
        terminalreporter.write_line(
            f"not among them: {others}tests/integrations (Lightning, Ray, ...), by `make test-integrations`"
        )


@pytest.fixture(scope="session")
def programs(nothing_is_left: None) -> Iterator[RankPool]:
    """Processes for programs, which import syncengine themselves: see programs.py."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool(programs: RankPool) -> Iterator[RankPool]:
    """Rank processes: see pool.py."""
    pool = RankPool(programs)
    yield pool
    pool.close()


@pytest.fixture(params=["in place", "flat"])
def kinds_of_buckets(pool: RankPool, request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test twice: with the buckets of CPUs, and with those of devices, in host memory."""
    if request.param == "flat":
        from flat import flat  # here, since it imports torch: xdist's own process needs none

        pool.through = flat
    yield
    pool.through = None


@pytest.fixture
def unused_port() -> int:
    """A TCP port that is free."""
    return unused_ports()[0]


@pytest.fixture(scope="session")
def needs_hosts() -> None:
    """Skips a test with hosts of its own where none can be made: see hosts.py."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails the run if it leaves a process, or a file in /dev/shm."""
    before = shared_files()
    yield
    deadline = time.monotonic() + 120  # what sees that its parent has ended may take a while to end itself
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"left behind: {left}"


def _left(before: set[str]) -> list[str]:
    with contextlib.suppress(ChildProcessError):  # raised when there is no child at all
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    processes = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ends meanwhile, or a process
            for pid in (task / "children").read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                processes.append(f"process {pid}: {command}")
    # What a process maps belongs to that process, which is none of ours, since those are gone.
    return processes + [str(file) for file in shared_files() - before if not is_mapped(file)]
