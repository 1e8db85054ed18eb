"""What `syncengine run --keep-going` is for its ranks, for ranks of a test that die and join."""

import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from pool import Rank, RankFailure, RankPool

from syncengine.launch.local import ENDED, JOIN, MEET, ticket_of


class Launcher(contextlib.ExitStack):
    """Starts processes that call `function(*arguments)`, and tells the others of each that ends."""

    def __init__(self, pool: RankPool, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[int, Rank] = {}
        self._pool, self._call, self._world = pool, (function, *arguments), 0
        self._ended: set[int] = set()

    def start(self, world: int) -> None:
        """The ranks of the beginning."""
        self._world = world
        self.processes |= enumerate(self._spawn(world))

    def join(self, name: int) -> None:
        """A process that joins."""
        self.processes[name] = self._spawn(1, {JOIN: str(name)})[0]

    def _spawn(self, world: int, more: dict[str, str] | None = None) -> list[Rank]:
        environ = {MEET: f"127.0.0.1:{self.store.port}", **(more or {})}
        ranks = self._pool.spawn_ranks(*self._call, world=world, settings=None, environ=environ, stay=True)
        return self.enter_context(ranks)

    def watch(self, until: Callable[[], bool], timeout: float = 60.0) -> bool:
        """Tells of ends until something is so: False if that takes longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not until():
            if time.monotonic() > deadline:
                return False
            for name, process in self.processes.items():
                if name not in self._ended and (process.connection.poll(0) or process.exit_code(0) is not None):
                    self._ended.add(name)
                    self.store.append(ENDED, f"{name} ")
            time.sleep(0.01)
        return True

    def waits(self, name: int) -> bool:
        """Whether the process still waits to be let in, or has not come so far."""
        return name >= self._world and not self.store.check([ticket_of(name)])

    def outcomes(self, timeout: float = 120.0) -> dict[int, Any]:
        """What those return that are not killed. Kills who waits to be let in when all others have ended."""

        def over() -> bool:
            running = [name for name, process in self.processes.items() if not process.connection.poll(0)]
            if not all(map(self.waits, running)):
                return False
            for name in running:
                self.processes[name].signal(signal.SIGKILL)
            return True

        self.watch(over, timeout)
        returned = {}
        for name, process in sorted(self.processes.items()):
            try:
                returned[name] = process.result(0.5)
            except RankFailure:
                if process.exit_code(0) != -signal.SIGKILL:
                    raise
        return returned
