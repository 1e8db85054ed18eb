"""The sum of numbered gradients as one binary tree, which depends on nothing but their number.

The tree over micro-batches [begin, end) has as its left part the largest power of two that is less than their number,
and as its right part the rest. A node of the tree is the range that it is over.
"""

from __future__ import annotations

import itertools

import torch

from syncengine._C import Backend, Communicator
from syncengine.errors import InvalidUsage

Node = tuple[int, int]

_ALIGNMENT = 64  # bytes: each gradient begins on a cache line, as one of its own would


def children(node: Node) -> tuple[Node, Node]:
    """The parts of one of at least two micro-batches."""
    begin, end = node
    half = begin + (1 << ((end - begin - 1).bit_length() - 1))
    return (begin, half), (half, end)


def ancestors(total: int, i: int) -> list[Node]:
    """Those of micro-batch ``i``, from the root on."""
    node, path = (0, total), []
    while node != (i, i + 1):
        path.append(node)
        left, right = children(node)
        node = left if i < left[1] else right
    return path


def deal(total: int, ranks: int) -> list[range]:
    """Which micro-batches each rank computes: ranges that follow each other, of nearly one length.

    Each consists of few nodes, all of which a rank contributes: cuts lie on multiples of a power of two that is small
    beside a rank's part, and parts differ by that at most.
    """
    grain = 1 << max((total // (4 * ranks)).bit_length() - 1, 0)
    each, more = divmod(-(-total // grain), ranks)
    cuts = [min((rank * each + min(rank, more)) * grain, total) for rank in range(ranks + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


def nodes_within(part: range, node: Node) -> list[Node]:
    """The largest nodes of the tree below ``node`` whose micro-batches all lie in ``part``."""
    begin, end = node
    if part.start <= begin and end <= part.stop:
        return [node]
    if end <= part.start or part.stop <= begin:
        return []
    return [found for child in children(node) for found in nodes_within(part, child)]


class Sums:
    """Gradients of some parameters as flat tensors, one for each dtype: what is added and exchanged."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.used = [False] * len(parameters)  # by any micro-batch
        self.flats: dict[torch.dtype, int] = {}  # elements of each
        self._begins = []
        for parameter in parameters:
            begin = self.flats.setdefault(parameter.dtype, 0)
            self._begins.append(begin)
            self.flats[parameter.dtype] = begin + _padded(parameter.numel(), parameter.element_size())

    def take(self) -> list[torch.Tensor]:
        """Moves the gradients out of ``.grad``; zeros stand for one that is not there."""
        flats = [torch.zeros(count, dtype=dtype, device="cpu") for dtype, count in self.flats.items()]
        for k, (view, parameter) in enumerate(zip(self._views(flats), self.parameters, strict=True)):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise InvalidUsage(
                    f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which micro_batches() can't "
                    "add: make its nn.Embedding with sparse=False"
                )
            self.used[k] = True
            view.copy_(gradient)
        return flats

    def add(self, left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
        """In the memory of ``left``."""
        for mine, theirs in zip(left, right, strict=True):
            mine.add_(theirs)
        return left

    def deliver(self, flats: list[torch.Tensor]) -> None:
        """Puts them into ``.grad``, but where no micro-batch has brought a gradient."""
        for view, parameter, used in zip(self._views(flats), self.parameters, self.used, strict=True):
            if used:
                same = view.stride() == parameter.stride()
                parameter.grad = view if same else torch.empty_like(parameter).copy_(view)

    def _views(self, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        of = dict(zip(self.flats, flats, strict=True))
        return [
            of[p.dtype][begin : begin + p.numel()].view(p.shape)
            for begin, p in zip(self._begins, self.parameters, strict=True)
        ]


def sum_over_ranks(
    backend: Backend, communicator: Communicator, own: list[torch.Tensor], dealt: list[list[Node]], total: int
) -> torch.Tensor:
    """The sum of all nodes that were ``dealt``, by rank, of which this rank has its ``own``. Collective.

    Each rank gets all nodes' parts of one slice, adds them, and gives the sum to all. It lies in ``own[0]``.
    """
    result, rank = own[0], communicator.rank
    length = _padded(-(-result.numel() // communicator.size), result.element_size())
    bounds = [min(length * r, result.numel()) for r in range(communicator.size + 1)]
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    sent = torch.cat([node[bounds[r] : bounds[r + 1]] for r in range(communicator.size) for node in own])
    received = sent.new_empty(sum(map(len, dealt)) * sizes[rank])
    to, of = [len(own) * size for size in sizes], [len(nodes) * sizes[rank] for nodes in dealt]
    options = torch.distributed.AllToAllOptions()
    backend.alltoall_base(received, sent, of, to, options).wait()  # type: ignore[attr-defined]
    del sent, own[1:]
    nodes = [node for nodes in dealt for node in nodes]
    parts = dict(zip(nodes, received.view(len(nodes), sizes[rank]), strict=True))
    padded = result.new_zeros(communicator.size * length)
    padded[rank * length : rank * length + sizes[rank]] = _tree_sum((0, total), parts)
    communicator.all_gather(padded, padded[rank * length : (rank + 1) * length].clone())
    return result.copy_(padded[: result.numel()])


def _tree_sum(node: Node, parts: dict[Node, torch.Tensor]) -> torch.Tensor:
    if node in parts:
        return parts[node]
    left, right = children(node)
    return _tree_sum(left, parts).add_(_tree_sum(right, parts))


def _padded(elements: int, size: int) -> int:
    unit = _ALIGNMENT // size
    return -(-elements // unit) * unit
