"""What one optimizer has in common with those of the other ranks, and how they change it."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import reduce

import torch

from syncengine._C import CommonMemory
from syncengine.errors import InvalidUsage, SyncError, TornWeights
from syncengine.parallel import Parallel
from syncengine.parallel.groups import Group
from syncengine.sharded.agreement import agree, only_makes_state
from syncengine.sharded.block import Block, part
from syncengine.sharded.claims import Claim, any_torn, check_not_torn, guard
from syncengine.sharded.edits import WatchedState
from syncengine.sharded.membership import Groups, Membership
from syncengine.sharded.memory import Host
from syncengine.sharded.movable import why_not_shared
from syncengine.sharded.shard import Member, Shard, describe_options
from syncengine.sharded.state import State
from syncengine.sharded.update import Part, torn_text, update_together
from syncengine.sharded.weights import Named
from syncengine.sharded.wording import SAME, advise, describe_shared, describe_update, why_not_averages
from syncengine.sharded.zero import other_ranks


class Sharing:
    """Blocks of weights in shared memory. ``groups`` and ``state``, in its methods, are the optimizer's own.

    ``make_shard`` is ``Shard``, for the class of optimizers that the user has chosen; ``coupling`` says why the options
    of groups can't be; ``cuts``, ``sums`` and ``group`` as the arguments ``elements``, ``checksum``, ``process_group``.
    """

    def __init__(
        self,
        make_shard: Callable[..., Shard],
        coupling: Callable[[Groups], str],
        cuts: bool,
        sums: bool,
        group: Group | None,
    ) -> None:
        self._make_shard, self._coupling, self._cuts, self._sums, self._group = make_shard, coupling, cuts, sums, group
        self.host: Host | None = None  # of the first model's communicator, which all that ranks do together here uses
        self.blocks: list[Block] = []
        # Whose parameters it updates, numbered in the order of their binding, which all ranks have in common.
        self.models: weakref.WeakKeyDictionary[Parallel, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._known: weakref.WeakSet[Parallel] = weakref.WeakSet()  # that it has looked at
        self.members = Membership(self.blocks)
        self.loaded = False  # a state, or a part of it, since the last update
        self._watched = WatchedState(self.blocks)
        self.writes = False  # this rank, in writing()
        self.over: SyncError | None = None  # why there can't be another update
        self.memories: list[CommonMemory] = []  # of all blocks, as the next
        self.claims: list[Claim] = []
        self._updates = 0  # with those by writing()
        self._writings = 0

    # --- What is shared

    def bind(self, model: Parallel, groups: Groups, state: State, in_step: bool = False) -> None:
        """Moves the parameters that ``model`` trains into shared memory, if it is new. Collective then.

        ``in_step``: not for a step that only makes state, which each rank makes for itself then.
        """
        if model in self._known:
            return
        names = {id(p): n for n, p in zip(model._model.names, model._model.parameters, strict=True)}
        has_some = any(id(parameter) in names for group in groups for parameter in group["params"])
        if has_some and any_torn():
            check_not_torn(model.module.parameters())
        self._known.add(model)
        if model.communicator.size == 1 or not has_some:
            return
        if in_step and not self.blocks and only_makes_state(model.communicator, groups):
            self._known.discard(model)
            return
        if self.host is not None and self.host.communicator is not model.communicator:
            if model.communicator.exception() is not None:
                return  # one from before a failure
            if self.host.communicator.global_ranks != model.communicator.global_ranks:
                raise InvalidUsage(
                    "the models of one ShardedOptimizer need process groups of the same ranks: make one for each model"
                )
        self.models.setdefault(model, next(self._numbers))
        self.members.names.update(zip(model._model.parameters, model._model.names, strict=True))
        self.host = self.host or Host(model.communicator)
        model.reducer.watch_local_backwards()
        mine = [member for member in self.members.unshared(groups) if id(member.parameter) in names]
        trained = [member for member in mine if member.parameter.requires_grad]
        try:
            self.share(trained, groups, state)
        except SyncError:
            self._known.discard(model)  # the next forward asks again, where this error was caught
            raise
        guard(model)  # of what another one shares, too

    def look_again(self) -> None:
        """The optimizer has more parameters."""
        self._known.clear()

    def share(self, members: Sequence[Member], groups: Groups, state: State) -> None:
        """Moves these into shared memory. Collective if there are any."""
        if not members or self.host is None:
            return
        named = [Named(self.members.names[member.parameter], member.parameter) for member in members]
        lines = describe_shared(named, members, state)
        communicator = self.host.communicator
        what = "what ShardedOptimizer is to share differs"
        modules = [model.module for model in self.models]
        problem = other_ranks(self._group, communicator) or why_not_shared(named, modules) or self._look_at_state(state)
        agree(communicator, what, "\n".join(lines).encode(), lambda: lines, problem, SAME)
        block = Block(self.host, self._make_shard, self._cuts, groups, members, named, state, self.memories)
        self.blocks.append(block)
        self.members.look_again()
        self.claims += block.claims
        flag = torch.tensor([bool(block.problem) or block.has_news()], dtype=torch.int64, device="cpu")
        communicator.all_reduce(flag, "max")
        if flag.item():
            block.state.share(block.problem)
        self._watched.expect_more()
        if not self.loaded:
            self._watched.note(state)
        for model in self.models:
            guard(model)

    # --- An update

    @property
    def steps(self) -> int:
        """How many of the user's are complete."""
        return self._updates - self._writings

    def update(self, groups: Groups, state: State) -> None:
        """Collective: one step of the optimizer, on all ranks or on none."""
        if not self.blocks or self.host is None:
            return
        number = self._updates + 1
        memory = self.blocks[0].weights.memory
        try:
            refused = update_together(
                self.host,
                memory,
                number,
                self._step(number),
                lambda: self._prepare(groups, state),
                lambda: self._write(groups),
                lambda: any(block.has_work() for block in self.blocks),
                self._share_state,
            )
        except BaseException as error:
            failure = self.host.communicator.exception()
            if isinstance(failure, SyncError):
                if not memory.torn and min(memory.completed(self.host.size)) >= number:
                    self._complete(number)  # what has failed came after it
                self.end(error if isinstance(error, SyncError) else failure)
            raise
        if refused is not None:
            self.note_writing()  # of nothing
            try:
                raise refused
            finally:
                del refused  # it holds this frame
        self._complete(number)
        self._watched.note(state)

    def _complete(self, number: int) -> None:
        self._updates = number
        for block in self.blocks:
            block.weights.note_update()
            block.state.read_numbers()

    def decide_to_write(self, proceeds: bool) -> bool:
        """The decision on a writing(), which holds for all of this host: ``proceeds``, if nobody was first."""
        return bool(self.blocks) and self.blocks[0].weights.memory.decide(self._updates + 1, proceeds)

    def note_writing(self) -> None:
        """It is over."""
        self._updates += 1
        self._writings += 1

    def _prepare(self, groups: Groups, state: State) -> None:
        problem = self._problem(groups) or self._look_at_state(state)
        self.agree("what ShardedOptimizer.step() is to do differs", groups, problem)
        for block in self.blocks:
            if block.weights.loaded:
                block.weights.give()
        if self.loaded:
            self._watched.forget()
            for block in self.blocks:
                block.load_state()
            for block in self.blocks:
                block.state.give(block.problem)

    def _take_loaded(self) -> None:
        """What ``_prepare`` has brought into common memory. Not there, as it may fail when others begin the update."""
        for block in self.blocks:
            block.take_loaded()
            if self.loaded:
                block.state.take()
        if self.loaded:
            self._watched.expect_more()
            self._watched.note(self.blocks[0].state.whole)  # the optimizer may refuse to step yet
        self.loaded = False

    def _write(self, groups: Groups) -> Part:
        self._take_loaded()
        for block in self.blocks:
            block.state.note()
        news = False
        for block in self.blocks:
            try:
                block.shard.update(groups)
            except Exception as error:
                if all(each.shard.shows_writes and each.state.is_as_noted() for each in self.blocks):
                    return Part(news=False, error=error)
                raise
            news |= block.has_news()
            if self._sums:
                block.take_sums()
        return Part(news)

    def _look_at_state(self, state: State) -> str:
        """Follows what the user has put into it, which is loaded then; says what was done to it that can't be."""
        for block in self.blocks:
            block.state.whole = state
        if self.loaded:
            return ""
        if problem := self._watched.written():
            return problem
        if self._watched.replaced(state):
            problem = self._watched.unusable(state)
            self.loaded = not problem
        return problem

    def _step(self, number: int) -> int:
        """Which of the user's steps this update is."""
        return number - self._writings

    def _share_state(self) -> None:
        self._watched.expect_more()
        for block in self.blocks:
            block.state.share(block.problem)

    # --- What ranks must have in common for it

    def agree(self, what: str, groups: Groups, problem: str) -> None:
        """Raises on all ranks if one has a ``problem``, or they are about to make different updates. Collective."""
        assert self.host is not None
        options = describe_options(groups)
        if self.loaded:
            digest = reduce(lambda start, block: block.state.digest(start), self.blocks, 0)
            options.append(f"loaded a state dict of the optimizer, or replaced its state: yes, CRC-32 {digest:08x}")
        else:
            options.append("loaded a state dict of the optimizer, or replaced its state: no")
        marks = [block.gradients() + bytes([block.weights.loaded]) for block in self.blocks]
        facts = b"|".join([str(self._updates).encode(), "\n".join(options).encode(), *marks])
        step = self._step(self._updates + 1)
        agree(
            self.host.communicator,
            what,
            facts,
            lambda: list(describe_update(step, options, self.blocks)),
            problem,
            advise(self.blocks),
        )

    def written(self) -> str:
        """Which parameter this rank has written to outside of an update, and must not; or an empty text."""
        if self.writes:
            return ""
        return next((text for block in self.blocks if (text := block.weights.written_by_this_rank())), "")

    def _problem(self, groups: Groups) -> str:
        """Why this rank can't make an update; or an empty text."""
        if problem := self.members.edited(groups) or self.written() or self._coupling(groups):
            return problem
        for block in self.blocks:
            if problem := block.wrong_sum() or block.sparse_gradient():
                return problem
        return why_not_averages(self.models)

    # --- Its end

    def raise_if_over(self) -> None:
        """Raises what has ended it."""
        if self.over is None and self.host is not None:
            for model in self.models:  # they may have groups of their own: all end together
                failure = model.communicator.exception()
                if isinstance(failure, SyncError) and not isinstance(failure, InvalidUsage):  # not by being closed
                    self.host.communicator.abort(str(failure), type(failure).__name__)
            error = self.host.communicator.exception()
            if isinstance(error, SyncError):
                self.end(error)
        if self.over is not None:
            raise self._again()

    def raise_if_torn(self) -> None:
        """Raises ``TornWeights`` if nobody must use the weights any more."""
        if isinstance(self.over, TornWeights):
            raise self._again()

    def _again(self) -> SyncError:
        """A new one each time: what was raised holds its callers, and they hold this."""
        return type(self.over)(str(self.over)) if self.over is not None else SyncError()

    def tear(self, error: BaseException) -> None:
        """The weights may be half written, and the communicator has failed: raises ``TornWeights``, now and later."""
        self.blocks[0].weights.memory.tear(self._updates + 1)
        failure = self.host.communicator.exception() if self.host is not None else None
        self.end(next((e for e in (error, failure) if isinstance(e, SyncError)), InvalidUsage(str(error))))
        if isinstance(error, Exception):
            raise self._again() from error

    def end(self, error: SyncError) -> None:
        """No more updates. This rank keeps weights and state as they are, for itself."""
        torn = self.blocks[0].weights.memory.torn if self.blocks else 0
        torn = torn if torn > self._updates else 0  # else another rank can't know that it is complete
        if torn and not isinstance(error, TornWeights):
            error = TornWeights(torn_text(self._step(torn), str(error)))
        self.over = type(error)(str(error))
        if part(self.memories, self.claims, str(error) if torn else ""):
            self.blocks.clear()  # what may hold this would keep another one from sharing these weights
            self._watched.forget()
        else:
            warnings.warn(
                "there is not enough memory for private copies of the weights and state that ShardedOptimizer has "
                "shared: they stay in memory that other ranks may write to",
                stacklevel=2,
            )
