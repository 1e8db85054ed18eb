"""What the system refuses is told with why, and with the way out. Each call is really refused."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import my_rank
from pool import RankFailure, RankPool, run_on_ranks
from refusals import needs_seccomp, refuse

import syncengine
from syncengine.errors import InvalidUsage, SyncError
from syncengine.report import write_report
from syncengine.tracing.perfetto import write

SANDBOX = "(by a sandbox's seccomp filter, say): allow {} there"


def limit(which: int, most: int) -> None:
    resource.setrlimit(which, (most, most))


def error_of_init(row: str) -> str:
    """Under that row's restriction, on rank 1 alone."""
    if my_rank() == 1:
        ROWS[row][0]()
    with pytest.raises(SyncError) as caught:
        syncengine.init(timeout=50)
    return str(caught.value)


NOT_PERMITTED = partial(refuse, code=errno.EPERM)
# How the call is refused, and what is said.
ROWS: dict[str, tuple[Callable[[], None], str]] = {
    "memfd_create, by a runtime": (
        partial(NOT_PERMITTED, "memfd_create"),
        f"can't create shared memory: Operation not permitted {SANDBOX.format('memfd_create')}",
    ),
    "memfd_create, by an old kernel": (
        partial(refuse, "memfd_create"),
        f"can't create shared memory: Function not implemented {SANDBOX.format('memfd_create')}",
    ),
    "ftruncate": (
        partial(NOT_PERMITTED, "ftruncate"),
        f"(SYNCENGINE_ARENA_BYTES): Operation not permitted {SANDBOX.format('ftruncate')}",
    ),
    "getrandom": (
        partial(NOT_PERMITTED, "getrandom"),
        f"can't get random bytes: Operation not permitted {SANDBOX.format('getrandom')}",
    ),
    "socket": (
        partial(NOT_PERMITTED, "socket"),
        f"can't open a local socket: Operation not permitted {SANDBOX.format('socket')}",
    ),
    "threads": (
        partial(refuse, "clone", "clone3", code=errno.EAGAIN),
        "can't start a thread: Resource temporarily unavailable (ulimit -u is ",
    ),
    "sizes of files": (
        lambda: limit(resource.RLIMIT_FSIZE, 65536),
        "File too large (ulimit -f is 64): raise ulimit -f, or lower SYNCENGINE_ARENA_BYTES",
    ),
    "descriptors": (
        lambda: limit(resource.RLIMIT_NOFILE, len([*Path("/proc/self/fd").iterdir()])),
        "Too many open files (ulimit -n is ",
    ),
}


LIMITS = ("sizes of files", "descriptors")  # all other rows are refused by a filter


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in LIMITS else [needs_seccomp]) for name in ROWS])
def test_what_the_system_refuses_has_a_way_out(pool: RankPool, name: str):
    with pool.spawn_ranks(error_of_init, name, settings=None) as ranks:
        victim, own = (rank.result() for rank in ranks)
    assert ROWS[name][1] in own
    assert victim == f"rank 1 failed in init: InvalidUsage: {own}"


def error_without_local_sockets() -> str:
    if my_rank() == 1:
        NOT_PERMITTED("connect", longer=28)  # addresses longer than those of IP
    with pytest.raises(SyncError) as caught:
        syncengine.init(timeout=50)
    return str(caught.value)


@needs_seccomp
def test_a_sandbox_that_forbids_to_connect_within_a_host_is_named(pool: RankPool):
    """The other rank is told why where the two have met another way, and else that the rank broke off."""
    with pool.spawn_ranks(error_without_local_sockets, settings=None) as ranks:
        victim, own = (rank.result() for rank in ranks)
    assert own == f"can't connect to a rank of this host: Operation not permitted {SANDBOX.format('connect')}"
    told = f"rank 1 failed in init: InvalidUsage: {own}"
    assert victim == told or re.search("rank 1 (broke off|died) while the ranks connected", victim), victim


@run_on_ranks(spawned=True, settings=None)
def test_the_default_arena_is_no_larger_than_files_may_be():
    limit(resource.RLIMIT_FSIZE, 100 << 20)
    syncengine.init(timeout=50)
    model = syncengine.Parallel(torch.nn.Linear(256, 256))
    model(torch.full((1, 256), my_rank() + 1.0)).sum().backward()
    assert model.module.weight.grad.eq(1.5).all()


# --- Ranks of two users

NOBODY = 54321


def as_other_user(own_host: bool, port: int) -> str:
    """Rank 1 is another user's."""
    store = dist.TCPStore("127.0.0.1", port, is_master=my_rank() == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=my_rank(), world_size=2)
    if my_rank() == 1:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if own_host:
        os.environ["SYNCENGINE_HOST_ID"] = "ab"[my_rank()]
    try:
        syncengine.init(timeout=50)
    except SyncError as error:
        return str(error)
    syncengine.all_reduce(both := torch.ones(3))
    return str(both.tolist())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("own_host", [False, True])
def test_ranks_of_two_users_are_told_what_lets_them_meet(pool: RankPool, unused_port: int, own_host: bool):
    with pool.spawn_ranks(as_other_user, own_host, unused_port, settings=None) as ranks:
        said = [rank.result() for rank in ranks]
    if own_host:
        assert said == ["[2.0, 2.0, 2.0]"] * 2
        return
    way_out = "runs as another user: start all ranks of a host as one, or give the ranks of each user"
    told = [way_out in text for text in said]
    assert any(told), said
    for text, rank in zip(said, (1, 0), strict=True):  # the first one to be told may have ended
        assert way_out in text or f"rank {rank} died while the ranks connected" in text, said


# --- The script's own call


def timeout_of(call: str, seconds: float) -> str:
    """What rank 0 hears that waits for the other, by whichever call it has got its timeout."""
    if call == "init":
        syncengine.init(timeout=seconds)
    else:
        store = dist.FileStore(os.environ["STORE"])
        dist.init_process_group(call, store=store, rank=my_rank(), world_size=2, timeout=timedelta(seconds=seconds))
        syncengine.init()
    with pytest.raises(SyncError) as caught:
        if my_rank() == 0:
            syncengine.all_reduce(torch.ones(1))
        else:
            while True:
                syncengine.default_communicator().check_peers()
    return str(caught.value)


GROUP_TIMEOUT = "the timeout of init_process_group or new_group, or SYNCENGINE_TIMEOUT"


@pytest.mark.parametrize(("call", "named"), [("init", "init(timeout=...)"), ("gloo", GROUP_TIMEOUT)])
def test_the_call_that_gave_the_timeout_is_named(pool: RankPool, tmp_path: Path, call: str, named: str):
    for seconds in (0.5, 5, 50):  # the ranks have to connect within that time, too: a busy machine needs more
        environ = {"STORE": str(tmp_path / f"store-{seconds}")}
        with pool.spawn_ranks(timeout_of, call, seconds, settings=None, environ=environ) as ranks:
            try:
                said = [rank.result() for rank in ranks]
                break
            except RankFailure:
                if seconds == 50:
                    raise
    assert all(f", or raise {named}" in text for text in said), said


# --- A process that was its only rank


def average(pipe: int) -> None:
    """Of a rank that a process forks."""
    syncengine.init(timeout=50)
    model = syncengine.Parallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.tensor([[syncengine.rank() + 1.0]])).backward()
    os.write(pipe, json.dumps([syncengine.world_size(), model.module.weight.grad.item()]).encode() + b"\n")


def fork_ranks(shuts_down: bool) -> list[list[float]]:
    """As a notebook: a trial in a cell, then its launcher."""
    syncengine.init()
    model = syncengine.Parallel(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).backward()
    if shuts_down:
        syncengine.shutdown()
    read, write = os.pipe()
    for rank in range(2):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        if os.fork() == 0:
            status = 1
            try:
                average(write)
                status = 0
            finally:
                os._exit(status)
    assert [os.wait()[1] for _ in range(2)] == [0, 0]
    return [json.loads(line) for line in os.read(read, 1000).splitlines()]


@pytest.mark.parametrize("shuts_down", [True, False])
def test_who_was_the_only_rank_may_fork_ranks(pool: RankPool, shuts_down: bool):
    with pool.spawn_ranks(fork_ranks, shuts_down, world=1, settings=None) as ranks:
        assert ranks[0].result() == [[2, 1.5]] * 2


# --- Files


def write_where_no_room_is(folder: Path) -> None:
    syncengine.init()
    with syncengine.trace(folder):
        syncengine.Parallel(torch.nn.Linear(1, 1), nonfinite="raise")(torch.ones(1, 1)).backward()
    busy = shutil.copy("/bin/sleep", folder / "busy")
    with subprocess.Popen([busy, "600"]) as runs:
        try:
            with pytest.raises(InvalidUsage, match=r"busy can't be written: Text file busy: make room, or give"):
                write_report(folder, out=busy)
        finally:
            runs.kill()
    assert busy.stat().st_size > 10_000  # as before: nothing of the report is in it
    before = sorted(folder.iterdir())
    limit(resource.RLIMIT_FSIZE, 10)
    with pytest.raises(InvalidUsage, match=r"report.html can't be written: File too large: make room, or give"):
        write_report(folder)
    with pytest.raises(InvalidUsage, match=r"all.pftrace can't be written: File too large: make room, or give"):
        write(folder, folder / "all.pftrace")
    with pytest.raises(InvalidUsage, match=r"can't be written to .*rank-0.ring: File too large; give another dir"):
        syncengine.trace(folder / "more").__enter__()
    assert sorted(folder.iterdir()) == sorted([*before, folder / "more"])
    assert list((folder / "more").iterdir()) == []


def test_what_has_no_room_is_named_and_leaves_no_part(pool: RankPool, tmp_path: Path):
    pytest.importorskip("perfetto")
    with pool.spawn_ranks(write_where_no_room_is, tmp_path, world=1, settings=None) as ranks:
        ranks[0].result()
