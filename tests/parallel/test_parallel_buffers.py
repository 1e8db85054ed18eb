"""Buffers are rank 0's at every forward."""

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from parallel_models import both, data, outcome, trained
from pool import RankPool, run_on_ranks
from random_layers import Layer
from torch import nn
from torch_versions import since_2_13

import syncengine
from syncengine.errors import InvalidUsage, Mismatch, SyncError


@run_on_ranks()
def test_broadcast_buffers_is_deprecated_but_works():
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        model = syncengine.Parallel(nn.BatchNorm1d(24), broadcast_buffers=False)
    assert model.broadcast_buffers is False
    assert not model.will_sync_module_buffers()


@run_on_ranks()
def test_a_buffer_that_nothing_can_be_copied_into_is_named():
    """DDP raises without a name. Rank 0 alone would see nothing wrong."""
    module = nn.Linear(24, 2)
    module.register_buffer("mask", torch.ones(1).expand(5))
    with pytest.raises(InvalidUsage, match=r"mask of shape \(5,\) and strides \(0,\).*clone\(\) it"):
        syncengine.Parallel(module)
    module.mask = torch.arange(5).expand(1, -1)  # shares nothing
    syncengine.Parallel(module)
    model = trained(kept(), 1)
    if syncengine.rank() == 1:
        model.module.b.data = torch.ones(1).expand(SMALL)
    with pytest.raises(SyncError, match=r"b of shape \(6,\) and strides \(0,\)"):
        model(data()).backward()


def scaled() -> nn.Module:
    """A layer whose backward needs the buffer as it was in forward."""
    return Layer(lambda self, x: self.linear(x) * self.scale, linear=nn.Linear(24, 24), scale=nn.Buffer(torch.ones(24)))


@since_2_13
@run_on_ranks(gloo=True)
def test_a_buffer_that_backward_needs_may_be_synchronized_before():
    def step(model: nn.Module) -> None:
        for _ in range(2):
            sum(model(data(i)).square().sum() for i in range(2)).backward()

    both(scaled, step)


@pytest.mark.parametrize("copied", [False, True])
@run_on_ranks(gloo=True)
def test_one_rank_may_have_more_micro_batches(copied: bool):
    """Its first forward in a step brings the buffers, and only a later one the plan of the buckets."""

    def step(model: nn.Module) -> list[torch.Tensor]:
        if copied:
            model(data()).square().mean().backward()
            model = copy.deepcopy(model)
        losses = []
        for i in range(3):
            with model.no_sync():
                losses += [model(data(i + k)).square().mean() for k in range(syncengine.rank())]
            losses.append(model(data(i)).square().mean())
            sum(losses[-1 - syncengine.rank() :]).backward()
        return losses

    both(lambda: nn.Sequential(scaled(), nn.BatchNorm1d(24), nn.Linear(24, 2)), step)


Change = Callable[[nn.Module], Any]
RING = {"timeout": 60.0, "numerics": "ring"}  # DDP's bits with any number of ranks
SMALL, LARGE = (6,), (2, 8, 40, 40)  # the second is more than travels with others


class Kept(nn.Module):
    """Any buffers; a forward makes each of them this rank's own, the way that it is told."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.change: Change = lambda module: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return self.weight * x.sum()


def kept(shape: tuple[int, ...] = SMALL) -> Kept:
    return Kept(b=torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1000 * syncengine.rank())


def own(like: torch.Tensor) -> torch.Tensor:
    """Other values on each rank."""
    return torch.rand_like(like) + 10 * (1 + syncengine.rank())


def becomes(value: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """The buffer b gets the memory of what this makes of it."""
    return lambda module: setattr(module.b, "data", value(module.b))


moved = becomes(own)
transposed = becomes(lambda b: own(b.T).T)
cast = becomes(lambda b: own(b).to(torch.float64 if b.dtype == torch.float32 else torch.float32))
last_format = becomes(lambda b: own(b).contiguous(memory_format=torch.channels_last))
sliced = becomes(lambda b: torch.stack([own(b)] * 2, -1)[..., 0])


def resized(module: nn.Module) -> None:
    module.b.resize_(0).set_(torch.empty_like(module.b)).resize_(SMALL).copy_(own(torch.empty(SMALL)))


def grown(module: nn.Module) -> None:
    module.b.resize_(module.b.numel() + 1).copy_(own(module.b))


def swapped(module: nn.Module) -> None:
    module.b.data, module.c.data = own(module.c), own(module.b)


def buffers_after(model: nn.Module, change: Change) -> list[torch.Tensor]:
    """What the buffers are at the beginning of each forward; no longer those of the one before."""
    seen = []

    def note_and_change(module: nn.Module) -> None:
        seen.extend(b.clone(memory_format=torch.contiguous_format) for b in module.buffers())
        change(module)

    model.module.change = note_and_change
    for i in range(4):
        model(data(i)).backward()
    return seen


@since_2_13
@run_on_ranks(world=3, gloo=True, settings=RING)
def test_buffers_may_change_their_memory():
    """As moving averages do, by `.data`, and torch's observers of quantization, by resize_()."""
    for make, change in (
        *((kept, change) for change in (moved, resized, grown, cast)),
        *((partial(kept, shape), transposed) for shape in ((5, 3), (200, 300))),
        (partial(kept, LARGE), moved),
        (partial(make_two, c=70), swapped),
    ):
        torch.manual_seed(syncengine.rank())
        both(make, partial(buffers_after, change=change))


@pytest.mark.thorough
@since_2_13
@run_on_ranks(world=3, gloo=True, settings=RING)
def test_the_memory_of_buffers_may_change_on_one_rank_alone():
    """Whichever that is: nothing of what it does then concerns the others."""
    changes = [(SMALL, resized), (LARGE, last_format), ((2, 3, 4, 5), last_format)]
    changes += [(shape, change) for shape in (SMALL, LARGE) for change in (moved, sliced)]
    for alone, (shape, change) in product(range(3), changes):
        own_change = change if syncengine.rank() == alone else lambda module: module.b.copy_(own(module.b))
        torch.manual_seed(syncengine.rank())
        both(partial(kept, shape), partial(buffers_after, change=own_change))


def make_two(b: int = 3, c: int = 4) -> Kept:
    return Kept(b=torch.zeros(b), c=torch.zeros(c))


def one_rank_changes(alone: int, module: Kept, change: Change) -> tuple[str, str]:
    model = trained(module, 1)
    module.change = change if syncengine.rank() == alone else module.change
    model(data()).backward()
    return outcome(lambda: [model(data()).backward() for _ in range(2)])


# The buffers, what becomes of them on one rank alone, and what the error says of the others' and of those.
DIFFERENCES: dict[str, tuple[Callable[[], Kept], Change, str, str]] = {
    "grown": (kept, grown, "b: float32 (6,)", "b: float32 (7,)"),
    "swapped": (make_two, swapped, "b: float32 (3,)", "b: float32 (4,)"),
    "cast": (kept, cast, "b: float32 ", "b: float64 "),
    "turned": (partial(kept, (5, 3)), becomes(lambda b: b.T.contiguous()), "b: float32 (5, 3)", "b: float32 (3, 5)"),
    "flattened": (partial(kept, LARGE), becomes(torch.flatten), "b: float32 (2, 8, 40, 40)", "b: float32 (25600,)"),
    "dropped": (make_two, lambda module: setattr(module, "c", None), "c: float32 (4,)", "b: float32 (3,), digest"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("alone", [0, 1, 2])
@run_on_ranks(world=3)
def test_buffers_that_differ_between_ranks_are_named(alone: int, difference: str):
    make, change, theirs, its = DIFFERENCES[difference]
    kind, text = one_rank_changes(alone, make(), change)
    assert kind == "Mismatch", (kind, text)
    assert "a copy of the buffers of Parallel(Kept) (" in text, text
    assert theirs in text or its in text, text
    assert f"rank {alone} " in text, text


@run_on_ranks()
def test_all_ranks_may_give_their_buffers_other_sizes():
    """Some in each forward: what they agreed on before holds no more."""
    model = syncengine.Parallel(Kept(b=torch.zeros(1), c=torch.zeros(20_000)))
    for size in (1, 7, 7, 30_000, 3, 0, 1):
        if size:
            model.module.change = lambda module, size=size: setattr(module, "b", own(torch.empty(size)))
        else:
            model.module.change = lambda module: module.c.resize_(5).fill_(syncengine.rank())
        model(data()).backward()
        before = [b.clone() for b in model.module.buffers()]
        model.module.change = lambda module: None
        model(data()).backward()
        for mine, b in zip(before, model.module.buffers(), strict=True):
            syncengine.broadcast(mine, 0)
            assert torch.equal(mine, b)


@since_2_13
@run_on_ranks(gloo=True)
def test_buffers_may_share_memory():
    def overlapping(first: slice, second: slice, size: int = 40) -> Kept:
        memory = own(torch.empty(size))
        return Kept(b=memory[first], c=memory[second])

    def change(module: nn.Module) -> None:
        module.b.copy_(own(module.b))
        module.c.mul_(2)

    small = [(slice(0, 20), slice(0, 20)), (slice(0, 20), slice(10, 40)), (slice(0, 40, 2), slice(1, 40, 2))]
    for slices in [*small, (slice(0, 30_000), slice(10, 30_010), 40_000)]:
        torch.manual_seed(syncengine.rank())
        both(partial(overlapping, *slices), partial(buffers_after, change=change))


def shared(module: nn.Module) -> None:
    memory = own(torch.empty(7))
    module.b.data, module.c.data = memory[:3], memory[2:6]


def shared_alone(alone: int, at_construction: bool) -> tuple[str, str]:
    module = make_two()
    if not at_construction:
        return one_rank_changes(alone, module, shared)
    if syncengine.rank() == alone:
        shared(module)
    return outcome(lambda: syncengine.Parallel(module))


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("at_construction", [True, False])
def test_buffers_that_share_memory_on_one_rank_alone_are_named(pool: RankPool, alone: int, at_construction: bool):
    """There they can't have the values that they have elsewhere."""
    told = pool.run(shared_alone, alone, at_construction)
    assert [kind for kind, _ in told] == ["Mismatch"] * 2
    named = [re.search(r"Parallel\(Kept\).*b: .*shares memory with c", text) for _, text in told]
    assert all(named) if at_construction else any(named)


@since_2_13
@pytest.mark.parametrize("last", [0, 1, 2])
@run_on_ranks(world=3, gloo=True, settings=RING)
def test_in_a_join_context_the_last_ranks_buffers_may_be_anywhere(last: int):
    """A rank that has joined has buffers that no forward of its own has moved."""

    def step(model: nn.Module) -> list[torch.Tensor]:
        model.module.change = moved
        with model.join():
            for i in range(2 + 3 * (syncengine.rank() == last)):
                model(data(i)).backward()
        return list(model.module.buffers())

    for shape in (SMALL, LARGE):
        both(partial(kept, shape), step)


@run_on_ranks()
def test_buffers_that_differ_in_the_first_forward_or_in_final_models_are_named():
    model = syncengine.Parallel(kept((3 + syncengine.rank(),)), init_sync=False)  # without a common start
    for _ in range(2):  # they are compared again, since they were not the same
        with pytest.raises(Mismatch, match=r"the buffers of Parallel\(Kept\).*b: float32 \(3,\).*b: float32 \(4,\)"):
            model(data())
    model = syncengine.Parallel(kept())
    with pytest.raises(Mismatch, match=r"the final models differ.*b: float32 \(6,\).*b: float32 \(7,\)"), model.join():
        model(data()).backward()
        if syncengine.rank() == 1:
            grown(model.module)


@run_on_ranks()
def test_a_hook_on_buffers_is_told_which_of_them_differ():
    def hook(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
        model._default_broadcast_coalesced(list(buffers.values()))

    model = syncengine.Parallel(kept())
    model._register_buffer_comm_hook(model, hook)
    model.module.change = moved
    for i in range(3):
        model(data(i)).backward()
        agreed = model.module.b.clone()
    if syncengine.rank() == 1:
        grown(model.module)
    with pytest.raises(Mismatch, match=r"hook on buffers differ.*b: float32 \(6,\).*b: float32 \(7,\)"):
        model(data()).backward()
    assert agreed.shape == SMALL
