"""Warns of parameters that a model gets after wrapping (adapters, another head), as nobody averages their gradients.

Hooks count registrations: a forward walks through the model if their count has changed, else it costs a comparison.
Parameters that come without registration (``Sequential.insert`` writes to ``_modules``), and those that were frozen
when they came, are found by walks that are so seldom that they cost as little.
"""

import warnings
from collections.abc import Collection
from functools import cache, partial
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from syncengine.parallel.model import Model, named_parameters
from syncengine.parallel.watchers import models

_INSIDE = "module."  # how the wrapper calls what it has wrapped
_LEAST_FORWARDS = 16  # between two walks


_registrations = 0  # of parameters and modules by any module: at each forward a walk would cost more


def _note_registration(*_: Any) -> None:
    global _registrations
    _registrations += 1


@cache
def _follow_registrations() -> None:
    register_module_parameter_registration_hook(_note_registration)
    register_module_module_registration_hook(_note_registration)


class Newcomers:
    """Finds the newcomers of one model. Warns of one at its first gradient, as a copy that is only kept is harmless.

    A parameter that replaces another is a newcomer, too; ``Steps`` raises only if a forward misses a trained old one.
    """

    def __init__(self, model: Model, ignored: Collection[str]) -> None:
        _follow_registrations()
        self._model, self._ignored = model, ignored
        self._known: Any = WeakIdKeyDictionary(dict.fromkeys(model.module.parameters()))  # ignored parameters, too
        self._own = {id(parameter) for parameter in model.parameters}  # the model keeps the parameters
        self._seen = -1
        self._forwards = 0  # forwards until the next walk: some come unregistered, or train later

    def look(self, wrapper: Any) -> None:
        """Looks for newcomers before a forward of ``wrapper``, a ``Parallel``; parameters of its own count, too."""
        self._forwards -= 1
        if self._seen != _registrations or self._forwards <= 0:
            self._seen = _registrations
            self._find(wrapper)

    def _find(self, wrapper: Any) -> None:
        modules = list(wrapper.modules())
        self._forwards = max(_LEAST_FORWARDS, len(modules))
        present = (parameter for module in modules for parameter in module._parameters.values())
        if all(id(parameter) in self._own or self._is_known(parameter) for parameter in present):
            return
        ignored = {_INSIDE + name for name in self._ignored}
        others = (module for module in modules if module is not wrapper and isinstance(module, DistributedDataParallel))
        averaged = {id(parameter) for module in others for parameter in module.parameters()}
        for name, parameter in named_parameters(wrapper, ignored).items():
            is_trained = parameter.requires_grad and not is_lazy(parameter)
            if is_trained and not self._is_known(parameter) and id(parameter) not in averaged:
                self._known[parameter] = None
                self._follow(name.removeprefix(_INSIDE), parameter)

    def _is_known(self, parameter: torch.Tensor | None) -> bool:
        # A tensor that functional_call or mixed_precision puts there for a while is no parameter, or no leaf.
        is_parameter = isinstance(parameter, torch.nn.Parameter) and parameter.is_leaf
        return not is_parameter or parameter in self._known

    def _follow(self, name: str, parameter: torch.Tensor) -> None:
        if not getattr(parameter, "_ddp_ignored", False):
            handle: list[Any] = []
            handle.append(parameter.register_post_accumulate_grad_hook(partial(_warn, name, str(self._model), handle)))


def _warn(name: str, model: str, handle: list[Any], parameter: torch.Tensor) -> None:
    handle.pop().remove()
    if any(parameter is other for wrapper in list(models.values()) for other in wrapper._module_parameters):
        return  # another model has wrapped it since
    warnings.warn(
        f"parameter {name} was added to {model} after wrapping, or replaces another: its gradients are not averaged, "
        "so ranks train it apart. Wrap the module again, with all that is to be trained inside, or set the parameter's "
        "_ddp_ignored = True if that is meant",
        UserWarning,
        stacklevel=2,
    )
