"""This rank's part of the parameters, and torch's own optimizer over it."""

import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from syncengine._C import WeightSlices
from syncengine.errors import InvalidUsage, error_text
from syncengine.sharded.memory import flat

GRAIN = 64  # elements: a vectorized loop over a slice then has the bits of one over the whole


class Slice(NamedTuple):
    """A range of one parameter's elements, from ``begin`` to ``end`` in the order in which they lie in memory."""

    parameter: int
    begin: int
    end: int


def cut_elements(sizes: Sequence[tuple[int, int]], ranks: int) -> list[list[Slice]]:
    """Each rank's slices: about equally many bytes, cut at multiples of ``GRAIN`` elements of a parameter.

    ``sizes``: the number of elements of each parameter, and the bytes of one element.
    """
    total, begin = sum(elements * item for elements, item in sizes), 0
    parts: list[list[Slice]] = [[] for _ in range(ranks)]
    for index, (elements, item) in enumerate(sizes):
        places = [total * rank // ranks - begin for rank in range(ranks + 1)]  # bytes, where ranks begin
        cuts = [elements if place >= elements * item else max(place // item // GRAIN * GRAIN, 0) for place in places]
        for part, (first, last) in zip(parts, itertools.pairwise(cuts), strict=True):
            if first < last:
                part.append(Slice(index, first, last))
        begin += elements * item
    return parts


def deal_whole(sizes: Sequence[tuple[int, int]], ranks: int) -> list[list[Slice]]:
    """Each rank's parameters, uncut: the largest first, each to the rank that has least. Sizes as in cut_elements."""
    load = [0] * ranks
    parts: list[list[Slice]] = [[] for _ in range(ranks)]
    for index, (elements, item) in sorted(enumerate(sizes), key=lambda one: -one[1][0] * one[1][1]):
        rank = load.index(min(load))
        load[rank] += max(elements * item, 1)
        parts[rank].append(Slice(index, 0, elements))
    return [sorted(part) for part in parts]


Groups = list[dict[str, Any]]
NOT_OPTIONS = ("params", "param_names")
_version = attrgetter("_version")
_PLAIN = frozenset((float, int, bool, str, type(None)))


class Member(NamedTuple):
    """A parameter of the sharded optimizer, and the parameter group that it is in."""

    parameter: torch.nn.Parameter
    group: int  # its number among the parameter groups


def members_of(groups: Sequence[Mapping[str, Any]]) -> list[Member]:
    """All parameters of the groups as members, in their order."""
    return [Member(parameter, number) for number, group in enumerate(groups) for parameter in group["params"]]


class Piece:
    """The part of one parameter that this rank updates: all of it, or a slice as a vector."""

    def __init__(self, index: int, parameter: torch.nn.Parameter, part: Slice, is_common: bool) -> None:
        self.index = index
        self.parameter = parameter
        self.begin, self.end = part.begin, part.end
        self.is_whole = part.end - part.begin == parameter.numel()
        self.tensor = self.cut(parameter.data) if is_common else parameter

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this piece of ``whole``, a tensor laid out as the parameter: all of it, or a slice as a vector."""
        return whole if self.is_whole else flat(whole)[self.begin : self.end]

    def laid_out(self, value: torch.Tensor) -> torch.Tensor:
        """Returns ``value``, which has the parameter's shape, with the parameter's strides: a copy if it has others."""
        if value.stride() == self.parameter.stride():
            return value.detach()
        same = torch.empty_strided(self.parameter.shape, self.parameter.stride(), dtype=value.dtype)
        return same.copy_(value.detach())


class Shard:
    """Updates this rank's slices with an optimizer of the class that the user has chosen.

    ``given``: the options of the groups as the user gave them, since the class may look at them. ``groups``: the groups
    as they are, with more options, and perhaps more of them. ``is_common``: the parameters lie in memory that all ranks
    share; otherwise each rank updates all of them. Raises ``InvalidUsage`` with the class's error.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        given: Sequence[Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        members: Sequence[Member],
        slices: Sequence[Slice],
        is_common: bool,
    ) -> None:
        self.kind = optimizer_class.__name__
        self.members = list(members)
        self.added_later = {i for i, one in enumerate(members) if one.group >= len(given)}  # until they have state
        self.pieces = [Piece(s.parameter, members[s.parameter].parameter, s, is_common) for s in slices]
        self._tensors = [piece.tensor for piece in self.pieces]
        self._slices = WeightSlices([(p.parameter, p.tensor, p.begin) for p in self.pieces] if is_common else [])
        mirrored: list[dict[str, Any]] = [
            {**options_of(group), "params": []} for group in [*given[: len(groups)], *groups[len(given) :]]
        ]
        for piece in self.pieces:
            mirrored[members[piece.index].group]["params"].append(piece.tensor)
        try:
            self.optimizer = optimizer_class(mirrored[: len(given)], **options)
            for group in mirrored[len(given) :]:
                self.optimizer.add_param_group(group)
        except Exception as error:
            raise InvalidUsage(
                f"{optimizer_class.__name__}, made again for this rank's part of the parameters (of a group, perhaps "
                f"none), raised {error_text(error)}"
            ) from error
        self._options: list[dict[str, Any]] = []  # the options with which the step began
        self.changed: set[str] = set()  # names of options that some step has changed
        # The class's step(), without torch's hooks around it: ShardedOptimizer.step() runs these.
        self._step = getattr(optimizer_class.step, "__wrapped__", optimizer_class.step)

    def update(self, groups: Sequence[dict[str, Any]]) -> bytes:
        """Makes one step of the optimizer on this rank's pieces, with the options of ``groups``.

        Returns a byte for each member: whether it was written to here.
        """
        self._options = list(map(dict, groups))
        for ours, theirs in zip(self.optimizer.param_groups, self._options, strict=False):
            params = ours["params"]
            ours.update(theirs)
            ours["params"] = params
        versions = list(map(_version, self._tensors))
        self._slices.take_gradients()
        try:
            self._step(self.optimizer)
        finally:
            self._slices.drop_gradients()
        written = bytearray(len(self.members))
        for piece, version in zip(self.pieces, versions, strict=True):
            parameter, group = self.members[piece.index]
            unseen = groups[group].get("fused") and parameter.grad is not None  # fused kernels raise no version
            written[piece.index] = bool(unseen) or piece.tensor._version != version
        return bytes(written)

    def follow(self) -> None:
        """Makes the pieces views of the common parameters again, after these have moved back into common memory."""
        for piece in self.pieces:
            piece.tensor.data = piece.cut(piece.parameter.data)

    def write_back(self, groups: Sequence[dict[str, Any]]) -> None:
        """Copies into ``groups`` the options that the step has changed; after all shards' steps, as all begin alike."""
        for ours, before, theirs in zip(self.optimizer.param_groups, self._options, groups, strict=False):
            for key, value in ours.items():  # some optimizers keep numbers there
                if key not in NOT_OPTIONS and before.get(key, before) is not value:
                    theirs[key] = value
                    self.changed.add(key)
        self._options = []


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group: all but its parameters."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def describe_options(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines that must be the same on all ranks: each group's number of parameters, and options that are data."""
    lines = []
    for number, group in enumerate(groups):
        options = {}
        for key, value in group.items():
            if key not in NOT_OPTIONS:
                options[key] = value if type(value) in _PLAIN else plain_data(value)
        lines.append(f"group {number} of {len(group['params'])} parameters: {options}")
    return lines


def plain_data(value: Any) -> Any:
    """``value`` as numbers, texts, and lists of them. Other objects become dicts."""
    if hasattr(value, "tolist"):  # a tensor, or numpy's
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return list(value) if _PLAIN.issuperset(map(type, value)) else [plain_data(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {"dict": {str(key): plain_data(item) for key, item in value.items()}}
    if isinstance(value, (set, frozenset)):  # texts have another order in each process
        return {"set": sorted(str(plain_data(item)) for item in value)}
    text = repr(value)
    return {"object": type(value).__name__ if " at 0x" in text else text}


def take_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Takes over an option of another rank, as ``plain_data``. Other objects stay: the next agreement compares them."""
    here = group.get(key)
    if plain_data(here) == value:
        return
    if isinstance(here, torch.Tensor):
        here.fill_(value)
    elif not isinstance(value, dict):
        group[key] = tuple(value) if isinstance(here, tuple) else value
