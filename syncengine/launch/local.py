"""Starts ranks on this machine, for commands of syncengine that were started without a launcher."""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from syncengine.config import MOST_RANKS
from syncengine.errors import InvalidUsage
from syncengine.launch.environment import Launch
from syncengine.launch.store import serve_store, throw_not_started

_SERVED_WITHIN = timedelta(seconds=20)
_LOOK = 0.02  # seconds between two looks whether a rank has ended
_END_WITHIN = 30.0  # seconds, as torchrun gives ranks from SIGTERM to SIGKILL
_STORE, _STORE_OF_RANK = 16, 4  # file descriptors: the store's own, and of each rank's connections to it


# Variables under `syncengine run --keep-going`: the address of the store where joining processes wait, the number of
# such a process, and the rank that it replaces ("1/4": rank 1 of 4).
MEET, JOIN, INSTEAD = "_SYNCENGINE_MEET", "_SYNCENGINE_JOIN", "_SYNCENGINE_INSTEAD"
# Keys of the store: the prefix of keys about joining, the processes that want to join, and all that have ended.
PLACE = "syncengine/joining"
CAME, ENDED = f"{PLACE}/came", f"{PLACE}/ended"
_CONNECTED = "syncengine/connected"


def say_connected() -> None:
    """Tells `syncengine run --keep-going`, if that has started this rank, that the ranks it started first have met."""
    if MEET in os.environ and JOIN not in os.environ:
        host, _, port = os.environ[MEET].rpartition(":")
        dist.TCPStore(host, int(port), is_master=False, timeout=_SERVED_WITHIN).set(_CONNECTED, "")


def ticket_of(name: int) -> str:
    """The key of the message that a waiting process gets when it is let in."""
    return f"{PLACE}/ticket/{name}"


def run_local_ranks(count: int, arguments: Sequence[str]) -> int:
    """Runs this same command, with `arguments`, as `count` ranks. Returns 0, or the first exit code other than 0.

    The ranks divide the cores evenly unless OMP_NUM_THREADS is set. A signal that ends this process ends the ranks,
    too: by SIGTERM, and by SIGKILL after 30 s, or when another signal comes. Raises InvalidUsage if ranks can't meet on
    this machine, or can't be so many.
    """
    if not 2 <= count <= MOST_RANKS:
        raise InvalidUsage(f"--ranks {count}: give 2 to {MOST_RANKS}")
    script = Path(sys.argv[0])  # `python -m syncengine`, or the script that pip made of it
    command = ["-m", "syncengine"] if script.name in ("__main__.py", "-m") else [str(script)]
    with _ranks(count, [*command, *arguments]) as (running, pause, *_):
        while any(process.poll() is None for process in running.values()):
            pause()
        return _exit_code([process.returncode for process in running.values()])


def run_script(
    count: int, script: Sequence[str], keep_going: bool, restart: bool, log_dir: Path | None = None, label: bool = False
) -> int:
    """Runs the Python `script` with its arguments as `count` ranks, as `run_local_ranks` does.

    A rank that ends with another exit code than 0 ends all others. With `keep_going` it ends none once they have met;
    with `restart` a new process then joins in its place, as long as no rank has ended with 0, and at most ten times
    `count` of them. Each rank writes to a file in `log_dir` if that is given; `label` puts `[rank N]` before lines.
    Returns 0 with `keep_going` if some rank has ended with 0, else the first exit code other than 0, or 0.
    """
    codes = []
    stderr = select.poll()
    stderr.register(2, select.POLLOUT)
    places = list(range(count))  # for each process that was started, the rank that it is, or that it replaces
    with _ranks(count, script, keep_going, log_dir, label) as (running, pause, start, store):
        while running:
            pause()
            ended = {name: process for name, process in running.items() if process.poll() is not None}
            for name, process in ended.items():
                while process.returncode and not stderr.poll(0):  # a pipe that nobody reads
                    pause()
                _tell_failure(name, process, log_dir)
            for name in ended:
                codes.append(running.pop(name).returncode)
                store.append(ENDED, f"{name} ")
                if codes[-1] != 0 and not (keep_going and store.check([_CONNECTED])):
                    return _exit_code(codes)
                if codes[-1] != 0 and restart and 0 not in codes and running and len(places) < 11 * count:
                    places.append(places[name])
                    newest = len(places) - 1
                    running[newest] = start(0, 1, {JOIN: str(newest), INSTEAD: f"{places[name]}/{count}"})
            # When all ranks have ended, nobody lets in a process that still waits for that: it is ended, too.
            if all(name >= count and not store.check([ticket_of(name)]) for name in running):
                break
        return 0 if keep_going and 0 in codes else _exit_code(codes)


@contextlib.contextmanager
def _ranks(
    count: int, script: Sequence[str], keep_going: bool = False, log_dir: Path | None = None, label: bool = False
) -> Iterator[Any]:
    """A context of ranks, which end with it.

    Gives processes by rank, a function to call between two looks at them, one to start another, and the store.
    """
    _check_descriptors(count)
    _check_loopback()
    try:
        store = serve_store("127.0.0.1", 0, _SERVED_WITHIN)
    except dist.DistError as error:
        raise InvalidUsage(
            f"no store can be served at 127.0.0.1 ({str(error).splitlines()[0]}): start the ranks by torchrun instead"
        ) from error
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    common = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    common["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under torchrun: this process serves the store
    # Scripts and Lightning read other variables of torchrun, too. Nothing restarts all ranks: restart counts are 0.
    common |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"}
    common |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    common["TORCHELASTIC_RUN_ID"] = str(uuid.uuid4())
    if keep_going:
        common[MEET] = f"127.0.0.1:{store.port}"

    def start(rank: int, world: int, more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        local = {f"{of}RANK": str(rank) for of in ("", "LOCAL_", "ROLE_")}
        local |= {f"{of}WORLD_SIZE": str(world) for of in ("", "LOCAL_", "ROLE_")}
        environ, command = {**common, **local, **(more or {})}, [sys.executable, *script]
        if label or log_dir is not None or not os.isatty(1):  # lines on a terminal come at once, and whole
            environ.setdefault("PYTHONUNBUFFERED", "1")
        name = environ.get(JOIN, str(rank))
        with _open_log(log_dir, name) if log_dir is not None else contextlib.nullcontext() as log:
            output = subprocess.PIPE if label else log
            try:
                process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EMFILE, errno.ENFILE):  # of exec, say
                    raise InvalidUsage(f"can't start rank {name}: {error}") from error
                throw_not_started(f"rank {name}", error.errno)
        for lines, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if lines is None:
                continue
            labelling.append(_Labelling(name, lines, to.buffer))
            try:
                labelling[-1].start()
            except RuntimeError:
                process.kill()
                throw_not_started(f"a thread for rank {name}'s output")
        return process

    def pause() -> None:
        time.sleep(_LOOK)
        if came:
            if came[0] == signal.SIGINT:
                raise KeyboardInterrupt  # of which Python dies, as shells expect
            sys.exit(128 + came[0])

    def wait_for_all(seconds: float, signals: int) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(came) <= signals and any(p.poll() is None for p in running.values()):
            time.sleep(_LOOK)

    # A handler that raised could do so in the middle of Popen.poll(), whose lock would stay taken, or of Popen(), whose
    # process would be nobody's.
    came: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    for number in previous:
        if previous[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: came.append(number))
    labelling: list[_Labelling] = []
    running: dict[int, subprocess.Popen[bytes]] = {}
    in_order = False
    try:
        for rank in range(count):
            running[rank] = start(rank, count)
        yield running, pause, start, store
        in_order = True
    finally:
        before = min(1, len(came))
        for process in running.values():
            process.terminate()
        wait_for_all(_END_WITHIN, before)
        for process in running.values():
            process.kill()
        wait_for_all(math.inf, len(came))  # a process that waits for a disk dies when the disk has answered
        for thread in labelling:
            thread.finish(in_order, came)
        for number, handler in previous.items():
            signal.signal(number, handler)
    if came:
        pause()


class _Labelling(threading.Thread):
    """Passes a rank's lines on, each behind the rank's number."""

    def __init__(self, rank: str, lines: IO[bytes], to: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._label, self._lines, self._to = f"[rank {rank}] ".encode(), lines, to
        self._passed, self._is_writing = 0, False

    def run(self) -> None:
        # If nobody reads this process's output any more, the rank's pipe is closed: the rank fails as without labels.
        with contextlib.suppress(OSError), self._lines:
            for line in self._lines:
                self._is_writing = True
                self._to.write(self._label + line)
                self._to.flush()
                self._passed, self._is_writing = self._passed + 1, False

    def finish(self, waits_for_reader: bool, came: Sequence[int]) -> None:
        """Waits until all lines of a rank that has ended are copied, but not for lines of the rank's child processes.

        Waits a second for a reader that has stopped reading, or with `waits_for_reader` until that reader goes on or
        `came` has a signal; two signals end all waiting.
        """
        with contextlib.suppress(OSError, ValueError):  # closed already
            os.set_blocking(self._lines.fileno(), False)  # the thread ends once the pipe is empty
        passed = -1
        while self.is_alive() and len(came) < 2:
            if passed == self._passed and not (self._is_writing and waits_for_reader and not came):
                break
            passed = self._passed
            self.join(1.0)


def _log_of(log_dir: Path, rank: str | int) -> Path:
    return log_dir / f"rank{rank}.log"


def _open_log(log_dir: Path, rank: str) -> IO[bytes]:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        return _log_of(log_dir, rank).open("ab")
    except OSError as error:
        raise InvalidUsage(
            f"{_log_of(log_dir, rank)} (--log-dir) can't be written: {error.strerror}: make room, or give another "
            "folder"
        ) from error


def _tell_failure(rank: int, process: subprocess.Popen[bytes], log_dir: Path | None) -> None:
    if code := process.returncode:
        signals = {number.value: number.name for number in signal.Signals}
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {signals.get(-code, f'signal {-code}')}"
        where = f"; its output: {_log_of(log_dir, rank)}" if log_dir is not None else ""
        print(f"syncengine run: rank {rank} (pid {process.pid}) {how}{where}", file=sys.stderr, flush=True)


def add_run(commands: Any) -> None:
    """Adds the command `run` to argparse's."""
    parser = commands.add_parser(
        "run",
        help="starts a script as ranks on this machine, which may outlive each other",
        description="Runs `python script arguments` as ranks on this machine.",
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, help="how many")
    parser.add_argument("--keep-going", action="store_true", help="a rank that fails does not end the others")
    parser.add_argument("--restart", action="store_true", help="another process joins in its place; with --keep-going")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--label", action="store_true", help="puts [rank N] before each line of a rank's output")
    output.add_argument("--log-dir", type=Path, help="a folder: each rank writes to rankN.log in there")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a Python script and its arguments")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, _: Sequence[str]) -> int:
    wrong = "--restart needs --keep-going" if options.restart and not options.keep_going else ""
    wrong = "-n must be at least 1" if options.ranks < 1 else wrong if options.script else "name a script"
    if wrong:
        raise InvalidUsage(wrong)
    script = [*(["-m"] if options.module else []), *options.script]
    return run_script(options.ranks, script, options.keep_going, options.restart, options.log_dir, options.label)


def check_ranks(count: int | None, launch: Launch) -> None:
    """Raises InvalidUsage where a launcher has started another number of ranks than --ranks says."""
    if count is not None and launch.kind != "single" and launch.world_size != count:
        ranks = f"{launch.world_size} rank{'' if launch.world_size == 1 else 's'}"
        raise InvalidUsage(f"--ranks {count}, but {launch.kind} has started {ranks}: leave --ranks out")


def _check_descriptors(count: int) -> None:
    """Raises InvalidUsage if `ulimit -n` is too low for the store to accept `count` ranks, which would wait in vain."""
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _STORE + _STORE_OF_RANK * count
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise InvalidUsage(f"ulimit -n is {limit}, and starting {count} ranks takes {needed}: raise ulimit -n to 1024")


def _check_loopback() -> None:
    """Raises InvalidUsage if 127.0.0.1 can't be reached: torch would try for minutes, with a stack trace for each."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        remedy = "raise ulimit -n" if error.errno == errno.EMFILE else "bring it up (ip link set lo up)"
        raise InvalidUsage(f"the loopback interface, 127.0.0.1, can't be reached ({error}): {remedy}") from error


def _exit_code(codes: Sequence[int]) -> int:
    failed = [code for code in codes if code != 0]
    return 0 if not failed else failed[0] if failed[0] > 0 else 128 - failed[0]  # as shells: 128 + the signal
