"""Ranks with different amounts of data: the weights of their gradients, and their rounds in a join context."""

import gc
import math
from dataclasses import dataclass

import torch
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.nn.parallel.distributed import _BufferCommHookLocation

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage
from syncengine.parallel.broadcast import broadcast_named
from syncengine.parallel.buffers import Buffers, named_state
from syncengine.parallel.model import Model, Switches
from syncengine.parallel.reducer import ModelReducer
from syncengine.parallel.replication import own_name
from syncengine.parallel.rounds import Intent, Round, notify_torch_join, tell
from syncengine.parallel.sync_batch_norm import check_all_have_batches
from syncengine.parallel.watchers import common


class _Weights:
    """Every rank's weight, exchanged while the forward computes."""

    def __init__(self, communicator: Communicator, own: float) -> None:
        self._all = torch.empty(communicator.size, dtype=torch.float64, device="cpu")
        message = torch.tensor([own], dtype=torch.float64, device="cpu")
        self._work = communicator.all_gather(self._all, message, async_op=True)

    def wait(self) -> list[float]:
        self._work.wait()
        return self._all.tolist()


@dataclass(eq=False)
class UnevenInputs:
    """The state of one model that ranks train with batches of different numbers and sizes."""

    model: Model
    switches: Switches
    reducer: ModelReducer
    buffers: Buffers
    divide_by_initial_world_size: bool = True
    all_raise: bool = False  # in a join context: whether nobody need be told of a SyncError now
    weight: float | _Weights | None = None  # the weight given last, until a forward synchronizes
    _backwards_before: int | None = None  # the last step that all know of; None unless it synchronizes

    def count(self, weight: float, in_join: bool) -> None:
        """Gives this rank's gradients a weight in the next synchronized backward."""
        # In a join context the weight is sent later: as a part of this rank's Intent, in the round of that forward.
        self.weight = weight if in_join else _Weights(self.model.communicator, weight)

    def average_with_weights(self) -> None:
        """Makes the next backward, and only that, average with the weights that are being exchanged for it, if any."""
        if isinstance(self.weight, _Weights):
            weights, self.weight = self.weight, None
            self.average_with(weights.wait())

    def tell_joined(self, joinable: Joinable, synchronize: bool, plans: bool, sends_buffers: bool) -> Round:
        """Announces this forward of ``joinable``, and its backward, to ranks without a batch. Returns the round."""
        communicator = self.model.communicator
        notify_torch_join(joinable, communicator)
        weight = -1.0
        if synchronize and self.weight is not None:
            given, self.weight = self.weight, None  # exchanged where weight() came before the join context
            weight = given if isinstance(given, float) else given.wait()[communicator.rank]
        intent = Intent(1.0, float(synchronize), float(plans), float(sends_buffers), weight)
        current = self.tell(intent, joinable._join_config)
        if joined := {rank for i, rank in enumerate(communicator.global_ranks) if i not in current.training}:
            try:
                check_all_have_batches(self.model.module, joined)
                if self.buffers.due() is _BufferCommHookLocation.POST_FORWARD:
                    raise InvalidUsage(f"{self.model}: POST_FORWARD hooks need join(throw_on_early_termination=True)")
            except InvalidUsage as error:  # ranks that have joined see no forward, so they are told
                communicator.abort(f"{own_name(communicator)}: {error}")
                raise
        self.begin_step(synchronize)
        return current

    def tell(self, intent: Intent, config: _JoinConfig | None = None) -> Round:
        """Exchanges all ranks' intents. All raise what is wrong with them; a rank that leaves by that error says so."""
        communicator = self.model.communicator
        self.all_raise = True
        current = tell(communicator, intent)
        self.begin_step(synchronizes=False)
        if config and config.throw_on_early_termination and 0 < len(current.training) < communicator.size:
            own = f"Rank {communicator.global_ranks[communicator.rank]} exhausted all inputs."
            of_others = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            raise InvalidUsage(of_others if intent.trains else own)
        current.check()
        return current

    def begin_step(self, synchronizes: bool) -> None:
        """Notes that the other ranks may wait for this rank's gradients, if the step ``synchronizes``."""
        self.all_raise = False
        self._backwards_before = self.reducer.statistics()["backwards"] if synchronizes else None

    def is_inside_step(self) -> bool:
        """Whether the other ranks wait, or will wait, for this rank's gradients."""
        return bool(self._backwards_before == self.reducer.statistics()["backwards"])

    def set_average(self, current: Round) -> None:
        """Sets the divisor of the next backward in a join context, and whether ranks without a batch take part."""
        if len(current.training) < self.model.communicator.size:
            self.reducer.expect_shadows()
        if current.weights is not None:
            self.average_with(current.weights)
        elif not self.divide_by_initial_world_size:
            self.reducer.average_over(len(current.training), 1.0)

    def average_with(self, weights: list[float]) -> None:
        """Makes the next backward average with these weights, by rank.

        This rank's gradient gets a factor of at most 1, so nothing overflows that did not before; with a hook, of at
        most the number of ranks. With equal weights the factor is 1, and the divisor the number of ranks, exactly.
        """
        communicator = self.model.communicator
        total, largest = math.fsum(weights), max(weights)
        if not 0.0 < total < math.inf:
            raise InvalidUsage(f"weight() is {total:g} in sum over all ranks: there is no mean with such weights")
        divisor, weight = total / largest, weights[communicator.rank] / largest
        if self.reducer.hooks:  # hooks divide by the number of ranks themselves
            divisor, weight = communicator.size, weight * (communicator.size / divisor)
        self.reducer.average_over(divisor, weight)

    def sync_final_model(self, is_last_joiner: bool) -> None:
        """Gives all ranks the parameters of the last rank to join, and its buffers if they are synchronized."""
        model = self.model
        last = torch.tensor([model.communicator.rank if is_last_joiner else -1], dtype=torch.int64, device="cpu")
        model.communicator.all_reduce(last, "max")  # the last of those that are; else of all
        root = int(last.item()) if last.item() >= 0 else model.communicator.size - 1
        if any(parameter in common for parameter in model.parameters):
            gc.collect()  # as where models are wrapped
        self.buffers.look_up()
        named = named_state(model, self.buffers if self.switches.forward_sync_buffers else None)
        named = [(name, tensor) for name, tensor in named if tensor not in common]  # these are the same
        broadcast_named(model.communicator, "the final models differ", named, model.device, root)
