"""How all ranks make one update, or none does: agree, decide, write, and see whether all have.

All ranks agree first. A failure may reach some of them then and not others: so the first rank that knows either way
writes a decision into shared memory, which holds for all of the host. Each rank then writes its slices, and says so
there. So after any failure a survivor can tell whether the weights are whole, before or after this update, or torn,
because a rank has died in the middle of it. Where the optimizer raises on all ranks before it has written anything (an
option that it refuses), nothing has happened.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from syncengine._C import CommonMemory, fault_point
from syncengine.errors import Aborted, SyncError, Timeout, TornWeights
from syncengine.sharded.agreement import gather_texts
from syncengine.sharded.memory import Host

_MOMENT = 1.0  # seconds


class Part(NamedTuple):
    """What became of this rank's part of an update."""

    news: bool  # it has something to share
    error: Exception | None = None  # which came before anything was written


def update_together(
    host: Host,
    memory: CommonMemory,
    number: int,
    step: int,
    prepare: Callable[[], None],
    write: Callable[[], Part],
    has_work: Callable[[], bool],
    share: Callable[[], None],
) -> Exception | None:
    """On all ranks, or on none: ``write()``; and where that has news on any, ``share()``, which is collective.

    ``prepare()`` comes before, and is collective: if it raises on one rank, then on all. If a rank fails meanwhile,
    raises ``TornWeights`` where what the ranks have in common is torn, else the error with which the communicator has
    failed; all ranks are done then, or none has begun. Returns what this rank is to raise if ``write()`` had an error
    on each rank that ``has_work()``: nothing is written then.
    """
    communicator = host.communicator
    try:
        prepare()
        fault_point("agreed")
        proceeds = memory.decide(number, True)
    except BaseException as error:
        if isinstance(error, SyncError) and communicator.exception() is None:
            raise  # on all ranks
        _end(host, error)
        if memory.decide(number, False):
            if not _is_done(_write(host, memory, number, step, write)):  # the others do
                memory.tear(number)
            _check_whole(host, memory, number, step, error)
        raise
    if not proceeds:
        communicator.check_peers()
        raise Aborted("another rank has given up this update")
    part = _write(host, memory, number, step, write)
    refused = None
    try:
        flags = torch.tensor([part.news, part.error is not None], dtype=torch.int64, device="cpu")
        communicator.all_reduce(flags, "max")
        news, has_error = flags.tolist()
        if has_error:
            refused = _refused(host, part, has_work)
        if news:
            share()
    except _HalfWrittenError as error:  # on all ranks
        memory.tear(number)
        _end(host, part.error or error)
        raise TornWeights(torn_text(step, str(error))) from part.error
    except BaseException as error:
        if isinstance(error, SyncError) and communicator.exception() is None:
            raise  # on all ranks
        _end(host, error)
        if not _is_done(part):
            memory.tear(number)
        _check_whole(host, memory, number, step, part.error or error)
        raise
    if not _is_done(part):
        memory.complete(host.rank, number)
    return refused


def _is_done(part: Part) -> bool:
    return not part.news and part.error is None


def _refused(host: Host, part: Part, has_work: Callable[[], bool]) -> Exception:
    """What this rank is to raise, as nobody has written anything. Raises if somebody has. Collective."""
    text = f"{host.name(host.rank)} raised {type(part.error).__name__}: {part.error}" if part.error else ""
    own = {"error": text, "wrote": part.error is None and has_work()}
    everyone = [json.loads(other) for other in gather_texts(host.communicator, json.dumps(own))]
    first = next(each["error"] for each in everyone if each["error"])
    if any(each["wrote"] for each in everyone):
        raise _HalfWrittenError(first)
    return part.error or Aborted(first)


class _HalfWrittenError(Exception):
    pass


def _write(host: Host, memory: CommonMemory, number: int, step: int, write: Callable[[], Part]) -> Part:
    try:
        fault_point("updating")
        result = write()
    except BaseException as error:
        memory.tear(number)
        _end(host, error)
        if not isinstance(error, Exception):
            raise  # Ctrl-C
        raise TornWeights(torn_text(step, f"{host.name(host.rank)} raised {type(error).__name__}: {error}")) from error
    if _is_done(result):
        memory.complete(host.rank, number)
    return result


def _end(host: Host, error: BaseException) -> None:
    """The communicator fails on all ranks, unless it has."""
    host.communicator.abort(
        f"{host.name(host.rank)} raised in ShardedOptimizer.step(): {type(error).__name__}: {error}"
    )


def _check_whole(host: Host, memory: CommonMemory, number: int, step: int, error: BaseException) -> None:
    """Waits until all ranks of this host have made the update; raises ``TornWeights`` if one never will.

    Unless ``error``, which has ended the communicator, is Ctrl-C: that comes first, and the memory says the rest.
    """
    patience = _MOMENT if isinstance(error, Timeout) else host.communicator.timeout  # they have been waited for
    deadline = time.monotonic() + patience
    while True:
        dead = host.communicator.dead()  # first: what these have done is there by now
        behind = [rank for rank, done in enumerate(memory.completed(host.size)) if done < number]
        if not behind and not memory.torn:
            return
        lost = [rank for rank in behind if rank in dead]
        if lost or memory.torn or time.monotonic() > deadline:
            memory.tear(number)
            if not isinstance(error, Exception):
                return
            names = ", ".join(host.name(rank) for rank in lost or behind)
            raise TornWeights(torn_text(step, f"{names} did not complete its part of the update")) from error
        time.sleep(0.001)


def torn_text(step: int, why: str) -> str:
    """What everybody says who is asked for torn weights."""
    return f"the weights are torn at step {step}: continue from a checkpoint ({why})"
