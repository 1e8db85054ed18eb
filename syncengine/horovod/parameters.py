"""The parameters of an optimizer: their names, and which of them need gradients, which may change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from syncengine.errors import InvalidUsage

Named = Iterable[tuple[str, torch.Tensor]]
Groups = Sequence[dict[str, Any]]  # of an optimizer


class Parameters:
    """The parameters in the groups of one optimizer. Frozen ones may be unfrozen later, and others may be added.

    `named`: names for messages; the parameters that the groups have now must be among them.
    """

    def __init__(self, groups: Groups, named: Named | None) -> None:
        # The names of all parameters. A parameter without a name has a number for one.
        self.names = {} if named is None else _names(named)
        self._accepted: dict[int, torch.Tensor] = {}  # by id, since torch hashes tensors in Python
        for i, parameter in enumerate(_all(groups)):
            if named is not None and parameter not in self.names:
                raise InvalidUsage(
                    f"named_parameters lacks parameter {i} of the optimizer, of shape {tuple(parameter.shape)}: give "
                    "the names of all of them"
                )
            self.names.setdefault(parameter, f"parameter {i}")

    def newcomers(self, groups: Groups) -> dict[torch.Tensor, str]:
        """The parameters that need a gradient and were not given to ``accept()`` yet, with their names.

        The optimizer asks at each step, since a parameter may be added or unfrozen at any time.
        """
        unknown = [(i, p) for i, p in enumerate(_all(groups)) if id(p) not in self._accepted]
        return {p: self.names.get(p, f"parameter {i}") for i, p in unknown if p.requires_grad}

    def accept(self, parameters: Iterable[torch.Tensor]) -> None:
        """Accepts the parameters: they are no newcomers any more."""
        self._accepted.update((id(parameter), parameter) for parameter in parameters)


def _all(groups: Groups) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _names(named_parameters: Named) -> dict[torch.Tensor, str]:
    named = list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
        raise InvalidUsage("named_parameters must be pairs of name and parameter, as model.named_parameters() gives")
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise InvalidUsage(f"named_parameters has {', '.join(twice)} more than once: give each parameter its own name")
    return {parameter: name for name, parameter in named}
