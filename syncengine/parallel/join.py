"""Uneven inputs: a rank that has run out of batches takes part in what the others do, until nobody has any left."""

from __future__ import annotations

import contextlib
import warnings
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage, SyncError
from syncengine.parallel.model import Model
from syncengine.parallel.rounds import Intent, Round, tell
from syncengine.parallel.watchers import follow_step

_MANY = 1000  # forwards without this rank, after which it warns; as torch


def leave(model: Model, error: Exception) -> None:
    """Tells the others that ``error`` has ended this rank's part, so that they don't wait for it.

    They learn of it in their next all-gather, between two steps; in the middle of a step they wait for gradients,
    so the communicator fails.
    """
    communicator = model.communicator
    rank = communicator.global_ranks[communicator.rank]
    text = f"rank {rank} raised in join() of Parallel({type(model.module).__name__}): {type(error).__name__}: {error}"
    with contextlib.suppress(SyncError):  # the communicator has failed already: they know
        if model._is_inside_step():
            communicator.abort(text)
        else:
            tell(communicator, Intent(trains=0.0, leaves=1.0), text)


def shadow(model: Model, current: Round) -> None:
    """Does on a rank that has joined what the collectives of the others' forward and backward need."""
    current.check()
    if current.steps:
        follow_step(model, current)
        return
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

    def __init__(self, model: Model) -> None:
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

    def __init__(self, model: Model, enable: bool, throw_on_early_termination: bool) -> None:
        self._model = model
        self._throws = throw_on_early_termination
        self._config = _JoinConfig(enable, throw_on_early_termination, is_first_joinable=False)

    def __enter__(self) -> None:
        self._model._join_config = self._config
        self._model._join_is_over = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model._join_config = _JoinConfig.construct_disabled_join_config()
        if not self._config.enable or not self._model._reduces:
            return
        if kind is None:
            self._follow()
        elif isinstance(error, Exception) and not self._model._join_is_over:
            leave(self._model, error)

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
    """Raises ``InvalidUsage`` where torch's ``Join`` can't work: it communicates over its own torch process group."""
    if not isinstance(process_group, dist.ProcessGroup):
        raise InvalidUsage(
            "torch's Join needs a torch process group: pass one as process_group (or None, with torch.distributed "
            "initialized first), or use model.join(), which needs none"
        )


def common_rank(communicator: Communicator, candidate: bool) -> int:
    """The last rank that is a candidate; the last of all if there is none."""
    own = torch.tensor([communicator.rank if candidate else -1], dtype=torch.int64, device="cpu")
    communicator.all_reduce(own, "max")
    last = int(own.item())
    return last if last >= 0 else communicator.size - 1
