"""What the system refuses is told with why, and with the way out. Each call is really refused."""

import codecs
import contextlib
import ctypes
import errno
import io
import json
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import my_rank
from pool import RankFailure, RankPool, run_on_ranks
from refusals import may_unshare, needs_seccomp, refuse

import syncengine
from syncengine import _C
from syncengine.__main__ import main
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


def addresses_left(bytes: int) -> None:
    """Beside those that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + bytes)


def forbidden(call: str, said: str, asked: str = "", **how: Any) -> tuple[Callable[[], None], str]:
    """How a sandbox refuses the call, and what is said. `asked`: the calls to allow, if more than this one."""
    reason = f"Operation not permitted {SANDBOX.format(asked or call)}"
    return partial(refuse, call, code=errno.EPERM, **how), f"{said}: {reason}"


LOCAL_ADDRESS = (2, ">", 28)  # bytes: addresses of local sockets are longer here than those of IP
# How the call is refused, and what is said.
ROWS: dict[str, tuple[Callable[[], None], str]] = {
    "memfd_create, by a runtime": forbidden("memfd_create", "can't create shared memory"),
    "memfd_create, by an old kernel": (
        partial(refuse, "memfd_create"),
        f"can't create shared memory: Function not implemented {SANDBOX.format('memfd_create')}",
    ),
    "ftruncate": forbidden("ftruncate", "(SYNCENGINE_ARENA_BYTES)"),
    "getrandom": forbidden("getrandom", "can't get random bytes"),
    "socket": forbidden("socket", "can't open a local socket"),
    "mmap": forbidden("mmap", "bytes of shared memory", where=(3, ">", 0x4000)),  # MAP_NORESERVE, and more
    "seals": forbidden("fcntl", "can't seal shared memory", where=(1, "==", 1033)),  # F_ADD_SEALS
    "local bind": forbidden("bind", "can't listen on a local socket", "bind and listen", where=LOCAL_ADDRESS),
    "local listen": forbidden("listen", "can't listen on a local socket", "bind and listen"),
    # The filter is for the flags with which stat() makes the call.
    "the network namespace": forbidden("newfstatat", "namespace (/proc/self/ns/net)", where=(3, "==", 0)),
    "addresses": (lambda: addresses_left(16 << 20), "bytes of shared memory: Cannot allocate memory (ulimit -v is "),
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


LIMITS = ("addresses", "sizes of files", "descriptors")  # all other rows are refused by a filter


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in LIMITS else [needs_seccomp]) for name in ROWS])
def test_what_the_system_refuses_has_a_way_out(pool: RankPool, name: str):
    with pool.spawn_ranks(error_of_init, name, settings=None) as ranks:
        victim, own = (rank.result() for rank in ranks)
    assert ROWS[name][1] in own
    assert victim == f"rank 1 failed in init: InvalidUsage: {own}"


# On which hosts the ranks are, which of them is refused a call while they connect, how, and what it says.
CONNECTING: dict[str, tuple[str, int, Callable[[], None], str]] = {
    "connect": ("aa", 1, *forbidden("connect", "can't connect to a rank of this host", where=LOCAL_ADDRESS)),
    "accept4": ("aa", 1, *forbidden("accept4", "can't accept a local connection")),
    "sendmsg": ("aa", 1, *forbidden("sendmsg", "can't hand shared memory to a peer")),
    "interfaces": (
        *("ab", 1),
        *forbidden("socket", "can't list this machine's network interfaces", where=(0, "==", socket.AF_NETLINK)),
    ),
    "TCP socket": ("ab", 1, *forbidden("socket", "can't open a TCP socket", where=(0, "==", socket.AF_INET))),
    "TCP bind": ("ab", 1, *forbidden("bind", "can't listen on 127.0.0.1", "bind and listen", where=(2, "==", 16))),
    "TCP accept4": ("ab", 0, *forbidden("accept4", "rank 0 can't accept the connections of rank 1")),
    "epoll_create1": ("ab", 1, *forbidden("epoll_create1", "can't make what TCP waits on")),
    "eventfd2": ("ab", 1, *forbidden("eventfd2", "can't make what TCP waits on")),
    "epoll_ctl": ("ab", 1, *forbidden("epoll_ctl", "can't wait on a socket")),
}


def error_of_connecting(row: str) -> str:
    if my_rank() == CONNECTING[row][1]:
        CONNECTING[row][2]()
    with pytest.raises(SyncError) as caught:
        syncengine.init(timeout=50)
        syncengine.barrier()  # TCP's peer may have connected before
    return str(caught.value)


@needs_seccomp
@pytest.mark.parametrize("row", CONNECTING)
def test_what_a_sandbox_forbids_while_ranks_connect_is_named(pool: RankPool, row: str):
    """The other rank is told why where the two have met another way, and else that the rank broke off."""
    hosts, refused, _, asked = CONNECTING[row]
    with pool.spawn_ranks(error_of_connecting, row, hosts=hosts, settings=None) as ranks:
        said = [rank.result() for rank in ranks]
    own, victim = said[refused], said[1 - refused]
    assert own == asked
    told = f"rank {refused} failed in init: InvalidUsage: {own}"
    lost = f"rank {refused} (broke off|died) while the ranks connected" if hosts == "aa" else f"rank {refused}"
    assert victim == told or re.search(lost, victim), victim
    assert "waited in init()" not in victim


@needs_seccomp
@run_on_ranks(world=1, spawned=True, settings=None)
def test_the_probe_for_deaths_names_a_thread_that_can_not_start():
    refuse("clone", "clone3", code=errno.EAGAIN)
    with pytest.raises(InvalidUsage, match=r"can't start a thread: Resource temporarily unavailable \(ulimit -u is "):
        _C.death_notices()


@run_on_ranks(spawned=True, settings=None)
def test_the_default_arena_is_no_larger_than_files_may_be():
    limit(resource.RLIMIT_FSIZE, 100 << 20)
    syncengine.init(timeout=50)
    model = syncengine.Parallel(torch.nn.Linear(256, 256))
    model(torch.full((1, 256), my_rank() + 1.0)).sum().backward()
    assert model.module.weight.grad.eq(1.5).all()


# --- Ranks of two users

NOBODY = 54321


def become_nobody() -> None:
    """The kernel limits no number of root's processes."""
    if os.geteuid() == 0:
        codecs.lookup("idna")  # is read from Python's own files, which may be root's
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def as_other_user(own_host: bool, port: int) -> str:
    """Rank 1 is another user's."""
    store = dist.TCPStore("127.0.0.1", port, is_master=my_rank() == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=my_rank(), world_size=2)
    if my_rank() == 1:
        become_nobody()
    if own_host:
        os.environ["SYNCENGINE_HOST_ID"] = "ab"[my_rank()]
    try:
        syncengine.init(timeout=50)
    except SyncError as error:
        return str(error)
    syncengine.all_reduce(both := torch.ones(3))
    return str(both.tolist())


LIMIT = "Resource temporarily unavailable (ulimit -u is "
NO_MORE = f"{LIMIT}1): raise ulimit -u, the cgroup's pids.max, or ulimit -v (its stack)"


def error_without_more_processes(port: int) -> str:
    store = dist.TCPStore("127.0.0.1", port, is_master=my_rank() == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=my_rank(), world_size=2)
    become_nobody()
    if my_rank() == 1:
        limit(resource.RLIMIT_NPROC, 1)
    with pytest.raises(SyncError) as caught:
        syncengine.init(timeout=50)
    return str(caught.value)


def test_a_limit_of_processes_is_named(pool: RankPool, unused_port: int):
    with pool.spawn_ranks(error_without_more_processes, unused_port, settings=None) as ranks:
        victim, own = (rank.result() for rank in ranks)
    assert own == f"can't start a thread: {NO_MORE}"
    assert victim == f"rank 1 failed in init: InvalidUsage: {own}"


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


@pytest.mark.parametrize("end", ["shuts down", "ends nothing", "destroys its group"])
@run_on_ranks(world=1, spawned=True, settings=None)
def test_who_was_the_only_rank_may_fork_ranks(end: str):
    """A notebook's way: a trial in a cell, then its launcher."""
    if end == "destroys its group":
        dist.init_process_group("syncengine", store=dist.HashStore(), rank=0, world_size=1)
    syncengine.init()
    model = syncengine.Parallel(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).backward()
    if end == "shuts down":
        syncengine.shutdown()
    if end == "destroys its group":
        dist.destroy_process_group()
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
    assert [json.loads(line) for line in os.read(read, 1000).splitlines()] == [[2, 1.5]] * 2


# --- syncengine run


def no_more_processes() -> None:
    become_nobody()
    limit(resource.RLIMIT_NPROC, 1)


# How the launcher is refused what it asks for, its options, and what it says.
RUN: dict[str, tuple[Callable[[], None], list[str], str]] = {
    "threads": (ROWS["threads"][0], [], f"can't start a thread of the store: {LIMIT}"),
    "processes": (partial(refuse, "clone", "vfork", code=errno.EAGAIN), [], f"can't start rank 0: {LIMIT}"),
    "ulimit -u": (no_more_processes, [], f"can't start a thread of the store: {NO_MORE}"),
    "logs": (
        lambda: None,
        ["--log-dir", "/dev/null/logs"],
        "/dev/null/logs/rank0.log (--log-dir) can't be written: Not a directory: make room, or give another folder",
    ),
}


def code_of(*arguments: str) -> tuple[int, str]:
    """The exit code of a command of ours, and what the command says on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(arguments)
    return code, said.getvalue()


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=needs_seccomp if row in ("threads", "processes") else []) for row in RUN]
)
@run_on_ranks(world=1, spawned=True, settings=None)
def test_what_the_launcher_is_refused_has_a_way_out(row: str):
    refused, options, asked = RUN[row]
    refused()
    code, said = code_of("run", "-n", "2", *options, "script.py")
    assert code == 2
    assert said.startswith(f"syncengine run: {asked}")


# --- Files

needs_perfetto = pytest.mark.skipif(find_spec("perfetto") is None, reason="no perfetto")


@needs_perfetto
@run_on_ranks(world=1, spawned=True, settings=None)
def test_what_has_no_room_is_named_and_leaves_no_part(tmp_path: Path):
    syncengine.init()
    with syncengine.trace(tmp_path):
        syncengine.Parallel(torch.nn.Linear(1, 1), nonfinite="raise")(torch.ones(1, 1)).backward()
    busy = shutil.copy("/bin/sleep", tmp_path / "busy")
    with subprocess.Popen([busy, "600"]) as runs:
        try:
            with pytest.raises(InvalidUsage, match=r"busy can't be written: Text file busy: make room, or give"):
                write_report(tmp_path, out=busy)
        finally:
            runs.kill()
    assert busy.stat().st_size > 10_000  # as before: nothing of the report is in it
    before = sorted(tmp_path.iterdir())
    limit(resource.RLIMIT_FSIZE, 10)
    with pytest.raises(InvalidUsage, match=r"report.html can't be written: File too large: make room, or give"):
        write_report(tmp_path)
    with pytest.raises(InvalidUsage, match=r"all.pftrace can't be written: File too large: make room, or give"):
        write(tmp_path, tmp_path / "all.pftrace")
    with pytest.raises(InvalidUsage, match=r"can't be written to .*rank-0.ring: File too large; give another dir"):
        syncengine.trace(tmp_path / "more").__enter__()
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "more"])
    assert list((tmp_path / "more").iterdir()) == []


@needs_perfetto
@pytest.mark.skipif(
    os.geteuid() != 0 or not may_unshare("--mount"),
    reason="only root can mount a disk that is full, and not in every container",
)
@run_on_ranks(world=1, spawned=True, settings=None)
def test_a_full_disk_is_named_and_ends_commands_with_2(tmp_path: Path):
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, full = 0x20000, (1 << 14) | (1 << 18), tmp_path / "full"  # CLONE_NEWNS, MS_REC | MS_PRIVATE
    full.mkdir()
    assert libc.unshare(new_namespace) == 0
    assert libc.mount(b"none", b"/", None, ctypes.c_ulong(private), None) == 0
    assert libc.mount(b"none", bytes(full), b"tmpfs", ctypes.c_ulong(0), b"size=64k") == 0
    with pytest.raises(OSError, match="No space left"), (full / "fills").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    syncengine.init()
    with syncengine.trace(tmp_path / "trace"):
        syncengine.Parallel(torch.nn.Linear(1, 1))(torch.ones(1, 1)).backward()
    for command in ("report", "trace"):
        out = full / f"of-{command}"
        code, said = code_of(command, str(tmp_path / "trace"), "--out", str(out))
        assert code == 2
        asked = f"{out} can't be written: No space left on device: make room, or give another path"
        assert said == f"syncengine {command}: {asked}\n"
    with pytest.raises(InvalidUsage, match=r"can't be written to .*rank-0.ring: No space left on device; give another"):
        syncengine.trace(full / "more").__enter__()
    assert sorted(path.name for path in full.rglob("*")) == ["fills", "more"]
