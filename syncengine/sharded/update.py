"""One update of what the ranks of a host have in common, made by all ranks or by none: agree, decide, write, confirm.

All ranks agree first. A failure may reach some of them then and not others: so the first rank that knows either way
writes a decision into shared memory, which holds for all of the host. Each rank then writes its slices, and says so
there. So after any failure a survivor can tell whether the weights are whole, before or after this update, or torn,
because a rank has died in the middle of it. Where the optimizer raises on all ranks before it has written anything (an
option that it refuses), nothing has happened.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from syncengine._C import fault_point
from syncengine.errors import Aborted, InvalidUsage, SyncError, Timeout, TornWeights
from syncengine.sharded.agreement import agree, gather_texts
from syncengine.sharded.block import Block
from syncengine.sharded.edits import WatchedState
from syncengine.sharded.memory import Host
from syncengine.sharded.shard import NOT_SCALED, Groups, Scaling, describe_options
from syncengine.sharded.state import State

SAME = "Do the same on every rank before step()."
_MOMENT = 1.0  # seconds


class Parties(Protocol):
    """Whose update it is."""

    host: Host | None
    blocks: list[Block]
    watched: WatchedState
    loaded: bool  # a state, or a part of it, since the last update

    def step_of(self, number: int) -> int:
        """Which of the user's steps update ``number`` is."""


class Update:
    """Update ``number`` of ``parties``; or what ``writing()`` does in the place of one, by its first stages alone.

    ``groups`` and ``state``: the optimizer's own. ``scaling``: what a GradScaler has told the optimizer.
    """

    def __init__(self, parties: Parties, number: int, groups: Groups, state: State | None, scaling: Scaling) -> None:
        assert parties.host is not None
        self._parties, self._host, self._blocks = parties, parties.host, parties.blocks
        self._number, self._groups, self._state, self._scaling = number, groups, state, scaling
        self._memory = parties.blocks[0].weights.memory
        self._communicator = parties.host.communicator
        self._loads = False  # what was loaded is in the common memory
        self._is_done = False  # this rank's part
        self._has_news = False  # state to share, which comes with it
        self._error: Exception | None = None  # of the optimizer, before it has written anything
        # Which parameters it writes to, as far as is known: by block.
        self.written: list[bytes] = []
        for block in parties.blocks:
            self.written.append(block.weights.watched.gradients())

    def make(self, problem: str) -> Exception | None:
        """On all ranks, or on none. ``problem``: why this rank can't.

        Where a rank has failed meanwhile, raises ``TornWeights`` if the memory is torn, else the error with which the
        communicator has failed; all ranks are done then, or none has begun. Returns what this rank is to raise where
        the optimizer has refused the step on each rank that has work: nothing is written then.
        """
        try:
            self._prepare(problem)
            fault_point("agreed")
            if not self._memory.decide(self._number, True):
                self._communicator.check_peers()
                raise Aborted("another rank has given up this update")
        except BaseException as error:
            if self._is_everybodys(error):
                raise
            if self.decide(False):  # the others make it
                self._write()
                self._see_whether_whole(error)
            raise
        self._write()
        try:
            return self._confirm()
        except BaseException as error:
            if not self._is_everybodys(error):
                self._see_whether_whole(self._error or error)
            raise

    # --- Its stages

    def agree(self, what: str, problem: str) -> None:
        """Raises on all ranks if one has a ``problem``, or they are about to make different updates. Collective."""
        options = describe_options(self._groups)
        loads = "loaded a state dict of the optimizer, or replaced its state: "
        if self._parties.loaded:
            digest = 0
            for block in self._blocks:
                digest = block.state.digest(digest)
            options.append(f"{loads}yes, CRC-32 {digest:08x}")
        else:
            options.append(f"{loads}no")
        if self._scaling is not NOT_SCALED:
            options.append(f"told by a GradScaler: {self._scaling.numbers()}")
        facts = b"|".join([str(self._number).encode(), "\n".join(options).encode(), *self.written])
        for block in self._blocks:
            facts += b"+" if block.weights.loaded else b"-"
        agree(self._communicator, what, facts, lambda: self._describe(options), problem, self._advise)

    def _describe(self, options: Sequence[str]) -> list[str]:
        lines = [f"step {self._parties.step_of(self._number)}", *options]
        for block in self._blocks:
            lines.append(f"loaded a state dict of the model: {'yes' if block.weights.loaded else 'no'}")
            lines += block.describe_gradients()
        return lines

    def _advise(self) -> str:
        changed = sorted(set().union(*(block.shard.changed for block in self._blocks)))
        if not changed:
            return SAME
        names, kind = ", ".join(map(repr, changed)), self._blocks[0].shard.kind
        return (
            f"{SAME} Or, if {kind}.step() itself has changed {names}: it does not treat each parameter by itself, and "
            "the weights are void. Continue from a checkpoint, with a plain optimizer."
        )

    def _prepare(self, problem: str) -> None:
        """Agrees, and brings what was loaded into the common memory. Collective."""
        for block, gradients in zip(self._blocks, self.written, strict=True):
            if 2 in gradients and not problem:
                problem = block.sparse_gradient(gradients)
        self.agree("what ShardedOptimizer.step() is to do differs", problem)
        for block in self._blocks:
            if block.weights.loaded:
                self._loads = True  # before: this rank may fail within, when the others begin the update
                block.weights.give()
        if self._parties.loaded:
            self._loads = True
            self._parties.watched.forget()
            for block in self._blocks:
                block.load_state()
            for block in self._blocks:
                block.state.give(block.problem)

    def decide(self, proceeds: bool) -> bool:
        """The decision, which holds for all of this host: ``proceeds``, if nobody was first to say otherwise."""
        return self._memory.decide(self._number, proceeds)

    def _write(self) -> None:
        """This rank's part. Raises ``TornWeights``, unless it is Ctrl-C, if that fails when something was written."""
        try:
            fault_point("updating")
            if self._loads:
                self._take_loaded()
            self._step()
        except BaseException as error:
            self._memory.tear(self._number)
            self._fail(error)
            if not isinstance(error, Exception):
                raise  # Ctrl-C
            raise TornWeights(self._torn_text(self._own(error))) from error
        if not self._has_news and self._error is None:
            self._complete()

    def _take_loaded(self) -> None:
        """Not as it is prepared: that may fail when others begin the update."""
        parties = self._parties
        for block in self._blocks:
            if block.weights.loaded:
                block.take_loaded()
            if parties.loaded:
                block.state.take()
        if parties.loaded:
            parties.watched.expect_more()
            parties.watched.note(self._blocks[0].state.whole)  # the optimizer may refuse to step yet
        parties.loaded = False

    def _step(self) -> None:
        for block in self._blocks:
            block.state.note()
        written = []
        for block in self._blocks:
            try:
                written.append(block.shard.update(self._groups, self._scaling))
            except Exception as error:
                if all(each.shard.shows_writes and each.state.is_as_noted() for each in self._blocks):
                    self._error, self._has_news = error, False
                    return
                raise
            try:
                self._has_news |= block.state.has_news()
            except InvalidUsage as error:
                block.problem, self._has_news = str(error), True
        self.written = written

    def _confirm(self) -> Exception | None:
        """All ranks have written, or have refused. Shares new state. Collective."""
        flags = torch.frombuffer(
            bytearray([self._has_news, self._error is not None]) + b"".join(self.written), dtype=torch.uint8
        )
        self._communicator.all_reduce(flags, "max")
        has_news, has_error, *written = flags.tolist()
        refused = self._refused() if has_error else None
        for place, block in enumerate(self._blocks):
            count = len(self.written[place])
            self.written[place], written = bytes(written[:count]), written[count:]
            if has_news:
                self._parties.watched.expect_more()
                block.state.share(block.problem)
        if not self._is_done:
            self._complete()
        return refused

    def _refused(self) -> Exception:
        """What this rank is to raise, as nobody has written anything. Raises ``TornWeights`` if somebody has."""
        own = {
            "error": self._own(self._error) if self._error else "",
            "wrote": self._error is None and any(block.has_work() for block in self._blocks),
        }
        everyone = [json.loads(other) for other in gather_texts(self._communicator, json.dumps(own))]
        first = next(each["error"] for each in everyone if each["error"])
        if any(each["wrote"] for each in everyone):
            self._memory.tear(self._number)
            self._communicator.abort(f"in ShardedOptimizer.step(), {first}")
            raise TornWeights(self._torn_text(first)) from self._error
        return self._error or Aborted(first)

    def _complete(self) -> None:
        self._memory.complete(self._host.rank, self._number)
        self._is_done = True

    # --- Failures

    def is_complete(self) -> bool:
        """Whether all ranks of this host have made their parts."""
        return not self._memory.torn and min(self._memory.completed(self._host.size)) >= self._number

    def _is_everybodys(self, error: BaseException) -> bool:
        """Whether ``error`` is raised on all ranks, or is settled; else the communicator fails on all of them."""
        if isinstance(error, TornWeights) or (isinstance(error, SyncError) and self._communicator.exception() is None):
            return True
        self._fail(self._error or error)
        return False

    def _fail(self, error: BaseException) -> None:
        """The communicator fails on all ranks, unless it has."""
        me = self._host.name(self._host.rank)
        self._communicator.abort(f"{me} raised in ShardedOptimizer.step(): {type(error).__name__}: {error}")

    def _see_whether_whole(self, error: BaseException) -> None:
        """Waits until all ranks of this host have made the update; raises ``TornWeights`` if one never will.

        Unless ``error``, which has ended the communicator, is Ctrl-C: that comes first, and the memory says the rest.
        """
        if not self._is_done:
            self._memory.tear(self._number)
        patience = _MOMENT if isinstance(error, Timeout) else self._communicator.timeout  # they have been waited for
        deadline = time.monotonic() + patience
        while True:
            dead = self._communicator.dead()  # first: what these have done is there by now
            completed = self._memory.completed(self._host.size)
            behind = [rank for rank, done in enumerate(completed) if done < self._number]
            torn = self._memory.torn
            if not behind and not torn:
                return
            lost = [rank for rank in behind if rank in dead]
            if lost or torn or time.monotonic() > deadline:
                self._memory.tear(self._number)
                if not isinstance(error, Exception):
                    return
                raise TornWeights(self._torn_text(self._who(lost or behind, error))) from error
            time.sleep(0.001)

    def _who(self, missing: Sequence[int], error: Exception) -> str:
        """What has torn the weights, naming a rank: those that are ``missing``, as far as this rank is not one."""
        if others := [self._host.name(rank) for rank in missing if rank != self._host.rank]:
            return f"{', '.join(others)} did not complete its part of the update"
        if isinstance(error, SyncError):  # it names who has failed, or was late: perhaps this rank, for the others
            return f"{self._host.name(self._host.rank)} was told: {error}"
        return self._own(error)

    def _own(self, error: BaseException) -> str:
        return f"{self._host.name(self._host.rank)} raised {type(error).__name__}: {error}"

    def _torn_text(self, why: str) -> str:
        return torn_text(self._parties.step_of(self._number), why)


def torn_text(step: int, why: str) -> str:
    """What everybody says who is asked for torn weights."""
    return f"the weights are torn at step {step}: continue from a checkpoint ({why})"
