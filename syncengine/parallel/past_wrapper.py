"""A warning for a model that is trained past its wrapper (``model.module(x)``), so that nobody averages gradients."""

import contextlib
import warnings
import weakref
from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from syncengine.lines import print_line
from syncengine.parallel.compiled import not_compiled
from syncengine.parallel.watchers import models


@dataclass(frozen=True)
class Step:
    """A step of an optimizer for a model: the gradient of one of the parameters, and the forwards until then."""

    forwards: float  # so far, of all wrappers that the model shares parameters with; NaN for CUDA graphs
    gradient: weakref.ref[torch.Tensor]
    version: int  # of the gradient


def is_past_wrapper(before: Step | None, now: Step) -> bool:
    """Whether the second of two steps in a row has a new gradient, though no wrapper of the model ran a forward."""
    if before is None or before.forwards != now.forwards:
        return False
    return before.gradient() is not now.gradient() or before.version != now.version


_steps: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, Step]] = weakref.WeakKeyDictionary()


@cache
def follow_steps() -> None:
    """From now on, checks after each step of a torch optimizer whether its model is trained past its wrapper."""
    register_optimizer_step_post_hook(_after_step)


@not_compiled
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with contextlib.suppress(Exception):  # this rank has made a step that the others have made, too
        for wrapper in set(models.values()):
            if wrapper.reducer.reduces and not wrapper._switches.said_past:
                _look(wrapper, optimizer)


def _look(wrapper: Any, optimizer: torch.optim.Optimizer) -> None:
    names = wrapper._model.by_id
    parameter = _first_stepped(optimizer, names)
    if parameter is None:
        return
    forwards = 0  # of all wrappers that share a parameter; no generator: each of its turns is a call in each step
    for other in set(models.values()):
        if not names.keys().isdisjoint(other._model.by_id):
            forwards += other._switches.forwards
    now = Step(forwards, weakref.ref(parameter.grad), parameter.grad._version)
    steps = _steps.setdefault(wrapper, weakref.WeakKeyDictionary())
    if is_past_wrapper(steps.get(optimizer), now):
        wrapper._switches.said_past = True
        _warn(names[id(parameter)], str(wrapper._model), type(optimizer).__name__)
    steps[optimizer] = now


def _first_stepped(optimizer: torch.optim.Optimizer, names: Container[int]) -> Any:
    """The first parameter with a gradient whose id is among ``names``, or None. By loops: calls slow each step down."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and id(parameter) in names:
                return parameter
    return None


def _warn(name: str, model: str, optimizer: str) -> None:
    text = (
        f"{optimizer} has stepped parameter {name} of {model} twice without a forward of the Parallel in between: "
        "gradients that come past it are not averaged, so ranks train apart. Call the wrapped model itself for what is "
        "trained, model(x), and neither model.module(x), unwrap_model(model)(x) nor another module that uses its "
        "parameters. If that is meant (you average by yourself, or in some steps only), filter this warning"
    )
    try:
        warnings.warn(text, UserWarning, stacklevel=6)
    except UserWarning:  # a filter makes an error of it
        print_line(text)
