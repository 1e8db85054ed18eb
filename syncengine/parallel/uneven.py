"""The methods of ``Parallel`` for ranks with different amounts of data: numbers of batches, and sizes of batches."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.join import Join

from syncengine.errors import InvalidUsage
from syncengine.parallel.broadcast import broadcast_named
from syncengine.parallel.join import ParallelJoinHook, UnevenInputs, check_torch_join, common_rank
from syncengine.parallel.logging import Logger
from syncengine.parallel.model import Model
from syncengine.parallel.rounds import Intent, Round, tell
from syncengine.parallel.sync_batch_norm import check_all_have_batches
from syncengine.parallel.watchers import common
from syncengine.parallel.weights import WeightExchange, averaging, check_weight


class UnevenData(Model):
    """To be inherited from."""

    logger: Logger

    _divide_by_initial_world_size = True
    _weight: float | WeightExchange | None = None  # what weight() was given last, until a forward synchronizes
    _join_is_over = False  # by an error that all ranks have raised
    _backwards_before: int | None = None  # the last step that the ranks have told each other of, if it synchronizes

    def weight(self, n: float) -> None:
        """The next synchronized backward counts this rank's gradients ``n`` times: ``sum(n * gradient) / sum(n)``.

        Call it before the forward, on every rank, usually with the number of samples (or tokens) over which this rank's
        loss is a mean; then the average is the gradient of the mean over all samples. It applies to one synchronized
        forward and its backward. A rank with 0 contributes nothing, whatever its gradients are (say, NaN from an empty
        batch). Where several backwards are accumulated under ``no_sync``, ``n`` is for their sum.

        Raises ``InvalidUsage`` unless 0 <= n < inf, and in the forward if all ranks give 0.
        """
        weight = check_weight(n)
        if self._reduces:
            in_join = self._join_config.enable  # then it travels with what the ranks tell each other anyway
            self._weight = weight if in_join else WeightExchange(self.communicator, weight)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> UnevenInputs:
        """A context in which ranks may have different numbers of batches, as in DDP.

        A rank that leaves it takes part in the others' steps until they leave, too: it contributes zeros to their
        averages, which are divided by the number of all ranks, or, without ``divide_by_initial_world_size``, of those
        that have a batch; with ``weight()``, by the weights of those. Then all get the model of the last one. With
        ``throw_on_early_termination`` all raise instead as soon as one has no batch. An error that ends the context on
        one rank ends it on all: the others raise ``Aborted`` with its text. For several models or a
        ``ZeroRedundancyOptimizer`` use ``torch.distributed.algorithms.Join``.
        """
        self._divide_by_initial_world_size = divide_by_initial_world_size
        self.logger._set_uneven_input_join()
        return UnevenInputs(self, enable, throw_on_early_termination)

    def join_hook(self, **kwargs: Any) -> ParallelJoinHook:
        """For torch's ``Join``; takes ``divide_by_initial_world_size``."""
        check_torch_join(self.process_group)
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        self.logger._set_uneven_input_join()
        return ParallelJoinHook(self)

    def _tell_joined(self, synchronize: bool, plans: bool, sends_buffers: bool) -> Round:
        """Tells ranks that have joined what this forward and its backward will do."""
        if notice := Join.notify_join_context(self):  # torch's Join only
            notice.wait()
        weight = -1.0
        if synchronize and self._weight is not None:
            given, self._weight = self._weight, None  # exchanged where weight() came before the join context
            weight = given if isinstance(given, float) else given.wait()[self.communicator.rank]
        intent = Intent(1.0, float(synchronize), float(plans), float(sends_buffers), weight)
        self._join_is_over = True  # what is raised here, all raise
        current = tell(self.communicator, intent)
        if self._join_config.throw_on_early_termination and len(current.training) < self.communicator.size:
            raise InvalidUsage("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        current.check()
        self._check_sync_batch_norm(current)
        self._join_is_over = False
        self._backwards_before = self.reducer.statistics()["backwards"] if synchronize else None
        return current

    def _is_inside_step(self) -> bool:
        """Whether the others wait, or will, for this rank's gradients."""
        return bool(self._backwards_before == self.reducer.statistics()["backwards"])

    def _check_sync_batch_norm(self, current: Round) -> None:
        """Ranks that have joined can't know which of these layers the others' forward will reach."""
        ranks = self.communicator.global_ranks
        joined = {rank for i, rank in enumerate(ranks) if i not in current.training}
        if not joined:
            return
        try:
            check_all_have_batches(self.module, joined)
        except InvalidUsage as error:
            self.communicator.abort(f"rank {ranks[self.communicator.rank]}: {error}")
            raise

    def _take_weights(self) -> WeightExchange | None:
        """The weights that are being exchanged for this forward, if any; it alone has them, whatever comes of it."""
        weights, self._weight = self._weight, None
        return weights if isinstance(weights, WeightExchange) else None

    def _set_average(self, current: Round) -> None:
        """What the next backward in a join context divides by, and whether ranks without a batch are part of it."""
        if len(current.training) < self.communicator.size:
            self.reducer.expect_shadows()
        if current.weights is not None:
            self._average_with(current.weights)
        elif not self._divide_by_initial_world_size:
            self._average_over(len(current.training), 1.0)

    def _average_with(self, weights: list[float]) -> None:
        divisor, weight = averaging(weights, self.communicator.rank)
        if getattr(self, "_comm_hooks", ()):  # hooks divide by the number of ranks themselves
            divisor, weight = self.communicator.size, weight * (self.communicator.size / divisor)
        self._average_over(divisor, weight)

    def _average_over(self, divisor: float, weight: float) -> None:
        self.reducer.average_over(divisor, weight)
        if self._delayed is not None:
            self._delayed.average_over(divisor, weight)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Gives all ranks the parameters, and buffers if they are synchronized, of the last rank to join."""
        self._authoritative_rank = common_rank(self.communicator, is_last_joiner)
        self._assign_modules_buffers()
        named = self._named_state(self.forward_sync_buffers)
        named += () if self._delayed is None else self._delayed.named
        named = [(name, tensor) for name, tensor in named if tensor not in common]  # these are the same
        broadcast_named(self.communicator, "the final models", named, self.device, self._authoritative_rank)
