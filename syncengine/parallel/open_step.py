"""The step of ``micro_batches()`` that is open: from its first micro-batch to its end, or until it is dropped.

A process has one at most, since a step seeds the process' random numbers. This module holds the open step, even if
nothing iterates any more, and only calls change it: it does not matter when Python's collector frees an object.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from syncengine._C import Communicator, TreeSums
from syncengine.errors import InvalidUsage
from syncengine.parallel.kept_buffers import KeptBuffers
from syncengine.parallel.replication import fail_all, own_name

_MOST_BYTES = 16 << 20  # of all buffers, of which copies are kept

_LEFT = (
    "If the step was left before its end, by an error, break, zip() or islice(): iterate to the end, or begin it again "
    "by another loop over micro_batches(), or drop it by drop()"
)


def refuse(communicator: Communicator, text: str) -> NoReturn:
    """Raises ``InvalidUsage`` on all ranks, unless the communicator has failed before: then raises its error."""
    if communicator.exception() is None and communicator.size > 1:
        fail_all(communicator, InvalidUsage(text), f"{own_name(communicator)}: {text}")
    raise communicator.exception() or InvalidUsage(text)


class Step:
    """A step of one ``Parallel``, which yields this rank's micro-batches to the thread that iterates."""

    now: ClassVar[Step | None] = None  # the one that is open

    def __init__(self, batches: Any) -> None:
        self._batches, self.model = batches, batches._model
        self._begun, self._is_over = 0, False  # micro-batches

    def __iter__(self) -> Step:
        return self

    def __next__(self) -> tuple[int, Any]:
        """Returns the next micro-batch. After the last one, the step ends."""
        if self._is_over:
            raise StopIteration
        if not self._begun:
            self._open()
        elif Step.now is not self:
            self.refuse("this step of micro_batches() was dropped when it was left: go on with one begun later")
        else:
            self._finish()
        if self._begun == len(self._own):
            self._end()
            raise StopIteration
        return self._begin(self._own[self._begun])

    def _open(self) -> None:
        """Opens the step, and drops another one that was left. All ranks call it."""
        drop_open_step()
        _follow_optimizers()
        model = self.model
        self.number, self._own, self._merges = self._batches._deal()
        self._communicator, self._reducer = model.communicator, model.reducer
        self._trained = self._find_trained()
        self._sums = TreeSums(model._module_parameters)
        self._reducer.drop_step()  # of a forward before whose backward has not come
        if self._reducer.reduces:  # ranks may have unlike numbers of forwards, but the step has one beginning
            model._buffer_sync.begin_step()
        self._buffers = KeptBuffers(model.module, self._batches._kept, model.parameters_to_ignore, _MOST_BYTES)
        self._batches._kept = self._buffers
        Step.now = self

    def _begin(self, micro_batch: int) -> tuple[int, Any]:
        """Fetches a micro-batch. Backward of this rank's last one also brings the sums for which other ranks wait."""
        if self._begun:
            self._buffers.put_back()
        self._begun += 1
        self._micro_batch = micro_batch
        self._completes = self._begun == len(self._own) and self._reducer.reduces
        self._versions = [p._version for p in self._trained]
        self._backwards = self._reducer.backwards()
        self.model._switches.accumulates = not self._completes
        if self._completes:
            self._reducer.complete_step(self._sums, self._batches._total, self.number)
        return micro_batch, self._batches._fetch(self.number, micro_batch)

    def _finish(self) -> None:
        """Adds a micro-batch's gradients to the sums; refuses one that has brought none, or changed parameters, say."""
        brought = self._reducer.end_step() if self._completes else self._sums.take(self._merges[self._begun - 1])
        which = f"micro-batch {self._micro_batch}"
        if self._versions != [p._version for p in self._trained]:
            self.refuse(f"the parameters have changed within {which}: step after the whole loop")
        if [*map(id, self._trained)] != [*map(id, self._find_trained())]:
            self.refuse(f"parameters were frozen or unfrozen in {which}: do so between steps")
        if written := self._buffers.written():
            self.refuse(
                f"buffer {written} was written in {which}, and can't be put back for the next: it has no dense "
                "elements of its own, or all buffers have over 16 MiB. Write to it between steps, or put another in "
                "its place"
            )
        if not brought:
            self.refuse(
                f"{which} has brought no gradient: call backward() once in each, before the next one is asked for, and "
                "zero_grad() after the step"
            )

    def _end(self) -> None:
        """Ends the step when all micro-batches are finished: averages are in ``.grad``."""
        if not self._reducer.reduces:
            self._sums.deliver(self._batches._total)
        if self._communicator.size > 1:
            self._buffers.share(self._communicator, self.model._buffer_sync)
        self.model._switches.accumulates = False
        self._batches._go_on(self.number + 1)  # and no signal's handler runs until it is closed
        self._is_over, Step.now = True, None

    def drop(self) -> None:
        """Drops the step, which has not happened then. Does not communicate."""
        Step.now = None
        self._reducer.drop_step()
        switches = self.model._switches
        switches.accumulates, switches.require_forward_param_sync = False, True
        for parameter in self._trained:
            parameter.grad = None
        self._buffers.put_back()
        self._batches._stop_fetching()

    def refuse(self, text: str) -> NoReturn:
        """Raises InvalidUsage with ``text`` on all ranks of the model."""
        refuse(self._communicator, text)

    def before_forward(self, model: Any) -> None:
        """Refuses a forward that trains another model, is under no_sync(), or follows the micro-batch's backward."""
        recomputes = torch._C._current_graph_task_id() >= 0
        if recomputes or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        if model is not self.model:
            if any(p.requires_grad for p in model._module_parameters):
                self.refuse(
                    f"a forward of {model._model} within a step of micro_batches() of {self.model._model}: it trains "
                    "one model at a time. Put both into one module and wrap that, or train the other one between "
                    f"steps. {_LEFT}"
                )
            return
        if not model.require_backward_grad_sync:
            self.refuse("the micro-batches of micro_batches() are not to be under no_sync(), which it stands for")
        if self._backwards != self._reducer.backwards() or any(p.grad is not None for p in self._trained):
            self.refuse(
                f"a forward of {model._model} behind the backward of micro-batch {self._micro_batch}: call backward() "
                f"once in each, of the sum of losses, and what only looks under torch.no_grad(). {_LEFT}"
            )

    def _find_trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model._module_parameters if p.requires_grad]


def drop_open_step(of: Any = None) -> None:
    """Drops the open step, if there is one; with ``of``, only a step of that model. A dropped step has not happened."""
    if Step.now is not None and (of is None or of is Step.now.model):
        Step.now.drop()


@cache
def _follow_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_no_step)
    register_optimizer_step_post_hook(_check_no_step)  # a closure may have left one


def _check_no_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if (step := Step.now) is None:
        return
    own = {id(parameter) for parameter in step.model._module_parameters}
    if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        step.refuse(
            f"{type(optimizer).__name__}.step() within a step of micro_batches(): step after the whole loop. {_LEFT}"
        )
