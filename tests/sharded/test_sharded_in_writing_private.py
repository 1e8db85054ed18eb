"""What rank 0 writes in `writing()` to what is not shared: frozen parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pool import RankPool, run_on_ranks
from sharded_training import different_weights, error_of, sharded, train
from test_hosts import run, start
from torch import nn

import syncengine


def with_a_frozen_part() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 200), nn.BatchNorm1d(200), nn.Linear(200, 100), nn.Linear(100, 2))
    net[0].requires_grad_(False)
    net[2].weight.requires_grad_(False)  # too large to travel with others
    return net


def load(net: nn.Module) -> None:
    net.load_state_dict({name: torch.full_like(value, 2) for name, value in net.state_dict().items()})


def load_a_part(net: nn.Module) -> None:
    net[0].load_state_dict({name: torch.full_like(value, 2) for name, value in net[0].state_dict().items()})


def assign_a_part(net: nn.Module) -> None:
    net[0].load_state_dict(
        {name: torch.full_like(value, 2) for name, value in net[0].state_dict().items()}, assign=True
    )


def by_data(net: nn.Module) -> None:
    """Which versions do not see."""
    net[2].weight.data.fill_(2)


def point_elsewhere(net: nn.Module) -> None:
    net[0].weight.data = torch.full_like(net[0].weight, 2).t().contiguous().t()


def statistics(net: nn.Module) -> None:
    net[1].running_mean = torch.full([200], 2.0)


CHANGES = [load, load_a_part, assign_a_part, by_data, point_elsewhere, statistics]


def one_changes(change: Callable[[nn.Module], None]) -> tuple[list[str], dict[str, torch.Tensor]]:
    ours, theirs = with_a_frozen_part(), with_a_frozen_part()
    model = syncengine.Parallel(ours, forward_sync_buffers=False)
    optimizer = syncengine.ShardedOptimizer(ours.parameters(), torch.optim.AdamW, lr=1e-2)
    train(model, optimizer, 2)
    theirs.load_state_dict(ours.state_dict())
    with optimizer.writing() as may_write:
        if may_write:
            change(ours)
    change(theirs)
    wrong = different_weights(ours, theirs)
    train(model, optimizer, 2)
    return wrong, {name: p.detach().clone() for name, p in ours.named_parameters()}


@pytest.mark.parametrize("change", CHANGES)
def test_all_ranks_get_what_one_has_written(pool: RankPool, change: Callable[[nn.Module], None]):
    (first, weights), (second, others) = pool.run(one_changes, change)
    assert first == second == []  # other statistics stay each rank's own
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


def on_hosts(hosts: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    start(hosts)
    return one_changes(load)


def test_all_hosts_get_it(pool: RankPool):
    answers = run(pool, on_hosts, "aab")
    assert [wrong for wrong, _ in answers] == [[]] * 3


def one_fails() -> list[str]:
    net = with_a_frozen_part()
    model, optimizer = sharded(net)
    train(model, optimizer, 1)

    def go() -> None:
        with optimizer.writing() as may_write:
            if may_write:
                load_a_part(net)
                raise ValueError("no")

    return [error_of(go), str(bool((net[0].weight == 2).all())), error_of(lambda: train(model, optimizer, 1))]


def test_all_ranks_get_it_after_an_error(pool: RankPool):
    (first, *others), (second, *rest) = pool.run(one_fails)
    assert first == "ValueError: no"
    assert second.startswith("Aborted: rank 0: in writing(): ValueError: no")
    assert others == rest == ["True", ""]


@run_on_ranks()
def test_another_shape_is_named():
    net = with_a_frozen_part()
    model, optimizer = sharded(net)
    train(model, optimizer, 1)

    def go() -> None:
        with optimizer.writing() as may_write:
            if may_write:
                net[0].bias.data = net[0].bias.data[:7]

    text = error_of(go)
    assert text.startswith("Mismatch: what rank 0 has written in writing() differs between ranks"), text
    assert "rank 0 has [0.bias: float32 (7,)], rank 1 has [0.bias: float32 (200,)]" in text


@run_on_ranks()
def test_a_graph_from_before_can_not_be_used():
    net = with_a_frozen_part()
    model, optimizer = sharded(net)
    train(model, optimizer, 1)
    x = torch.ones(2, 24, requires_grad=True)
    loss = nn.functional.linear(x, net[2].weight[:, :24]).sum()
    with optimizer.writing() as may_write, torch.no_grad():
        if may_write:
            net[2].weight.mul_(2)
    text = error_of(loss.backward)
    assert "has been modified by an inplace operation" in text
