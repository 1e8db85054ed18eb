"""Which rank updates which part of which parameter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

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
