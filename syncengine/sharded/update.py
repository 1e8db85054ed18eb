"""An update of the weights that a host's ranks share, made by all ranks or by none: agree, decide, write, confirm.

All ranks agree first. Then a failure may reach some ranks and not others. So the first rank that knows whether to go on
writes this decision into shared memory, and it holds for all of the host. Each rank then writes its slices, and notes
there that it has. So after any failure a survivor can tell whether the weights are whole, before or after this update,
or torn, because a rank has died, or its optimizer has raised, in the middle of it.
"""

import time
from collections.abc import Sequence

import torch

from syncengine._C import fault_point
from syncengine.errors import Aborted, SyncError, Timeout, TornWeights, error_text, to_utf8
from syncengine.sharded.agreement import agree
from syncengine.sharded.block import Block
from syncengine.sharded.memory import Host
from syncengine.sharded.shard import Groups, describe_options

SAME = "Do the same on every rank before step()."
_MOMENT = 1.0  # seconds


class Update:
    """The update of ``blocks`` in the user's step ``number``. ``groups``: the optimizer's own parameter groups."""

    def __init__(self, host: Host, blocks: Sequence[Block], number: int, groups: Groups) -> None:
        self._host, self._blocks, self._number, self._groups = host, blocks, number, groups
        self._memory = blocks[0].weights.memory
        self._communicator = host.communicator
        self._is_done = False  # this rank's part
        self._has_news = False  # state to share, which comes with it
        # By block, a byte for each parameter: whether the update writes to it; at first, whether it has a gradient.
        self.written: list[bytes] = []
        for block in blocks:
            self.written.append(block.weights.watched.gradients())

    def make(self, problem: str) -> None:
        """Makes the update on all ranks, or on none. ``problem``: why this rank can't.

        If a rank fails meanwhile, this raises ``TornWeights`` if the weights are torn. Otherwise it raises the error
        with which the communicator has failed, and all ranks have made the update, or none has begun to.
        """
        try:
            for block, gradients in zip(self._blocks, self.written, strict=True):
                if 2 in gradients and not problem:
                    problem = f"the gradient of parameter {block.weights.named[gradients.index(2)].name} is sparse: "
                    problem += "ShardedOptimizer needs dense ones (sparse=False)"
            self._agree(problem)
            for block in self._blocks:
                block.give_loaded()
            fault_point("agreed")
            if not self._memory.decide(self._number, True):
                self._communicator.check_peers()
                raise Aborted("another rank has given up this update")
        except BaseException as error:
            if self._is_everybodys(error):
                raise
            if self._memory.decide(self._number, False):  # the others make it
                self._write()
                self._see_whether_whole(error)
            raise
        self._write()
        try:
            self._confirm()
        except BaseException as error:
            if not self._is_everybodys(error):
                self._see_whether_whole(error)
            raise

    # --- The stages of an update

    def _agree(self, problem: str) -> None:
        """Raises on all ranks if one has a ``problem``, or their updates would differ. All ranks call it."""
        options = describe_options(self._groups)
        for block in self._blocks:
            state = f"yes, CRC-32 {block.state.digest():08x}" if block.state.loaded else "no"
            options.append(f"loaded a state dict of the optimizer, or replaced its state: {state}")
            options.append(f"loaded a state dict of the model: {'yes' if block.weights.loaded else 'no'}")
        facts = b"|".join([str(self._number).encode(), to_utf8("\n".join(options)), *self.written])
        what = "what ShardedOptimizer.step() is to do differs"
        agree(self._communicator, what, facts, lambda: self._describe(options), problem, self._advise)

    def _describe(self, options: Sequence[str]) -> list[str]:
        named = [one for block in self._blocks for one in block.weights.named]
        gradients = [f"{name}: {'no ' if p.grad is None else ''}gradient" for name, p in named]
        return [f"step {self._number}", *options, *gradients]

    def _advise(self) -> str:
        changed = sorted(set().union(*(block.shard.changed for block in self._blocks)))
        if not changed:
            return SAME
        names, kind = ", ".join(map(repr, changed)), self._blocks[0].shard.kind
        return (
            f"{SAME} Or, if {kind}.step() itself has changed {names}: it does not treat each parameter by itself, and "
            "the weights are void. Continue from a checkpoint, with a plain optimizer."
        )

    def _write(self) -> None:
        """Writes this rank's part. If that fails, the weights are torn: raises ``TornWeights``, or Ctrl-C as it is."""
        try:
            fault_point("updating")
            for block in self._blocks:
                block.take_loaded()  # only now, since it may fail on this rank alone
            for place, block in enumerate(self._blocks):
                self.written[place] = block.shard.update(self._groups)
                self._has_news |= block.state.has_news()
        except BaseException as error:
            self._memory.tear(self._number)
            self._fail(error)
            if not isinstance(error, Exception):
                raise  # Ctrl-C
            raise TornWeights(torn_text(self._number, self._own(error))) from error
        if not self._has_news:
            self._complete()

    def _confirm(self) -> None:
        """Waits until all ranks have written, and shares new state. All ranks call it."""
        flags = torch.frombuffer(bytearray([self._has_news]) + b"".join(self.written), dtype=torch.uint8)
        self._communicator.all_reduce(flags, "max")
        has_news, *written = flags.tolist()
        for place, block in enumerate(self._blocks):
            count = len(self.written[place])
            self.written[place], written = bytes(written[:count]), written[count:]
            if has_news:
                block.state.share()
        if not self._is_done:
            self._complete()

    def _complete(self) -> None:
        self._memory.complete(self._host.rank, self._number)
        self._is_done = True

    # --- Failures of an update

    def is_complete(self) -> bool:
        """Whether all ranks of this host have made their parts."""
        return not self._memory.torn and min(self._memory.completed(self._host.size)) >= self._number

    def _is_everybodys(self, error: BaseException) -> bool:
        """Whether all ranks raise ``error``, or it is ``TornWeights``. Otherwise fails the communicator on all."""
        if isinstance(error, TornWeights) or (isinstance(error, SyncError) and self._communicator.exception() is None):
            return True
        self._fail(error)
        return False

    def _fail(self, error: BaseException) -> None:
        """Fails the communicator on all ranks, unless it has failed."""
        me = self._host.name(self._host.rank)
        self._communicator.abort(f"{me} raised in ShardedOptimizer.step(): {error_text(error)}")

    def _see_whether_whole(self, error: BaseException) -> None:
        """Waits until all ranks of this host have made the update. Raises ``TornWeights`` if one never will.

        If ``error``, which has ended the communicator, is Ctrl-C, only marks the memory as torn: the caller raises it.
        """
        if not self._is_done:
            self._memory.tear(self._number)
        patience = _MOMENT if isinstance(error, Timeout) else self._communicator.timeout  # they have been waited for
        deadline = time.monotonic() + patience
        try:
            while True:
                ended = self._communicator.ended()  # first: what these have done is there by now
                completed = self._memory.completed(self._host.size)
                behind = [rank for rank, done in enumerate(completed) if done < self._number]
                torn = self._memory.torn
                if not behind and not torn:
                    return
                lost = [rank for rank in behind if self._host.in_job(rank) in ended]
                if lost or torn or time.monotonic() > deadline:
                    if isinstance(error, Exception):
                        raise TornWeights(torn_text(self._number, self._who(lost or behind, error))) from error
                    self._memory.tear(self._number)
                    return
                time.sleep(0.001)
        except BaseException:  # the error above, or Ctrl-C: this rank waits no longer for the others' parts
            self._memory.tear(self._number)
            raise

    def _who(self, missing: Sequence[int], error: Exception) -> str:
        """The reason why the weights are torn, naming a rank: one that is ``missing``, if that is not this rank."""
        if others := [self._host.name(rank) for rank in missing if rank != self._host.rank]:
            return f"{', '.join(others)} did not complete its part of the update"
        if isinstance(error, SyncError):  # it names the rank that failed or was late, perhaps this one
            return f"{self._host.name(self._host.rank)} was told: {error}"
        return self._own(error)

    def _own(self, error: BaseException) -> str:
        return f"{self._host.name(self._host.rank)} raised {error_text(error)}"


def torn_text(step: int, why: str) -> str:
    """The text of every error about torn weights."""
    return f"the weights are torn at step {step}: continue from a checkpoint ({why})"
