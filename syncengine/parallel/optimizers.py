"""Optimizers that step in backward, each parameter as soon as its gradient is averaged."""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from syncengine.parallel.reducer import ModelReducer, NoReducer

APPLIED_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"


class BackwardOptimizers:
    """The optimizers in backward of one model. Their hooks stay for the model's next reducer, and are not pickled."""

    _taken = 0  # how often any model has taken handles out of torch's map, where others no longer see them

    def __init__(self) -> None:
        self.reducer: ModelReducer | NoReducer  # the one that averages the model's gradients
        self._steps: list[Callable[[torch.nn.Parameter], Any]] = []
        self._adopted: set[int] = set()  # parameters
        self._taken_before = -1  # this one looked last

    def fuse(
        self,
        optimizer: type[torch.optim.Optimizer],
        parameters: Iterable[torch.nn.Parameter],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Registers an optimizer for ``parameters``, as DDP's ``_register_fused_optim``."""
        from torch.distributed.optim.utils import functional_optim_map  # slow to import

        functional = functional_optim_map.get(optimizer)
        shared = functional([], *args, **kwargs, _allow_empty_param_list=True) if functional else None
        for parameter in (p for p in parameters if p.requires_grad):
            if shared is not None:
                self._step_after_reduction(parameter, lambda p: shared.step_param(p, p.grad))
            else:
                own = optimizer([parameter], *args, **kwargs)
                self._step_after_reduction(parameter, lambda _, own=own: own.step())  # type: ignore[misc]

    def adopt(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Makes optimizers of torch's ``_apply_optimizer_in_backward`` step on averages, and drop gradients afterwards.

        Called before each forward once torch's module of that name is imported, since optimizers may be applied at any
        time. If several models have a parameter, each adopts its optimizer, and the one that averages steps it.
        """
        handles = getattr(sys.modules[APPLIED_IN_BACKWARD], "param_to_optim_hook_handle_map", {})
        if not handles and self._taken_before == BackwardOptimizers._taken:
            return
        for index, parameter in enumerate(parameters):
            for handle in handles.pop(parameter, ()):
                handle.remove()  # these step on the local gradient
                BackwardOptimizers._taken += 1
            if hasattr(parameter, "_in_backward_optimizers") and index not in self._adopted:
                self._adopted.add(index)
                self._step_after_reduction(parameter, _step_and_drop)
        self._taken_before = BackwardOptimizers._taken

    def any(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether there are optimizers in backward for these parameters."""
        if APPLIED_IN_BACKWARD in sys.modules:
            self.adopt(parameters)
        return bool(self._steps)

    def _step_after_reduction(self, parameter: torch.nn.Parameter, step: Callable[[torch.nn.Parameter], Any]) -> None:
        """Calls ``step(parameter)`` whenever its gradient is averaged; not in a backward under ``no_sync``."""
        # A parameter holds its hooks, and an optimizer holds parameters. If a hook held the optimizer, none of them
        # would ever be freed.
        weak, index = weakref.ref(self), len(self._steps)
        self._steps.append(step)

        def hook(parameter: torch.nn.Parameter) -> None:
            owner = weak()
            if owner is not None and owner.reducer.has_averaged():
                owner._steps[index](parameter)

        parameter.register_post_accumulate_grad_hook(hook)


def _step_and_drop(parameter: torch.nn.Parameter) -> None:
    if parameter.grad is None:  # another model has stepped, which this backward belongs to as well
        return
    for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    parameter.grad = None
