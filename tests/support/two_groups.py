"""A model for each of two process groups, wrapped and trained in a thread each, in another order on each rank."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine

T = TypeVar("T")


def in_two_threads(do: Callable[[int], T]) -> list[T]:
    """`do(0)` and `do(1)`, in a thread each: ranks 0 and 1 come to their own number first."""

    def later(number: int) -> T:
        time.sleep(0.5 if number != dist.get_rank() else 0.0)
        return do(number)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(later, range(2)))


def train(
    wrap: Callable[..., nn.Module], groups: list[dist.ProcessGroup | None], number: int, rank: int
) -> list[float]:
    """The weight and its gradient."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0 + number + 10 * rank)
    wrapped = wrap(model, process_group=groups[number])
    wrapped(torch.full((1, 1), 3.0 + 5 * number + rank)).backward()
    return [model.weight.item(), model.weight.grad.item()]


def as_under_ddp(with_default: bool) -> None:
    """Two groups of ranks 0 and 1 (`with_default`: one is torch's default group). The other ranks do nothing."""
    groups = [None if with_default else dist.new_group([0, 1]), dist.new_group([0, 1])]
    dist.barrier()  # Gloo fails where a peer has connected and left already
    rank = dist.get_rank()
    if rank < 2:
        for wrap in (DistributedDataParallel, syncengine.Parallel):
            of_each = in_two_threads(lambda number: train(wrap, groups, number, rank))  # noqa: B023
            assert of_each == [[1.0, 3.5], [2.0, 8.5]], wrap
            if wrap is syncengine.Parallel:
                assert DistributedDataParallel._active_ddp_module is None
            DistributedDataParallel._active_ddp_module = None  # DDP's forwards in two threads may leave one there
