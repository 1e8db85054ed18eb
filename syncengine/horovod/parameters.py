"""The parameters of an optimizer: which of them need gradients, which may change, and what they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch

from syncengine.errors import InvalidUsage

Named = Iterable[tuple[str, torch.Tensor]]
Groups = Sequence[dict[str, Any]]  # of an optimizer


class Parameters:
    """Of the groups of one optimizer. Those that are frozen now may be unfrozen later, and others may be added.

    `named`: names for messages; the parameters that the groups have now must be among them.
    """

    def __init__(self, groups: Groups, named: Named | None) -> None:
        self._names = {} if named is None else _names(named)
        self._seen: list[torch.Tensor] = []
        self._frozen: list[torch.Tensor] = []
        self._accepted: set[torch.Tensor] = set()
        for i, parameter in enumerate(_all(groups)):
            if named is not None and parameter not in self._names:
                raise InvalidUsage(
                    f"named_parameters lacks parameter {i} of the optimizer, of shape {tuple(parameter.shape)}: give "
                    "the names of all of them"
                )
            self._names.setdefault(parameter, f"parameter {i}")

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Of all parameters, for other code; those without a name have a number."""
        return self._names

    def changed(self, groups: Groups) -> bool:
        """Whether there may be newcomers. Called at each step."""
        now = _all(groups)
        same = len(now) == len(self._seen) and all(map(is_, now, self._seen))
        return not same or any(parameter.requires_grad for parameter in self._frozen)

    def newcomers(self, groups: Groups) -> tuple[list[torch.Tensor], list[str]]:
        """Those that need a gradient and were not accepted yet, with their names."""
        found = {p: i for i, p in enumerate(_all(groups)) if p.requires_grad and p not in self._accepted}
        return list(found), [self._names.get(p, f"parameter {i}") for p, i in found.items()]

    def accept(self, groups: Groups) -> None:
        """What `newcomers` has returned is followed from now on."""
        self._seen = _all(groups)
        self._accepted.update(parameter for parameter in self._seen if parameter.requires_grad)
        self._frozen = [parameter for parameter in self._seen if parameter not in self._accepted]


def _all(groups: Groups) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _names(named_parameters: Named) -> dict[torch.Tensor, str]:
    named = list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
        raise InvalidUsage("named_parameters must be pairs of name and parameter, as model.named_parameters() gives")
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise InvalidUsage(f"named_parameters has {', '.join(twice)} more than once: give each parameter its own name")
    return {parameter: name for name, parameter in named}
