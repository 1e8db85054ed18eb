"""Memory for state that comes parameter by parameter: made once, not in each step that brings some."""

import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from marks import mostly_nightly
from pool import run_on_ranks
from sharded_training import bytes_of, common_memory, differences, different_weights, is_common, not_divided, snapshot
from torch import nn

import syncengine
from syncengine.sharded import memory
from syncengine.sharded.block import part


class Heads(nn.Module):
    """One for each task; a batch has one task."""

    def __init__(self, count: int, widths: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(24, 8)
        self.heads = nn.ModuleList(nn.Linear(8, widths[i % len(widths)]) for i in range(count))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.heads[task](self.body(x))


class Rows(torch.optim.SGD):
    """Its state has a shape of its own, as Adafactor's; and a number."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                row = p.grad.square().sum(-1)
                state["row"] = row if "row" not in state else state["row"].add_(row)
                state["count"] = state.get("count", 0) + 1


KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Rows": (Rows, {"elements": False}),
    "whole": (torch.optim.AdamW, {"elements": False}),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, task: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(1000 * task + syncengine.rank())
    model(torch.randn(4, 24, generator=generator), task).square().sum().backward()
    optimizer.step()


@pytest.mark.thorough
@pytest.mark.parametrize("widths", [pytest.param((1,), marks=pytest.mark.nightly), (1, 3, 70)], ids=str)
@pytest.mark.parametrize("kind", mostly_nightly(KINDS, 0))
@run_on_ranks()
def test_state_that_comes_later_takes_no_more_memories(kind: str, widths: tuple[int, ...]):
    make, more = KINDS[kind]
    options = {key: value for key, value in more.items() if key != "elements"}
    ours, theirs = Heads(12, widths), Heads(12, widths)
    models = [syncengine.Parallel(net, find_unused_parameters=True) for net in (ours, theirs)]
    optimizer = syncengine.ShardedOptimizer(ours.parameters(), make, lr=1e-2, **more)
    reference = make(theirs.parameters(), lr=1e-2, **options)
    counts = []
    for task in range(12):
        for model, one in zip(models, (optimizer, reference), strict=True):
            step(model, one, task)
        counts.append(len(common_memory()))
    links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    descriptors = sum("syncengine-common" in str(link.readlink()) for link in links)
    wrong = [] if descriptors == counts[-1] else [f"{descriptors} descriptors of {counts[-1]} memories"]
    for p, state in optimizer.state.items():
        wrong += [key for key, v in state.items() if getattr(v, "shape", None) == p.shape and not is_common(v)]
    wrong += not_divided(ours, optimizer) + different_weights(ours, theirs)
    wrong += differences(reference.state_dict(), optimizer.state_dict())
    optimizer.load_state_dict(snapshot(optimizer))  # all of it anew, in one
    for model, one in zip(models, (optimizer, reference), strict=True):
        step(model, one, 3)
    assert wrong + different_weights(ours, theirs) == []
    assert len(set(counts)) <= 4, counts  # each is as large as all before it


@pytest.mark.thorough
@run_on_ranks()
def test_more_steps_with_news_than_descriptors():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    net = Heads(60)
    model = syncengine.Parallel(net, find_unused_parameters=True)
    optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 30, limit[1]))
    try:
        for task in range(60):
            step(model, optimizer, task)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.thorough
@run_on_ranks()
def test_room_takes_no_memory_until_it_is_used():
    """Bytes in memory of what this process maps for state that is not there yet."""
    net = Heads(2, (2_000, 500_000))
    model = syncengine.Parallel(net, find_unused_parameters=True)
    optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3)
    for task in (1, 0):
        step(model, optimizer, task)
    place = optimizer.state[net.heads[0].weight]["exp_avg"].data_ptr()
    begin, end = next(each for each in common_memory() if each[0] <= place < each[1])
    assert end - begin > 2 * net.heads[1].weight.nbytes
    assert bytes_of((begin, end), "Rss") < 1 << 20


@pytest.mark.thorough
@run_on_ranks()
def test_no_room_is_made_where_memory_is_short():
    """On one rank, for the room, not for what is needed at once."""
    ours, theirs = Heads(2, (2_000, 500_000)), Heads(2, (2_000, 500_000))
    models = [syncengine.Parallel(net, find_unused_parameters=True) for net in (ours, theirs)]
    optimizer = syncengine.ShardedOptimizer(ours.parameters(), torch.optim.AdamW, lr=1e-3)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    step(models[0], optimizer, 1)
    step(models[1], reference, 1)
    make, refused = memory.MemoryExchange, []

    def fd_exchange(size: int) -> Any:
        if size > 1 << 20:
            refused.append(size)
            raise syncengine.errors.InvalidUsage("short of memory")
        return make(size)

    with mock.patch.object(memory, "MemoryExchange", fd_exchange if syncengine.rank() == 0 else make):
        step(models[0], optimizer, 0)
    before = len(common_memory())
    step(models[1], reference, 0)
    for task in (1, 0):
        step(models[0], optimizer, task)
        step(models[1], reference, task)
    assert different_weights(ours, theirs) == []
    assert (len(refused), len(common_memory())) == (1 - syncengine.rank(), before)


def test_memory_that_an_exception_leaves_common_is_not_private():
    def detach() -> bool:
        raise MemoryError

    claim = mock.Mock()
    assert not part([mock.Mock(detach=detach)], [claim])
    claim.give_up.assert_not_called()
    assert part([mock.Mock(detach=lambda: True)], [claim])
    claim.give_up.assert_called_once()
