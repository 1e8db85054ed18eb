"""Rank processes for tests: a pool that lives through the whole test run, and ranks of their own for tests that kill.

Functions that run on ranks are module-level functions of a test module; their arguments and results are pickled.
"""

import importlib
import inspect
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from repository import ROOT, SUPPORT, TESTS
from zygote import Task, adopt_orphans

PATIENCE = 240.0  # seconds, after which a rank that says nothing hangs: nothing waits so long on a full machine
DEFAULT_SETTINGS = {"timeout": 100.0}
_GRACE = 10.0  # seconds that the others get to answer after the first rank has failed


class RankFailure(Exception):
    """What went wrong on which rank. `texts` has a traceback, or the reason for having none, per failed rank."""

    def __init__(self, texts: dict[int, str]) -> None:
        super().__init__("".join(f"\nrank {rank}: {text}" for rank, text in sorted(texts.items())))
        self.texts = texts


class Rank:
    """One rank process, a child of the test run."""

    def __init__(self, control: socket.socket, log: Path) -> None:
        ours, theirs = socket.socketpair()
        self._log = log
        with theirs, log.open("wb") as output:
            socket.send_fds(control, [b"+"], [theirs.fileno(), output.fileno()])
        self.connection = Connection(ours.detach())
        if not self.connection.poll(300):  # the first one waits for the zygote to import torch
            raise RuntimeError(f"no rank process came: is the zygote alive? {self.output()}")
        self.pid: int = self.connection.recv()
        self.number = -1  # its rank in the current or last call
        self._exit_code: int | None = None

    def start(self, task: Task) -> None:
        """Begins the call; `result` gets what it returns."""
        self.number = int(task.environ["RANK"])
        self.connection.send_bytes(pickle.dumps(task))

    def answer(self) -> tuple[bool, Any]:
        """Blocks: (True, the call's value), or (False, why there is none)."""
        try:
            kind, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return False, f"died with exit code {self.exit_code(10)}\n{self.output()}"
        return kind == "returned", value

    def result(self, timeout: float = PATIENCE) -> Any:
        """What the call returned. Raises RankFailure if it raised, died, or takes longer than `timeout` seconds."""
        if not self.connection.poll(timeout):
            raise RankFailure({self.number: self.where(timeout)})
        succeeded, value = self.answer()
        if not succeeded:
            raise RankFailure({self.number: value})
        return value

    def where(self, timeout: float) -> str:
        """Where a rank hangs that gave no answer within `timeout` seconds."""
        before, deadline = self._log.stat().st_size, time.monotonic() + 5
        self.signal(signal.SIGUSR1)
        while self._log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)  # until all of it is there
        return f"no answer within {timeout:g} s\n{self.output()}"

    def signal(self, number: int) -> None:
        """Sends a signal, if the process is still there."""
        if self._exit_code is None:
            os.kill(self.pid, number)

    def exit_code(self, timeout: float = PATIENCE) -> int | None:
        """Exit code as subprocess has it (-9 for SIGKILL); None if it has not ended within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(0.002)
        return self._exit_code

    def output(self) -> str:
        """What it wrote to stdout and stderr so far: the last 8 KiB."""
        return self._log.read_bytes()[-8192:].decode(errors="replace")

    def end(self) -> None:
        """Closes its connection, and kills it if that does not end it within a few seconds."""
        self.connection.close()
        if self.exit_code(0 if self._stopped() else 5) is None:
            self.signal(signal.SIGKILL)
            self.exit_code()

    def _stopped(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False


class Ranks(list[Rank]):
    """The ranks of one `spawn_ranks`; leaving the `with` block ends them all."""

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for rank in self:
            if rank.exit_code(0) is None:
                rank.signal(signal.SIGKILL)
        for rank in self:
            rank.end()


class RankPool:
    """Forks ranks, and keeps up to 8 of them for `run`. One a test run: the fixture `pool`.

    The ranks have imported torch, and without `base` only call functions. With the pool `base`, a fork of its zygote
    serves this one, and imports syncengine, too.
    """

    def __init__(self, base: "RankPool | None" = None) -> None:
        adopt_orphans()
        self._folder = Path(tempfile.mkdtemp(prefix="syncengine-tests-"))
        self._numbers = itertools.count()  # of files: threads may share a pool
        self._workers: list[Rank] = []
        self.through: Callable[..., Any] | None = None  # calls every function: through(function, *args)
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control, theirs = socket.socketpair()
        with theirs:
            if base is not None:
                socket.send_fds(base._control, [b"syncengine"], [theirs.fileno()])
                return
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            paths = [str(ROOT), *(str(path) for path in TESTS.iterdir() if path.is_dir())]
            environ["PYTHONPATH"] = os.pathsep.join(paths)
            command = [sys.executable, str(SUPPORT / "zygote.py"), str(theirs.fileno())]
            self._zygote = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ, stdin=subprocess.DEVNULL)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 2,
        gloo: bool = False,
        settings: dict[str, Any] | None = DEFAULT_SETTINGS,
        environ: dict[str, str] | None = None,
        timeout: float = PATIENCE,
        hosts: str = "",
    ) -> list[Any]:
        """Calls `function(*args)` on ranks 0 to world - 1 of a fresh communicator; returns each rank's result.

        `settings` are syncengine.init's (None: no init); `gloo` also initialises torch.distributed. Raises RankFailure
        with the traceback of each rank that failed or took longer than `timeout` seconds; the pool then starts afresh.
        `hosts`: the name of each rank's host, a letter; there are as many ranks.
        """
        world = len(hosts) or world
        while len(self._workers) < world:
            self._workers.append(self._fork())
        ranks = self._workers[:world]
        self._start(ranks, function, args, environ, hosts, settings=settings, gloo=gloo, stay=True)
        try:
            return _collect(ranks, timeout)
        except BaseException:
            self._end_workers()
            raise

    def spawn_ranks(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 2,
        gloo: bool = False,
        settings: dict[str, Any] | None = DEFAULT_SETTINGS,
        environ: dict[str, str] | None = None,
        hosts: str = "",
        stay: bool = False,
    ) -> Ranks:
        """Like `run`, but in processes of their own, which end after the call, and without waiting for them.

        `stay`: they wait behind the call until they are killed: the end of a Python process costs 0.1 s of a core.

        For tests that kill, stop, fork or look at how a process ends:

            with pool.spawn_ranks(train, world=3) as ranks:
                ranks[1].signal(signal.SIGKILL)
                assert "rank 1" in ranks[0].result()
        """
        ranks = Ranks(self._fork() for _ in range(len(hosts) or world))
        self._start(ranks, function, args, environ, hosts, settings=settings, gloo=gloo, stay=stay)
        return ranks

    def refresh(self) -> None:
        """The next `run` gets new processes: for tests after which threads or caches stay."""
        self._end_workers()

    def close(self) -> None:
        """Ends every process."""
        self._end_workers()
        self._control.close()
        if self._zygote is not None:
            self._zygote.wait(120)
        shutil.rmtree(self._folder)

    def _fork(self) -> Rank:
        return Rank(self._control, self._folder / f"{next(self._numbers)}.log")

    def _start(
        self,
        ranks: list[Rank],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        environ: dict[str, str] | None,
        hosts: str,
        **how: Any,
    ) -> None:
        world = str(len(ranks))
        if self.through:
            function, args = self.through, (function, *args)
        store = str(self._folder / f"{next(self._numbers)}.store")
        for number, rank in enumerate(ranks):
            launch = {
                "RANK": str(number),
                "WORLD_SIZE": world,
                "LOCAL_RANK": str(number),
                "LOCAL_WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
                **({"SYNCENGINE_HOST_ID": hosts[number]} if hosts else {}),
            }
            rank.start(Task(function, args, {**launch, **(environ or {})}, store=store, **how))

    def _end_workers(self) -> None:
        workers, self._workers = self._workers, []
        with Ranks(workers):
            pass


def _collect(ranks: list[Rank], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    waiting = {rank.connection: number for number, rank in enumerate(ranks)}
    results: list[Any] = [None] * len(ranks)
    texts: dict[int, str] = {}
    while waiting:
        ready = wait_for_any(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            number = waiting.pop(connection)
            succeeded, value = ranks[number].answer()
            if succeeded:
                results[number] = value
            else:
                texts[number] = value
                deadline = min(deadline, time.monotonic() + _GRACE)
    for number in waiting.values():
        texts[number] = ranks[number].where(timeout)
    if texts:
        raise RankFailure(texts)
    return results


def run_on_ranks(
    world: int = 2, spawned: bool = False, hosts: Sequence[str] = (), **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a function for rank processes into a test, which passes if it returns on every rank, and nothing or what
    is empty: a list of what is wrong, a number of bytes that differ.

    Its parameters are those of the test, by `pytest.mark.parametrize`; one that is called `world` is the number of
    ranks, one that is called `hosts` says on which they live, `numerics` is init's. `spawned`: in processes of their
    own. `hosts`: for a test on each of these, of a function that need not know.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        parameters = inspect.signature(function).parameters

        def test(pool: RankPool, **arguments: Any) -> None:
            how = {"world": arguments.get("world", world), "hosts": arguments.get("hosts", ""), **options}
            if "numerics" in arguments and "settings" not in options:
                how["settings"] = {**DEFAULT_SETTINGS, "numerics": arguments["numerics"]}
            known = {name: value for name, value in arguments.items() if name in parameters}
            call = (_call_on_rank, function.__module__, function.__name__, known)
            if spawned:
                with pool.spawn_ranks(*call, **how) as processes:
                    wrong = [rank.result() for rank in processes]
            else:
                wrong = pool.run(*call, **how)
            assert not any(wrong), wrong

        more = ["pool", *(["hosts"] if hosts else [])]
        added = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in more]
        test.__signature__ = inspect.Signature([*added, *parameters.values()])
        test.on_ranks = function
        test.__doc__ = function.__doc__
        return pytest.mark.parametrize("hosts", hosts)(test) if hosts else test

    return decorate


def _call_on_rank(module: str, name: str, arguments: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(module), name).on_ranks(**arguments)
