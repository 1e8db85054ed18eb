"""The torch.distributed backend "syncengine": tensors of one call that share memory, beside the call on copies."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from pool import run_on_ranks
from torch_backend_values import equal, ours

from syncengine.errors import InvalidUsage

WORLD = 3
Tensors = list[torch.Tensor]
Cut = Callable[[int], torch.Tensor]
# What is written, what is read, the call, and what it should write, of all ranks' values from before it.
Case = tuple[Tensors, Tensors, Callable[[Any, Tensors, Tensors], Any], Callable[..., Tensors]]


def total(tensors: Tensors) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def reduces_lists(cut: Cut, size: int) -> Case:
    return (
        [cut(size + i) for i in range(4)],
        [],
        lambda group, targets, _: dist.all_reduce_coalesced(targets, group=group),
        lambda targets, _: [total([t[i] for t in targets]) for i in range(4)],
    )


def gathers_lists(cut: Cut, size: int, more: int = 0) -> Case:
    return (
        [cut(size + more * r) for r in range(WORLD)],
        [cut(size + more * dist.get_rank())],
        lambda group, targets, sources: dist.all_gather(targets, sources[0], group),
        lambda _, sources: [s[0] for s in sources],
    )


def gathers_tensors(cut: Cut, size: int) -> Case:
    return (
        [cut(WORLD * size), cut(WORLD * size)],
        [cut(size), cut(size)],
        lambda group, targets, sources: group.allgather_into_tensor_coalesced(targets, sources),
        lambda _, sources: [torch.cat([s[i] for s in sources]) for i in range(2)],
    )


def scatters_sums_of_lists(cut: Cut, size: int) -> Case:
    return (
        [cut(size)],
        [cut(size) for _ in range(WORLD)],
        lambda group, targets, sources: dist.reduce_scatter(targets[0], sources, group=group),
        lambda _, sources: [total([s[dist.get_rank()] for s in sources])],
    )


def scatters_sums_of_tensors(cut: Cut, size: int) -> Case:
    return (
        [cut(size), cut(size)],
        [cut(WORLD * size), cut(WORLD * size)],
        lambda group, targets, sources: group.reduce_scatter_tensor_coalesced(targets, sources),
        lambda _, sources: [total([s[i] for s in sources]).chunk(WORLD)[dist.get_rank()] for i in range(2)],
    )


def exchanges_lists(cut: Cut, size: int) -> Case:
    return (
        [cut(size) for _ in range(WORLD)],
        [cut(size) for _ in range(WORLD)],
        lambda group, targets, sources: dist.all_to_all(targets, sources, group),
        lambda _, sources: [s[dist.get_rank()] for s in sources],
    )


def exchanges_tensors(cut: Cut, size: int) -> Case:
    return (
        [cut(WORLD * size)],
        [cut(WORLD * size)],
        lambda group, targets, sources: dist.all_to_all_single(targets[0], sources[0], group=group),
        lambda _, sources: [torch.cat([s[0].chunk(WORLD)[dist.get_rank()] for s in sources])],
    )


def gathers_at_one(cut: Cut, size: int) -> Case:
    at_root = dist.get_rank() == 1
    targets, sources = [cut(size) for _ in range(WORLD)], [cut(size)]
    return (
        targets if at_root else [],
        sources,
        lambda group, targets, sources: dist.gather(sources[0], targets or None, 1, group),
        lambda _, sources: [s[0] for s in sources] if at_root else [],
    )


def scatters_from_one(cut: Cut, size: int) -> Case:
    targets, sources = [cut(size)], [cut(size) for _ in range(WORLD)]
    return (
        targets,
        sources,
        lambda group, targets, sources: dist.scatter(targets[0], sources if dist.get_rank() == 1 else None, 1, group),
        lambda _, sources: [sources[1][dist.get_rank()]],
    )


CALLS = [reduces_lists, gathers_lists, pytest.param(partial(gathers_lists, more=1), id="gathers_uneven_lists")]
CALLS += [gathers_tensors, scatters_sums_of_lists, scatters_sums_of_tensors, exchanges_lists, exchanges_tensors]
CALLS += [gathers_at_one, scatters_from_one]


def from_everybody(tensors: Tensors) -> list[Tensors]:
    everybody: list[Any] = [None] * WORLD
    dist.all_gather_object(everybody, [t.clone() for t in tensors])
    return everybody


@pytest.mark.thorough
@pytest.mark.parametrize("make_case", mostly_nightly(CALLS, 0))
@run_on_ranks(world=WORLD, gloo=True, settings=None)
def test_tensors_of_one_call_may_share_memory(make_case: Callable[[Cut, int], Case]):
    """What they hold then is what copies give."""
    group, wrong = ours(), []
    torch.manual_seed(0)  # the same memory on each run
    for case in range(40):
        choose = random.Random(case)
        size = choose.choice([1, 7, 500, 70_000])
        memory = torch.randint(-8, 8, (choose.choice([4, 6, 12]) * size + 5,), dtype=torch.float32)

        def cut(length: int, choose: random.Random = choose, memory: torch.Tensor = memory) -> torch.Tensor:
            step = choose.choice([1, 1, 2])
            begin = choose.randrange(len(memory) - (length - 1) * step) if (length - 1) * step < len(memory) else 0
            view = memory[begin :: step if begin + (length - 1) * step < len(memory) else 1][:length]
            return view if len(view) == length else memory[:length]

        targets, sources, call, expected = make_case(cut, size)
        copies = expected(from_everybody(targets), from_everybody(sources))
        reference = memory.clone()
        for target, result in zip(targets, copies, strict=True):
            reference.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(result)
        work = call(group, targets, sources)
        if work is not None:
            work.wait()
        if not equal(memory, reference):
            wrong.append(case)
    return wrong


@run_on_ranks(gloo=True, settings=None)
def test_a_tensor_twice_in_a_list_is_as_with_gloo() -> None:
    group, rank = ours(), dist.get_rank()
    results = []
    for each in (group, dist.group.WORLD):
        tensor = torch.full((5,), rank + 1.0)
        dist.all_reduce_coalesced([tensor, tensor], group=each)
        parts = [torch.zeros(5)] * 2
        dist.all_gather(parts, torch.full((5,), rank + 1.0), each)
        results.append(torch.stack([tensor, parts[0]]))
    assert equal(*results)
    assert results[0][0].tolist() == [3.0] * 5


@run_on_ranks(gloo=True, settings=None)
def test_a_tensor_whose_elements_share_memory_is_refused() -> None:
    group = ours()
    for call in (
        lambda t: dist.all_reduce(t, group=group),
        lambda t: dist.broadcast(t, 0, group),
        lambda t: dist.all_gather([torch.empty(3), t], torch.ones(3), group),
        lambda t: dist.recv(t, 1 - dist.get_rank(), group),
    ):
        with pytest.raises(InvalidUsage, match=r"several elements of a tensor.*same memory.*clone\(\)"):
            call(torch.ones(1).expand(3))
    dist.all_gather(parts := [torch.empty(3), torch.empty(3)], torch.ones(1).expand(3), group)  # only read
    assert equal(torch.stack(parts), torch.ones(2, 3))
