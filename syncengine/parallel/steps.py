"""The steps of a model that several ranks train: the work around each forward, with a batch and without."""

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import _BufferCommHookLocation, _find_tensors
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import _StopRecomputationError
from torch.utils.hooks import RemovableHandle

from syncengine._C import NodeNumber, Reducer
from syncengine.errors import InvalidUsage, SyncError, error_text
from syncengine.parallel.audit import Audit
from syncengine.parallel.buffers import Buffers
from syncengine.parallel.model import Model, Switches, looks_for_unused
from syncengine.parallel.newcomers import Newcomers
from syncengine.parallel.outputs import through_sink
from syncengine.parallel.planning import Planning
from syncengine.parallel.reducer import ModelReducer
from syncengine.parallel.replication import own_name
from syncengine.parallel.rounds import Round
from syncengine.parallel.uneven import UnevenInputs
from syncengine.parallel.watchers import follow_step

PRE_FORWARD, POST_FORWARD = _BufferCommHookLocation.PRE_FORWARD, _BufferCommHookLocation.POST_FORWARD


@dataclass(frozen=True, eq=False)
class Steps:
    """Prepares the reducer for each backward, and exchanges bucket plans, buffers and weights with the other ranks."""

    model: Model
    switches: Switches
    reducer: ModelReducer
    planning: Planning
    buffers: Buffers
    uneven: UnevenInputs
    newcomers: Newcomers
    audit: Audit
    log: Any  # model.logger

    def forward(self, call: Callable[[], Any], joinable: Joinable) -> Any:
        """Runs a forward of the wrapper ``joinable`` by ``call``. Returns its output, whose backward may average."""
        reducer, switches, uneven = self.reducer, self.switches, self.uneven
        if _undecided.hook is not None:
            _undecided.decide(self.model.module)
        is_recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()  # whatever enable_grad() says
        synchronize = is_recorded and switches.synchronizes
        sync_buffers = self.buffers.due()
        try:
            if synchronize:
                self.log.note_forward()
                self.newcomers.look(joinable)
            plans = is_recorded and (reducer.begin_forward(synchronize) or self.planning.plan is None) and synchronize
            if joinable._join_config.enable or plans or sync_buffers is PRE_FORWARD or uneven.weight is not None:
                self._meet(joinable, synchronize, plans, sync_buffers is PRE_FORWARD)
            if synchronize and self.audit.every and not joinable._join_config.enable:
                self.audit.look()
        except Exception as error:
            self.log.set_error_and_log(error_text(error))
            _undecided.note(self)
            raise
        # As in DDP, buffers are not synchronized in the forward that follows one that does not synchronize.
        switches.require_forward_param_sync = synchronize
        began = NodeNumber()
        try:
            output = call()
        except _StopRecomputationError:  # how checkpointing ends a forward early, in backward
            raise
        except BaseException as error:
            self._give_up(error, synchronize, sync_buffers is POST_FORWARD)
            raise
        if sync_buffers is POST_FORWARD:
            if synchronize:
                weight, uneven.weight = uneven.weight, None  # dropped with this forward if a rank refuses
                reducer.vote_on_forward()
                uneven.weight = weight
            self.buffers.synchronize()
        if synchronize and not switches.require_backward_grad_sync:
            # The module has switched synchronization off, as Lightning's manual optimization does.
            switches.require_forward_param_sync = synchronize = False
            reducer.begin_forward(False)
        if not is_recorded:
            return output
        tensors = list(_find_tensors(output))
        if not synchronize:
            reducer.prepare_for_local_backward(tensors, began)
            return output
        # After a forward in a join context no plan is made, since ranks without a batch would not know of it.
        if reducer.follow_parameters() and not joinable._join_config.enable:
            self.planning.renew()
        if uneven.weight is not None:
            uneven.average_with_weights()
        if other_leaves := Reducer.prepare_for_backward(reducer, tensors, began):
            self._check_not_replaced(other_leaves)
        return through_sink(output, switches.sink_clone) if looks_for_unused(self.planning.options) else output

    def _meet(self, joinable: Joinable, synchronize: bool, plans: bool, sends_buffers: bool) -> None:
        """Exchanges with other ranks before this forward: the round of a join context, buffers, a new plan."""
        if plans and self.model.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidUsage(
                f"{self.model}: its buckets are not final yet, and can't change while a CUDA graph is captured: run 3 "
                "steps that synchronize before, and do not freeze or unfreeze parameters in between"
            )
        current = None
        if joinable._join_config.enable:
            current = self.uneven.tell_joined(joinable, synchronize, plans, sends_buffers)
        elif synchronize and isinstance(self.uneven.weight, float):
            self.uneven.weight = None  # given for a forward in a join context that is over: no rank was told of it
        if sends_buffers:  # first, as another rank may have sent them in a forward before, without a plan (no_sync)
            self.buffers.synchronize((current.buffers_from if current else None) or 0)
        if plans:
            self.planning.renew(current)
        if current is not None and synchronize:
            self.uneven.set_average(current)

    def _give_up(self, error: BaseException, synchronize: bool, sync_buffers_after: bool) -> None:
        if not synchronize and not sync_buffers_after:
            return
        if synchronize:
            if self.model.device.type == "cuda" and not sync_buffers_after:  # buckets that stand in have this divisor
                with contextlib.suppress(SyncError):
                    self.uneven.average_with_weights()
            self.uneven.weight = None  # it was for this forward
        text = f"raised in forward: {error_text(error)}"
        if sync_buffers_after and not (synchronize and self.reducer.can_refuse()):  # the others wait for them
            communicator = self.model.communicator
            communicator.abort(f"{own_name(communicator)} {text}")
        else:
            self.reducer.refuse_forward(text, sync_buffers_after)
            _undecided.note(self)

    def _check_not_replaced(self, leaves: list[torch.Tensor]) -> None:
        """Raises ``InvalidUsage`` if one of ``leaves`` has replaced a parameter; the other ranks raise ``Aborted``."""
        if not any(isinstance(leaf, torch.nn.Parameter) for leaf in leaves):
            return
        current = dict(self.model.module.named_parameters(remove_duplicate=False))
        for name in self.model.names:
            if any(leaf is current.get(name) for leaf in leaves):
                text = (
                    f"parameter {name} of {self.model} was replaced after wrapping, so it would not be synchronized. "
                    "Wrap the module again, or write new values into the old one with copy_(); for functional_call "
                    "take tensors that are no nn.Parameter"
                )
                self.reducer.refuse_forward(text)
                _undecided.note(self)
                raise InvalidUsage(f"{own_name(self.model.communicator)}: {text}")

    def shadow(self, current: Round) -> None:
        """Takes part, on a rank that has no batch any more, in the collectives of the others' forward and backward."""
        self.uneven.begin_step(current.synchronizes)
        if current.steps:
            follow_step(self.model, current)
            return
        if current.buffers_from is not None:
            self.buffers.synchronize(current.buffers_from)
        if current.plans:
            self.planning.renew(current)
        self.switches.require_forward_param_sync = current.synchronizes
        if current.synchronizes:
            self.uneven.set_average(current)
            self.reducer.shadow_backward()


class _Undecided:
    """Modules of which this rank has refused a forward that raised: all ranks decide whether ``.grad`` stays as it was.

    This rank waits for that decision before an optimizer of torch's steps, so that none steps on this rank alone. This
    object holds a module's reducer as long as the module lives, as the module may be wrapped anew meanwhile.
    """

    def __init__(self) -> None:
        self._reducers: weakref.WeakKeyDictionary[torch.nn.Module, Reducer] = weakref.WeakKeyDictionary()
        self.hook: RemovableHandle | None = None

    def note(self, steps: Steps) -> None:
        """Notes a module whose forward has raised, if all ranks have yet to decide whether its ``.grad`` stays."""
        if steps.reducer.is_undecided():
            self._reducers[steps.model.module] = steps.reducer
            self.hook = self.hook or register_optimizer_step_pre_hook(self._before_step)

    def decide(self, module: torch.nn.Module) -> None:
        """Waits, before a forward of ``module``, for all ranks' decision on any that this rank has refused before."""
        if reducer := self._reducers.pop(module, None):
            reducer.decide()
        if self.hook and not self._reducers:
            self.hook.remove()  # here, since in a step torch is going through its hooks
            self.hook = None

    def _before_step(self, *_: Any) -> None:
        while self._reducers:
            self._reducers.popitem()[1].decide()


_undecided = _Undecided()
