"""Optimizers that step in backward, each parameter as soon as its gradient is averaged."""

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from syncengine.parallel.model import Model


def step_after_reduction(
    model: Model, parameter: torch.nn.Parameter, step: Callable[[torch.nn.Parameter], Any]
) -> None:
    """Calls ``step(parameter)`` whenever its gradient is averaged; not in a backward under ``no_sync``."""
    # A parameter holds its hooks; were the optimizer, which holds parameters, among what they hold, nothing would go.
    weak, steps = weakref.ref(model), model.__dict__.setdefault("_backward_steps", [])
    index = len(steps)
    steps.append(step)

    def hook(parameter: torch.nn.Parameter) -> None:
        owner = weak()
        if owner is not None and owner._has_averaged():
            owner._backward_steps[index](parameter)

    parameter.register_post_accumulate_grad_hook(hook)


def fuse_optimizer(
    model: Model,
    optimizer: type[torch.optim.Optimizer],
    parameters: Iterable[torch.nn.Parameter] | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """DDP's ``_register_fused_optim``: torch's functional optimizer where there is one, else an ordinary one each."""
    from torch.distributed.optim.utils import functional_optim_map  # slow to import

    chosen = list(model._module_parameters if parameters is None else parameters)
    functional = functional_optim_map.get(optimizer)
    shared = functional([], *args, **kwargs, _allow_empty_param_list=True) if functional else None
    for parameter in chosen:
        if not parameter.requires_grad:
            continue
        if shared is not None:
            step_after_reduction(model, parameter, lambda p: shared.step_param(p, p.grad))
        else:
            step_after_reduction(model, parameter, _stepper(optimizer([parameter], *args, **kwargs)))


def adopt_optimizers(model: Model) -> None:
    """Makes the optimizers of torch's ``_apply_optimizer_in_backward`` wait for averages, and drop gradients then.

    Called before each forward, since they may be applied at any time. One that waits for another model's averages can't
    wait for this one's.
    """
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    handles = getattr(module, "param_to_optim_hook_handle_map", {})
    adopted = model.__dict__.setdefault("_adopted", set())
    if not handles and model.__dict__.setdefault("_looked_for_optimizers", False):
        return
    model._looked_for_optimizers = True
    for index, parameter in enumerate(model._module_parameters):
        for handle in handles.pop(parameter, ()):
            handle.remove()  # these step on the local gradient
        if hasattr(parameter, "_in_backward_optimizers") and index not in adopted:
            adopted.add(index)
            step_after_reduction(model, parameter, _step_and_drop)


def _step_and_drop(parameter: torch.nn.Parameter) -> None:
    for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    parameter.grad = None


def _stepper(optimizer: torch.optim.Optimizer) -> Callable[[torch.nn.Parameter], Any]:
    return lambda parameter: optimizer.step()
