"""Common memory for state that is still to come: else each step in which some parameter first has some would map more.

What it will be like is what that of other parameters is like. Memory that nobody touches takes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from syncengine.sharded.memory import Layout
from syncengine.sharded.shard import Member

Place = tuple[int, str]  # the parameter's number, and the key in its state
Layouts = dict[str, Layout]  # by key


class Room:
    """For the state of these parameters."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._free: dict[Place, torch.Tensor] = {}

    def take(self, wanted: Mapping[Place, Layout]) -> dict[Place, torch.Tensor]:
        """Memory for those of ``wanted`` that there is room for; zeros."""
        fitting = [place for place, layout in wanted.items() if self._fits(place, layout)]
        return {place: self._free.pop(place) for place in fitting}

    def plan(self, known: Mapping[Place, Layout]) -> dict[Place, Layout]:
        """What to make more room for, if ``known`` is all state that there is. The same on all ranks."""
        found: dict[int, Layouts] = {}
        for (index, key), layout in known.items():
            found.setdefault(index, {})[key] = layout
        if len(found) == len(self._members):
            return {}
        alike: dict[tuple[object, ...], int] = {}  # the first parameter with state of each kind
        for index in sorted(found):
            for kind in self._kinds(index, is_scalable=_is_scalable(self._members[index].parameter, found[index])):
                alike.setdefault(kind, index)
        wanted = {}
        for index, member in enumerate(self._members):
            kinds = () if index in found else self._kinds(index, is_scalable=True)
            model = next((alike[kind] for kind in kinds if kind in alike), None)
            if model is None:
                continue
            for key, layout in found[model].items():
                of = _scaled(layout, self._members[model].parameter, member.parameter)
                if not self._fits((index, key), of):
                    wanted[index, key] = of
        return wanted

    def add(self, made: Mapping[Place, torch.Tensor]) -> None:
        """There is more."""
        self._free.update(made)

    def clear(self) -> None:
        """There is none."""
        self._free.clear()

    def _fits(self, place: Place, layout: Layout) -> bool:
        return place in self._free and Layout.of(self._free[place]) == layout

    def _kinds(self, index: int, is_scalable: bool) -> Iterator[tuple[object, ...]]:
        """What parameters may be alike in, the closest first."""
        parameter, group = self._members[index]
        yield group, *Layout.of(parameter)
        if is_scalable:
            yield group, parameter.dim()
            yield (group,)


def _is_scalable(parameter: torch.Tensor, layouts: Layouts) -> bool:
    """Whether each entry is laid out as the parameter, or has one number."""
    own = Layout.of(parameter)
    return all(layout[:2] in (own[:2], ((), ())) for layout in layouts.values())


def _scaled(layout: Layout, model: torch.Tensor, parameter: torch.Tensor) -> Layout:
    """``layout``, of an entry of ``model``'s state, for ``parameter``."""
    of_model, own = Layout.of(model), Layout.of(parameter)
    dtype = own.dtype if layout.dtype == of_model.dtype else layout.dtype
    return Layout(*own[:2], dtype) if layout[:2] == of_model[:2] else layout._replace(dtype=dtype)
