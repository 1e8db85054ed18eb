"""This rank's part of the parameters, and torch's own optimizer over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from syncengine._C import WeightSlices
from syncengine.sharded.cut import Slice
from syncengine.sharded.memory import flat

NOT_OPTIONS = ("params", "param_names")


class Member(NamedTuple):
    """A parameter of the sharded optimizer."""

    parameter: torch.nn.Parameter
    group: int  # its number among the parameter groups


def members_of(groups: Sequence[Mapping[str, Any]]) -> list[Member]:
    """All of them, in their order."""
    return [Member(parameter, number) for number, group in enumerate(groups) for parameter in group["params"]]


class Piece:
    """What this rank updates of one parameter: all of it, or a slice as a vector."""

    def __init__(self, index: int, parameter: torch.nn.Parameter, part: Slice, is_common: bool) -> None:
        self.index = index
        self.parameter = parameter
        self.begin, self.end = part.begin, part.end
        self.is_whole = part.end - part.begin == parameter.numel()
        self.tensor = self.cut(parameter.data) if is_common else parameter

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This piece of a tensor that is laid out as the parameter."""
        return whole if self.is_whole else flat(whole)[self.begin : self.end]

    def laid_out(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, of the parameter's shape, laid out as the parameter."""
        if value.stride() == self.parameter.stride():
            return value.detach()
        same = torch.empty_strided(self.parameter.shape, self.parameter.stride(), dtype=value.dtype)
        return same.copy_(value.detach())


class Shard:
    """Updates this rank's slices with an optimizer of the class that the user has chosen.

    ``is_common``: the parameters lie in memory that all ranks share; otherwise each rank updates all of them.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        members: Sequence[Member],
        slices: Sequence[Slice],
        is_common: bool,
    ) -> None:
        self.members = list(members)
        self.pieces = [Piece(s.parameter, members[s.parameter].parameter, s, is_common) for s in slices]
        self._slices = WeightSlices([(p.parameter, p.tensor, p.begin) for p in self.pieces] if is_common else [])
        mirrored: list[dict[str, Any]] = [{**_options_of(group), "params": []} for group in groups]
        for piece in self.pieces:
            mirrored[members[piece.index].group]["params"].append(piece.tensor)
        self._optimizer = optimizer_class(mirrored, **options)
        # Without torch's hooks around step(): those are the sharded optimizer's.
        self._step = getattr(optimizer_class.step, "__wrapped__", optimizer_class.step)

    def update(self, groups: Sequence[dict[str, Any]], state: Any = None) -> None:
        """One step of the optimizer on this rank's pieces, with the options of ``groups``.

        ``state``: the sharded optimizer's own, where the parameters are not common.
        """
        if state is not None:
            self._optimizer.state = state
        for ours, theirs in zip(self._optimizer.param_groups, groups, strict=False):
            ours.update(_options_of(theirs))
        self._slices.take_gradients()
        try:
            self._step(self._optimizer)
        finally:
            self._slices.drop_gradients()
        for ours, theirs in zip(self._optimizer.param_groups, groups, strict=False):
            for key, value in ours.items():  # some optimizers keep numbers there
                if key not in NOT_OPTIONS and theirs.get(key) is not value:
                    theirs[key] = value

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """What the optimizer keeps for this piece."""
        state: dict[str, Any] = self._optimizer.state[piece.tensor]
        return state

    def set_state_of(self, piece: Piece, state: dict[str, Any]) -> None:
        """Replaces it."""
        self._optimizer.state[piece.tensor] = state


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def describe_options(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What all ranks must have in common of parameter groups: numbers of parameters, and options that are data."""
    lines = []
    for number, group in enumerate(groups):
        options = {key: plain_data(value) for key, value in _options_of(group).items()}
        lines.append(f"group {number} of {len(group['params'])} parameters: {options}")
    return lines


def plain_data(value: Any) -> Any:
    """``value`` as numbers, texts and lists of them."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
