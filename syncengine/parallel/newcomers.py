"""Parameters that a module gets after wrapping (adapters, say): nobody averages their gradients, which is said."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Container
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from syncengine.parallel.model import Model, named_parameters
from syncengine.parallel.watchers import models


class _Registrations:
    """How often any module has got a parameter or a module: walking through a model at each forward would cost more."""

    count = 0
    followed = False

    @classmethod
    def follow(cls) -> None:
        if cls.followed:
            return
        cls.followed = True
        register_module_parameter_registration_hook(cls._note)
        register_module_module_registration_hook(cls._note)

    @classmethod
    def _note(cls, *registered: Any) -> None:
        cls.count += 1


class Newcomers:
    """Those of one model. Warns when the first gradient comes to one; a copy that is only kept there is no matter."""

    def __init__(self, model: Model, ignored: Container[str]) -> None:
        _Registrations.follow()
        self._model, self._ignored = model, ignored
        self._known: Any = WeakIdKeyDictionary(dict.fromkeys(model.parameters))
        self._seen = _Registrations.count
        self._waiting: list[tuple[str, weakref.ref[torch.Tensor]]] = []  # frozen, or without a shape, until now

    def look(self) -> None:
        """Before a forward."""
        if self._seen != _Registrations.count:
            self._seen = _Registrations.count
            self._find()
        if self._waiting:
            self._waiting = [one for one in self._waiting if not self._follow(*one)]

    def _find(self) -> None:
        names = set(self._model.names)  # who takes a name is a replaced parameter, which is an error
        for name, parameter in named_parameters(self._model.module, self._ignored).items():
            if name not in names and parameter not in self._known:
                self._known[parameter] = None
                self._waiting.append((name, weakref.ref(parameter)))

    def _follow(self, name: str, reference: weakref.ref[torch.Tensor]) -> bool:
        parameter = reference()
        if parameter is None or getattr(parameter, "_ddp_ignored", False):
            return True
        if is_lazy(parameter) or not parameter.requires_grad:
            return False
        handle: list[Any] = []
        handle.append(parameter.register_post_accumulate_grad_hook(partial(_warn, name, str(self._model), handle)))
        return True


def _warn(name: str, model: str, handle: list[Any], parameter: torch.Tensor) -> None:
    handle.pop().remove()
    if any(parameter is other for wrapper in list(models.values()) for other in wrapper._module_parameters):
        return  # it was wrapped since
    warnings.warn(
        f"parameter {name} was added to the module of {model} after wrapping: its gradients are not averaged, so ranks "
        "train it apart. Wrap the module again, or set the parameter's _ddp_ignored = True if that is meant",
        UserWarning,
        stacklevel=2,
    )
