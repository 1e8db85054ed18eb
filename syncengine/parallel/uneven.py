"""Ranks with different amounts of data: what their gradients count, and what they tell each other in a join context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.algorithms.join import Joinable

from syncengine._C import Communicator, Reducer
from syncengine.errors import InvalidUsage
from syncengine.parallel.broadcast import broadcast_named
from syncengine.parallel.buffers import Buffers, named_state
from syncengine.parallel.comm_hooks import CommHooks
from syncengine.parallel.model import Model, Switches
from syncengine.parallel.replication import own_name
from syncengine.parallel.rounds import Intent, Round, notify_torch_join, tell
from syncengine.parallel.sync_batch_norm import check_all_have_batches
from syncengine.parallel.watchers import common
from syncengine.parallel.weights import WeightExchange, averaging


@dataclass(eq=False)
class UnevenInputs:
    """Batches of different numbers and sizes, of one model."""

    model: Model
    switches: Switches
    reducer: Reducer
    buffers: Buffers
    hooks: CommHooks
    divide_by_initial_world_size: bool = True
    join_is_over: bool = False  # by an error that all ranks have raised
    weight: float | WeightExchange | None = None  # that was given last, until a forward synchronizes
    _backwards_before: int | None = None  # the last step that all know of, if it synchronizes

    def count(self, weight: float, in_join: bool) -> None:
        """The next synchronized backward counts this rank's gradients so many times."""
        # In a join context it travels with what the ranks tell each other anyway.
        self.weight = weight if in_join else WeightExchange(self.model.communicator, weight)

    def leave_join(self) -> None:
        """What was given for a forward in a join context that is over now was told to nobody."""
        if isinstance(self.weight, float):
            self.weight = None

    def average_with_weights(self) -> None:
        """The next backward gives the mean with the weights that are being exchanged for it, if any; it alone does."""
        if isinstance(self.weight, WeightExchange):
            weights, self.weight = self.weight, None
            self.average_with(weights.wait())

    def tell_joined(self, joinable: Joinable, synchronize: bool, plans: bool, sends_buffers: bool) -> Round:
        """Tells ranks that have joined what this forward of ``joinable`` and its backward will do."""
        communicator = self.model.communicator
        notify_torch_join(joinable, communicator)
        weight = -1.0
        if synchronize and self.weight is not None:
            given, self.weight = self.weight, None  # exchanged where weight() came before the join context
            weight = given if isinstance(given, float) else given.wait()[communicator.rank]
        intent = Intent(1.0, float(synchronize), float(plans), float(sends_buffers), weight)
        self.join_is_over = True  # what is raised here, all raise
        current = tell(communicator, intent)
        if joinable._join_config.throw_on_early_termination and len(current.training) < communicator.size:
            raise InvalidUsage("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        current.check()
        self._check_sync_batch_norm(current)
        self.join_is_over = False
        self._backwards_before = self.reducer.statistics()["backwards"] if synchronize else None
        return current

    def is_inside_step(self) -> bool:
        """Whether the others wait, or will, for this rank's gradients."""
        return bool(self._backwards_before == self.reducer.statistics()["backwards"])

    def _check_sync_batch_norm(self, current: Round) -> None:
        """Ranks that have joined can't know which of these layers the others' forward will reach."""
        communicator = self.model.communicator
        joined = {rank for i, rank in enumerate(communicator.global_ranks) if i not in current.training}
        if not joined:
            return
        try:
            check_all_have_batches(self.model.module, joined)
        except InvalidUsage as error:
            communicator.abort(f"{own_name(communicator)}: {error}")
            raise

    def set_average(self, current: Round) -> None:
        """What the next backward in a join context divides by, and whether ranks without a batch are part of it."""
        if len(current.training) < self.model.communicator.size:
            self.reducer.expect_shadows()
        if current.weights is not None:
            self.average_with(current.weights)
        elif not self.divide_by_initial_world_size:
            self.reducer.average_over(len(current.training), 1.0)

    def average_with(self, weights: list[float]) -> None:
        """The next backward gives the mean with these weights, by rank."""
        communicator = self.model.communicator
        divisor, weight = averaging(weights, communicator.rank)
        if self.hooks.installed:  # hooks divide by the number of ranks themselves
            divisor, weight = communicator.size, weight * (communicator.size / divisor)
        self.reducer.average_over(divisor, weight)

    def sync_final_model(self, is_last_joiner: bool) -> None:
        """Gives all ranks the parameters, and buffers if they are synchronized, of the last rank to join."""
        model = self.model
        root = common_rank(model.communicator, is_last_joiner)
        self.buffers.look_up()
        named = named_state(model, self.buffers if self.switches.forward_sync_buffers else None)
        named = [(name, tensor) for name, tensor in named if tensor not in common]  # these are the same
        broadcast_named(model.communicator, "the final models differ", named, model.device, root)


def common_rank(communicator: Communicator, candidate: bool) -> int:
    """The last rank that is a candidate; the last of all if there is none."""
    own = torch.tensor([communicator.rank if candidate else -1], dtype=torch.int64, device="cpu")
    communicator.all_reduce(own, "max")
    last = int(own.item())
    return last if last >= 0 else communicator.size - 1
