"""Uneven inputs: a rank that has run out of batches takes part in what the others do, until nobody has any left.

Before each forward inside a join context all ranks tell each other in one small all-gather what they are going to do,
so that those who have joined can match the others' collectives: a new bucket plan, buffers, gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage, Mismatch

_MANY = 1000  # forwards without this rank, after which it warns; as torch


class Intent(NamedTuple):
    """What one rank does next. All numbers, for the all-gather."""

    trains: float  # has a batch: 1 or 0, as the next three
    synchronizes: float = 0.0
    plans: float = 0.0  # wants a new bucket plan
    sends_buffers: float = 0.0
    weight: float = -1.0  # of its gradients; none if negative


class Round(NamedTuple):
    """What all ranks do next."""

    intents: Sequence[Intent]
    members: Sequence[int]  # what messages call the ranks

    @property
    def training(self) -> list[int]:
        """The ranks that have a batch."""
        return [rank for rank, intent in enumerate(self.intents) if intent.trains]

    @property
    def synchronizes(self) -> bool:
        """Whether backward averages."""
        return any(intent.synchronizes for intent in self.intents)

    @property
    def plans(self) -> bool:
        """Whether there is a new bucket plan first."""
        return any(intent.plans for intent in self.intents)

    @property
    def buffers_from(self) -> int | None:
        """The rank whose buffers all get: as in DDP, the last that has a batch."""
        return self.training[-1] if any(intent.sends_buffers for intent in self.intents) else None

    @property
    def weights(self) -> list[float] | None:
        """Of each rank; zero of those that have no batch. None if nobody gave any."""
        weights = [intent.weight if intent.trains else 0.0 for intent in self.intents]
        return None if min(weights) < 0 else weights

    def check(self) -> None:
        """Raises ``Mismatch`` if those that have a batch do not do the same."""
        first, *others = self.training
        for rank in others:
            for field, does, does_not in (
                ("synchronizes", "synchronizes its gradients", "does not (no_sync?)"),
                ("sends_buffers", "synchronizes its buffers", "does not (forward_sync_buffers?)"),
                ("weight", "called weight()", "did not"),
            ):
                here, there = (float(getattr(self.intents[r], field)) for r in (rank, first))
                if field == "weight":
                    here, there = float(here >= 0), float(there >= 0)
                if here != there:
                    one, other = (rank, first) if here else (first, rank)
                    raise Mismatch(
                        f"in join(), rank {self.members[one]} {does}, but rank {self.members[other]} {does_not}: do "
                        "the same on every rank that has a batch"
                    )


def tell(communicator: Communicator, intent: Intent) -> Round:
    """Collective: what all ranks do next, this one ``intent``."""
    own = torch.tensor(intent, dtype=torch.float64)
    everyone = torch.empty(communicator.size * own.numel(), dtype=torch.float64)
    communicator.all_gather(everyone, own)
    intents = [Intent(*row) for row in everyone.view(communicator.size, -1).tolist()]
    return Round(intents, communicator.global_ranks)


def shadow(model: DistributedDataParallel, current: Round) -> None:
    """Does on a rank that has joined what the collectives of the others' forward and backward need."""
    current.check()
    if current.plans:
        model._plan_buckets(current)
    if current.buffers_from is not None:
        model._sync_buffers(current.buffers_from)
    model.require_forward_param_sync = current.synchronizes
    if current.synchronizes:
        model._set_average(current)
        model.reducer.shadow_backward()
        if model._delayed is not None:
            model._delayed.shadow()


class ParallelJoinHook(JoinHook):
    """What torch's ``Join`` calls on a rank that has joined."""

    def __init__(self, model: DistributedDataParallel) -> None:
        model.logger._set_uneven_input_join()
        self._model = model

    def main_hook(self) -> None:
        """Follows the others through one forward and backward."""
        shadow(self._model, tell(self._model.communicator, Intent(trains=0.0)))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all ranks the same model."""
        if self._model._reduces:
            self._model._sync_final_model(is_last_joiner)


class UnevenInputs:
    """The context of ``Parallel.join``: torch's ``Join`` for one model, over the model's own communicator."""

    def __init__(self, model: DistributedDataParallel, enable: bool, throw_on_early_termination: bool) -> None:
        model.logger._set_uneven_input_join()
        self._model = model
        self._throws = throw_on_early_termination
        self._config = _JoinConfig(enable, throw_on_early_termination, is_first_joinable=False)

    def __enter__(self) -> None:
        self._model._join_config = self._config

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model._join_config = _JoinConfig.construct_disabled_join_config()
        if self._config.enable and kind is None and self._model._reduces:
            self._follow()

    def _follow(self) -> None:
        """Follows the others until they have joined, too."""
        communicator = self._model.communicator
        own = communicator.global_ranks[communicator.rank]
        followed = 0
        while True:
            current = tell(communicator, Intent(trains=0.0))
            if not current.training:
                break
            if self._throws:
                raise InvalidUsage(f"Rank {own} exhausted all inputs.")
            if followed == _MANY:
                warnings.warn(
                    f"Detected uneven input skew of greater than {_MANY}. This means that rank {own} has at least "
                    f"{_MANY} fewer inputs than other currently-active ranks. This level of skew could lead to "
                    "performance degradation during training.",
                    stacklevel=3,
                )
            shadow(self._model, current)
            followed += 1
        self._model._sync_final_model(followed == 0)


def check_torch_join(process_group: Any) -> None:
    """Raises ``InvalidUsage`` where torch's ``Join`` can't work: it talks over a torch process group of its own."""
    if not isinstance(process_group, dist.ProcessGroup):
        raise InvalidUsage(
            "torch's Join needs a torch process group: pass one as process_group (or None, with torch.distributed "
            "initialized first), or use model.join(), which needs none"
        )


def common_rank(communicator: Communicator, candidate: bool) -> int:
    """The last rank that is a candidate; the last of all if there is none."""
    own = torch.tensor([communicator.rank if candidate else -1])
    communicator.all_reduce(own, "max")
    return own.item() if own.item() >= 0 else communicator.size - 1
