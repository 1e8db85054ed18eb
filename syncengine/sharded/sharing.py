"""The blocks of parameters that an optimizer shares with the same optimizer of the other ranks, and their updates."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from syncengine._C import CommonMemory
from syncengine.errors import InvalidUsage, SyncError, TornWeights, to_utf8
from syncengine.parallel import Parallel
from syncengine.parallel.groups import Group
from syncengine.sharded.agreement import agree, only_makes_state
from syncengine.sharded.block import Block, part
from syncengine.sharded.claims import Claim, any_torn, check_not_torn, guard
from syncengine.sharded.kinds import other_ranks
from syncengine.sharded.memory import Host
from syncengine.sharded.movable import why_not_shared
from syncengine.sharded.shard import Groups, Member, Shard, members_of
from syncengine.sharded.state import State, digest
from syncengine.sharded.update import SAME, Update, torn_text
from syncengine.sharded.weights import Named

_parameters = itemgetter("params")


class ParameterRegistry:
    """Tells parameters in shared memory from all others. Looks anew when parameter groups have changed."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self.names: Any = WeakIdKeyDictionary()  # names of the parameters of the models that it updates
        self._sizes: list[int] | None = None  # lengths of the groups at the last look; None: look again
        self._parameters: list[torch.Tensor] = []
        self._unshared: list[Member] = []  # stays the same object while its members do
        self.strays: list[torch.Tensor] = []  # shared, but in another group than when they were shared

    def look_again(self) -> None:
        """Makes ``unshared`` look anew, as there are more blocks."""
        self._sizes = None

    def unshared(self, groups: Groups) -> list[Member]:
        """The parameters that are not in shared memory: the same list object as long as these stay the same."""
        lists = list(map(_parameters, groups))
        sizes, parameters = list(map(len, lists)), list(chain.from_iterable(lists))
        if self._sizes == sizes and all(map(is_, parameters, self._parameters)):
            return self._unshared
        self._sizes, self._parameters = sizes, parameters
        members = members_of(groups)
        shared = [member for block in self._blocks for member in block.shard.members]
        ids = {id(parameter) for parameter, _ in shared}
        self._unshared = [member for member in members if id(member.parameter) not in ids]
        groups_of = {id(parameter): group for parameter, group in members}
        self.strays = [parameter for parameter, group in shared if groups_of.get(id(parameter)) != group]
        return self._unshared

    def late(self, groups: Groups) -> list[Member]:
        """The unshared parameters that have a gradient now: they were frozen before."""
        found = []
        for member in self.unshared(groups):
            if member.parameter.grad is not None and member.parameter in self.names:
                found.append(member)
        return found


class Sharing:
    """Blocks of weights in shared memory. ``groups`` and ``state``, in its methods, are the optimizer's own.

    ``make_shard`` is ``Shard``, for the class of optimizers that the user has chosen; ``coupling`` says why options of
    groups are not allowed; ``cuts`` and ``group`` are the arguments ``elements`` and ``process_group``.
    """

    def __init__(
        self,
        make_shard: Callable[..., Shard],
        coupling: Callable[[Groups], str],
        cuts: bool,
        group: Group | None,
    ) -> None:
        self._make_shard, self._coupling, self._cuts, self._group = make_shard, coupling, cuts, group
        self.host: Host | None = None  # the host of the first model's communicator, which ranks use for all sharing
        self.blocks: list[Block] = []
        # The models whose parameters the optimizer updates, in the order of their binding, the same on all ranks.
        self.models: list[weakref.ref[Parallel]] = []
        self.known: weakref.WeakSet[Parallel] = weakref.WeakSet()  # models that it has looked at
        self.registry = ParameterRegistry(self.blocks)
        self.over: SyncError | None = None  # why there can't be another update
        self.memories: list[CommonMemory] = []  # memories of all blocks
        self.claims: list[Claim] = []  # claims of all blocks
        self.steps = 0  # updates that were made for the user

    # --- Shared parameters

    def bind(self, model: Parallel, groups: Groups, state: State, in_step: bool = False) -> bool:
        """Binds ``model``: moves its trained parameters in ``groups`` to shared memory. Returns whether it is bound.

        All ranks call it for a model that has parameters of ``groups``. ``in_step``: a step that only makes state moves
        nothing, since each rank makes that state for itself.
        """
        names = model._model.by_id
        has_some = any(id(parameter) in names for group in groups for parameter in group["params"])
        if has_some and any_torn():
            check_not_torn(model.module.parameters())
        is_ours, is_alone = has_some, model.communicator.size == 1
        if is_ours and self.host is not None and self.host.communicator is not model.communicator:
            if model.communicator.exception() is None:
                raise InvalidUsage(
                    "the models of one ShardedOptimizer need one process group: wrap them with the same "
                    "process_group=, or make an optimizer for each"
                )
            is_ours = False  # one from before a failure
        if is_ours and not is_alone and in_step and not self.blocks and only_makes_state(model.communicator, groups):
            return False
        if is_ours and not any(known() is model for known in self.models):
            self.models.append(weakref.ref(model))
        if is_ours and not is_alone:
            self.registry.names.update(zip(model._model.parameters, model._model.names, strict=True))
            self.host = self.host or Host(model.communicator)
            mine = [member for member in self.registry.unshared(groups) if id(member.parameter) in names]
            self.share([member for member in mine if member.parameter.requires_grad], groups, state)
            guard(model)  # including parameters that another optimizer shares
        self.known.add(model)  # after an error, which somebody may catch, the next forward asks again
        return is_ours

    def share(self, members: Sequence[Member], groups: Groups, state: State) -> None:
        """Moves the parameters of ``members`` into shared memory. All ranks call it, unless ``members`` is empty."""
        if not members or self.host is None:
            return
        named = [Named(self.registry.names[member.parameter], member.parameter) for member in members]
        lines = [
            f"{name}: {str(p.dtype).removeprefix('torch.')} {tuple(p.shape)}, group {group}, "
            + (f"state with CRC-32 {digest(entries):08x}" if (entries := state.get(p)) else "no state")  # {}: was read
            for (name, p), (_, group) in zip(named, members, strict=True)
        ]
        communicator = self.host.communicator
        what = "what ShardedOptimizer is to share differs"
        modules = [model.module for known in self.models if (model := known()) is not None]
        problem = other_ranks(self._group, communicator) or why_not_shared(named, modules) or self.look(state)
        agree(communicator, what, to_utf8("\n".join(lines)), lambda: lines, problem, lambda: SAME)
        block = Block(self.host, self._make_shard, self._cuts, groups, members, named, state, self.memories)
        self.blocks.append(block)
        self.registry.look_again()
        self.claims += block.claims
        block.state.share()  # that was loaded, or that the class makes at once
        for module in modules:
            guard(module)

    # --- An update

    def update(self, groups: Groups, state: State) -> None:
        """Makes one step of the optimizer, on all ranks or on none. All ranks call it."""
        if not self.blocks or self.host is None:
            return
        update = Update(self.host, self.blocks, self.steps + 1, groups)
        try:
            update.make(self._problem(groups) or self.look(state))
        except BaseException as error:
            failure = self.host.communicator.exception()
            if isinstance(failure, SyncError):
                is_complete = update.is_complete()
                if is_complete:
                    self._complete(update)
                self.end(error if isinstance(error, SyncError) else failure)
                if is_complete and isinstance(error, SyncError):
                    return  # the failure came after the update: the next call raises it
            raise
        self._complete(update)

    def _complete(self, update: Update) -> None:
        self.steps += 1
        for block, written in zip(self.blocks, update.written, strict=True):
            block.weights.note_update(written)
            block.state.note_update()

    def look(self, state: State) -> str:
        """Follows the user's changes of the optimizer's state. Returns a text if one is not allowed, or ""."""
        problem = ""
        for block in self.blocks:
            problem = block.state.look(state) or problem
        return problem

    # --- Writes of this rank outside of updates

    def written(self) -> str:
        """A text that names a parameter to which this rank has written outside of an update; or an empty text."""
        for block in self.blocks:
            if text := block.weights.written_by_this_rank():
                return text
        return ""

    def _problem(self, groups: Groups) -> str:
        """Why this rank can't make an update; or an empty text."""
        if self.registry.strays:
            name = self.registry.names[self.registry.strays[0]]
            return (
                f"parameter {name} is not in the group any more in which it was shared: to change groups, release() "
                "this ShardedOptimizer and make another one"
            )
        return self.written() or self._coupling(groups) or self._why_not_averages()

    def _why_not_averages(self) -> str:
        """A text that says why gradients of one of the models are not averages; or an empty text."""
        for known in self.models:
            if (model := known()) is None or not model.reducer.reduces:
                continue
            reason = model.reducer.not_averaged()
            if reason and any(parameter.grad is not None for parameter in model._module_parameters):
                return f"the gradients of {type(model.module).__name__} are not averages: {reason}"
        return ""

    # --- The end of sharing

    def is_over(self, raises: type[SyncError] | None = None) -> bool:
        """Whether an error has ended the sharing. Raises it if it is of class ``raises``."""
        if self.over is None and self.host is not None:
            error = self.host.communicator.exception()
            if isinstance(error, SyncError):
                self.end(error)
        if raises is not None and isinstance(self.over, raises):
            raise type(self.over)(str(self.over))  # a copy: a raised one holds its callers, and they hold this
        return self.over is not None

    def end(self, error: SyncError) -> None:
        """Ends all updates. This rank keeps weights and state as they are, for itself."""
        torn = self.blocks[0].weights.memory.torn if self.blocks else 0
        torn = torn if torn > self.steps else 0  # otherwise another rank may not know that the update is complete
        if torn and not isinstance(error, TornWeights):
            error = TornWeights(torn_text(torn, str(error)))
        parted = part(self.memories, self.claims, str(error) if torn else "")
        self.over = type(error)(str(error))  # behind what may be interrupted, and is then done again
        if parted:
            self.blocks.clear()  # what may hold this would keep another one from sharing these weights
        else:
            warnings.warn(
                "there is not enough memory for private copies of the weights and state that ShardedOptimizer has "
                "shared: they stay in memory that other ranks may write to",
                stacklevel=2,
            )
