"""Uneven inputs: a rank that has run out of batches takes part in the others' steps, until nobody has a batch left."""

import contextlib
from types import TracebackType

from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig

from syncengine.errors import SyncError, error_text
from syncengine.parallel.replication import own_name
from syncengine.parallel.rounds import Intent, tell
from syncengine.parallel.steps import Steps
from syncengine.parallel.watchers import forward_watchers


class ParallelJoinHook(JoinHook):
    """The hook that torch's ``Join`` calls on a rank that has joined."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def main_hook(self) -> None:
        """Takes part in the next forward and backward of the ranks that still have batches."""
        self._steps.shadow(self._steps.uneven.tell(Intent(trains=0.0)))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all ranks the model of the last rank to join."""
        if self._steps.reducer.reduces:
            self._steps.uneven.sync_final_model(is_last_joiner)


class JoinContext:
    """The context of ``Parallel.join``: torch's ``Join`` for one model, over the model's own communicator."""

    def __init__(self, joinable: Joinable, steps: Steps, enable: bool, throw_on_early_termination: bool) -> None:
        self._joinable = joinable
        self._steps = steps
        self._config = _JoinConfig(enable, throw_on_early_termination, is_first_joinable=False)

    def __enter__(self) -> None:
        if self._config.enable:
            for watcher in forward_watchers:  # as the first forward does, to share weights: a rank may have none
                watcher(self._joinable)
        self._joinable._join_config = self._config
        self._steps.uneven.begin_step(synchronizes=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._joinable._join_config = _JoinConfig.construct_disabled_join_config()
        if not self._config.enable or not self._steps.reducer.reduces:
            return
        if kind is None:
            try:
                self._follow()
            except Exception as own:
                self._leave(own)
                raise
        elif isinstance(error, Exception):
            self._leave(error)

    def _leave(self, error: Exception) -> None:
        """Tells the others that ``error`` has ended this rank's part, unless they know."""
        all_raise = self._steps.uneven.all_raise
        communicator = self._steps.model.communicator
        text = f"{own_name(communicator)} raised in join() of {self._steps.model}: {error_text(error)}"
        with contextlib.suppress(SyncError):  # the communicator has failed already: they know
            if not all_raise and not self._steps.uneven.is_inside_step():
                tell(communicator, Intent(trains=0.0, leaves=1.0), text)  # in their next all-gather
            elif not all_raise or not isinstance(error, SyncError):  # they wait for gradients, or for this rank's part
                communicator.abort(text)

    def _follow(self) -> None:
        """Takes part in the other ranks' steps until they have run out of batches, too."""
        is_last = True
        while (current := self._steps.uneven.tell(Intent(trains=0.0), self._config)).training:
            self._steps.shadow(current)
            is_last = False
        self._steps.uneven.all_raise = True  # but an error that is no SyncError is this rank's own
        self._steps.uneven.sync_final_model(is_last)
