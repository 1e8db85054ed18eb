"""Optimizers that step in backward, each parameter as soon as its gradient is averaged."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch


class Model(Protocol):
    """What is needed of a ``Parallel`` here."""

    _module_parameters: list[torch.nn.Parameter]
    _backward_steps: list[Callable[[torch.nn.Parameter], Any]]

    def _has_averaged(self) -> bool: ...


def step_after_reduction(
    model: Model, parameter: torch.nn.Parameter, step: Callable[[torch.nn.Parameter], Any]
) -> None:
    """Calls ``step(parameter)`` whenever its gradient is averaged; not in a backward under ``no_sync``."""
    # A parameter holds its hooks; were the optimizer, which holds parameters, among what they hold, nothing would go.
    weak, steps = weakref.ref(model), model.__dict__.setdefault("_backward_steps", [])
    index = len(steps)
    steps.append(step)

    def hook(parameter: torch.Tensor) -> None:
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
    """Lets the optimizers of torch's ``_apply_optimizer_in_backward`` wait for averages, and drops gradients then."""
    with_optimizer = [p for p in model._module_parameters if hasattr(p, "_in_backward_optimizers")]
    if not with_optimizer:
        return
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in with_optimizer:
        for handle in param_to_optim_hook_handle_map.pop(parameter, []):
            handle.remove()  # these step on the local gradient
        step_after_reduction(model, parameter, _step_and_drop)


def _step_and_drop(parameter: torch.nn.Parameter) -> None:
    for optimizer in parameter._in_backward_optimizers:
        optimizer.step()
    parameter.grad = None


def _stepper(optimizer: torch.optim.Optimizer) -> Callable[[torch.nn.Parameter], Any]:
    return lambda parameter: optimizer.step()
