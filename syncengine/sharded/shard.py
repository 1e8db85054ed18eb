"""This rank's part of the parameters, and torch's own optimizer over it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from syncengine._C import WeightSlices
from syncengine.errors import InvalidUsage
from syncengine.sharded.memory import flat

GRAIN = 64  # elements: a vectorized loop over a slice then has the bits of one over the whole


class Slice(NamedTuple):
    """Elements of one parameter, in the order in which they lie in memory."""

    parameter: int
    begin: int
    end: int


class Size(NamedTuple):
    """Of a parameter."""

    elements: int
    item: int  # bytes


def cut_elements(sizes: Sequence[Size], ranks: int) -> list[list[Slice]]:
    """Each rank's slices: about equally many bytes, cut at multiples of ``GRAIN`` elements of a parameter."""
    total = sum(size.elements * size.item for size in sizes)
    bounds = [_place(sizes, total * rank // ranks) for rank in range(ranks)] + [(len(sizes), 0)]
    return [
        [
            part
            for index in range(begin[0], min(end[0] + 1, len(sizes)))
            if (
                part := Slice(
                    index,
                    begin[1] if index == begin[0] else 0,
                    end[1] if index == end[0] else sizes[index].elements,
                )
            ).begin
            < part.end
        ]
        for begin, end in itertools.pairwise(bounds)
    ]


def _place(sizes: Sequence[Size], byte: int) -> tuple[int, int]:
    """The parameter, and the element of it, at which a rank begins."""
    for index, size in enumerate(sizes):
        if byte < size.elements * size.item:
            return index, byte // size.item // GRAIN * GRAIN
        byte -= size.elements * size.item
    return len(sizes), 0


def deal_whole(sizes: Sequence[Size], ranks: int) -> list[list[Slice]]:
    """Each rank's parameters, uncut: the largest first, each to the rank that has least."""
    load = [0] * ranks
    dealt: list[list[Slice]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i].elements * sizes[i].item, i)):
        rank = load.index(min(load))
        load[rank] += max(sizes[index].elements * sizes[index].item, 1)
        dealt[rank].append(Slice(index, 0, sizes[index].elements))
    return [sorted(part) for part in dealt]


Groups = list[dict[str, Any]]
NOT_OPTIONS = ("params", "param_names")
_version = attrgetter("_version")
_PLAIN = frozenset((float, int, bool, str, type(None)))


class Scaling(NamedTuple):
    """What a GradScaler tells an optimizer that scales gradients back by itself, as torch's fused ones do.

    It sets attributes of these names for the time of a step: 0-dimensional tensors, or None.
    """

    grad_scale: Any = None  # gradients are still this many times too large
    found_inf: Any = None  # above 0: some gradient is not finite, so nothing is to be written

    def numbers(self) -> dict[str, float | None]:
        """The same as numbers."""
        return {name: None if value is None else float(value) for name, value in self._asdict().items()}

    def skips(self) -> bool:
        """Whether nothing is to be written."""
        return self.found_inf is not None and bool(self.found_inf > 0)


NOT_SCALED = Scaling()


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

    ``given``: what the user has made the groups of, as the class may look at it; ``groups`` have more options by now,
    and perhaps there are more of them. ``is_common``: the parameters lie in memory that all ranks share; otherwise each
    rank updates all of them. Raises ``InvalidUsage`` with the class's error.
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
        self._is_torchs = optimizer_class.__module__.startswith("torch.optim.")
        self._is_common = is_common
        self.members = list(members)
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
                f"none), raised {type(error).__name__}: {error}"
            ) from error
        self._options: list[dict[str, Any]] = []  # of this step, as it began
        self.changed: set[str] = set()  # names of options that some step has changed
        # Without torch's hooks around step(): those are the sharded optimizer's.
        self._step = getattr(optimizer_class.step, "__wrapped__", optimizer_class.step)

    def update(self, groups: Sequence[dict[str, Any]], scaling: Scaling = NOT_SCALED, state: Any = None) -> bytes:
        """One step of the optimizer on this rank's pieces, with the options of ``groups``.

        ``state``: the sharded optimizer's own, where the parameters are not common. Returns of each member whether it
        was written to here. The versions of what fused kernels write stay: there each that has a gradient counts.
        """
        if state is not None:
            self.optimizer.state = state
        self._options = list(map(dict, groups))
        for ours, theirs in zip(self.optimizer.param_groups, self._options, strict=False):
            params = ours["params"]
            ours.update(theirs)
            ours["params"] = params
        versions = list(map(_version, self._tensors))
        optimizer: Any = self.optimizer
        self._slices.take_gradients()
        try:
            if scaling is not NOT_SCALED:
                optimizer.grad_scale, optimizer.found_inf = scaling
            self._step(optimizer)
        finally:
            self._slices.drop_gradients()
            if scaling is not NOT_SCALED:
                del optimizer.grad_scale, optimizer.found_inf
        skips = scaling is not NOT_SCALED and scaling.skips()
        if scaling.grad_scale is not None and not skips and self._is_torchs and self._is_common:
            self._scale_back(scaling.grad_scale)
        written = bytearray(len(self.members))
        for piece, version in zip(self.pieces, versions, strict=True):
            parameter, group = self.members[piece.index]
            unseen = groups[group].get("fused") and parameter.grad is not None and not skips
            written[piece.index] = bool(unseen) or piece.tensor._version != version
        return bytes(written)

    def _scale_back(self, scale: torch.Tensor) -> None:
        """Gradients of what other ranks update, as torch's kernels scale back those of what they update."""
        pieces = {piece.index: piece for piece in self.pieces}
        for index, (parameter, _) in enumerate(self.members):
            if parameter.grad is None:
                continue
            grad, piece = parameter.grad.detach(), pieces.get(index)
            if piece is None or (not piece.is_whole and grad.stride() != parameter.stride()):  # had a copy, then
                grad.div_(scale)
            elif not piece.is_whole:
                flat(grad)[: piece.begin].div_(scale)
                flat(grad)[piece.end :].div_(scale)

    @property
    def shows_writes(self) -> bool:
        """Whether versions show what its optimizer writes: torch's own classes, but for their fused kernels."""
        fused = any(group.get("fused") for group in self.optimizer.param_groups)
        return self._is_torchs and not fused

    def follow(self) -> None:
        """The common parameters lie where they belong; their pieces may have been elsewhere with them."""
        for piece in self.pieces:
            piece.tensor.data = piece.cut(piece.parameter.data)

    def write_back(self, groups: Sequence[dict[str, Any]]) -> None:
        """What the step has changed in its options, into ``groups``: after all shards, which begin with the same."""
        for ours, before, theirs in zip(self.optimizer.param_groups, self._options, groups, strict=False):
            for key, value in ours.items():  # some optimizers keep numbers there
                if key not in NOT_OPTIONS and before.get(key, before) is not value:
                    theirs[key] = value
                    self.changed.add(key)
        self._options = []

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """What the optimizer keeps for this piece."""
        state: dict[str, Any] = self.optimizer.state[piece.tensor]
        return state

    def set_state_of(self, piece: Piece, state: dict[str, Any]) -> None:
        """Replaces it."""
        self.optimizer.state[piece.tensor] = state


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """All but its parameters."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def describe_options(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What all ranks must have in common of parameter groups: numbers of parameters, and options that are data."""
    lines = []
    for number, group in enumerate(groups):
        options = {}
        for key, value in group.items():
            if key not in NOT_OPTIONS:
                options[key] = value if type(value) in _PLAIN else plain_data(value)
        lines.append(f"group {number} of {len(group['params'])} parameters: {options}")
    return lines


def plain_data(value: Any) -> Any:
    """``value`` as numbers, texts, and lists of them; other objects in dicts."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return list(value) if _PLAIN.issuperset(map(type, value)) else [plain_data(item) for item in value]
    if isinstance(value, float):
        return float(value)  # numpy.float64 is one
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return {"numpy": str(value.dtype), "value": value.tolist()}
    if isinstance(value, dict):
        return {"dict": {str(key): plain_data(item) for key, item in value.items()}}
    if isinstance(value, (set, frozenset)):  # texts have another order in each process
        return {"set": sorted(str(plain_data(item)) for item in value)}
    text = repr(value)
    return {"object": type(value).__name__ if " at 0x" in text else text}


def take_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Puts there what another rank has, as ``plain_data``. Other objects stay: the next agreement compares them."""
    here = group.get(key)
    if plain_data(here) == value:
        return
    if isinstance(here, torch.Tensor):
        here.fill_(value)
    elif isinstance(value, dict):
        if "numpy" in value:
            import numpy

            group[key] = numpy.asarray(value["value"], value["numpy"])[()]
    else:
        group[key] = tuple(value) if isinstance(here, tuple) else value
