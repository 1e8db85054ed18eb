"""What one rank may do in `writing()`, and what the others find after it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from pool import RankPool, run_on_ranks
from sharded_training import (
    batch,
    copies,
    different_weights,
    error_in_writing,
    error_of,
    make,
    not_divided,
    plain,
    sharded,
    train,
    trained,
    with_an_older_graph,
)
from torch import nn

import syncengine


def load(net: nn.Module) -> None:
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def point_elsewhere(net: nn.Module) -> None:
    net.head.weight.data = net.head.weight.data + 1


def swap(net: nn.Module) -> None:
    """The first two parameters of one shape."""
    first, second = next(p for p in itertools.combinations(net.parameters(), 2) if p[0].shape == p[1].shape)
    first.data, second.data = second.data, first.data


def transpose(net: nn.Module) -> None:
    square = next(p for p in net.parameters() if p.dim() == 2 and p.shape[0] == p.shape[1])
    square.data = square.data.t()


@pytest.mark.parametrize("change", [swap, transpose])
@run_on_ranks()
def test_all_ranks_see_what_one_has_loaded(change: Callable[[nn.Module], None]):
    theirs = make()
    ours, model, optimizer = trained(2)
    theirs.load_state_dict(ours.state_dict())
    with optimizer.writing() as may_write:
        if may_write:
            change(ours)
    change(theirs)
    wrong = different_weights(ours, theirs)
    train(model, optimizer, 2)
    return wrong + not_divided(ours, optimizer)


def send(net: nn.Module) -> None:
    """As through a queue to an evaluator: torch moves what each storage holds, in place."""
    ForkingPickler.dumps(net.state_dict())


@pytest.mark.parametrize("change", [load, point_elsewhere, send])
@run_on_ranks()
def test_only_one_rank_may_load(change: Callable[[nn.Module], None]):
    theirs = make()
    ours, model, optimizer = trained(2)
    theirs.load_state_dict(ours.state_dict())
    text = error_in_writing(optimizer, lambda: change(ours), writer=False)
    wrong = different_weights(ours, theirs)
    train(model, optimizer, 2)
    wrong += not_divided(ours, optimizer)
    kind = "Aborted" if syncengine.rank() == 0 else "InvalidUsage"
    what = "a state dict was loaded into the model" if change is load else "parameter "
    assert text.startswith(f"{kind}: rank 1: in writing(): {what}"), text
    assert "(on a rank that must not write)" in text
    assert wrong == []


@run_on_ranks()
def test_another_dtype_is_refused():
    net, model, optimizer = trained(2)
    text = error_in_writing(optimizer, net.head.half)
    assert "rank 0: in writing(): parameter head.weight has another shape or dtype now" in text
    assert net.head.weight.dtype is torch.float32
    train(model, optimizer, 1)


@run_on_ranks()
def test_a_graph_from_before_an_error_can_not_be_used():
    net, _, optimizer, loss = with_an_older_graph()
    with suppress(ValueError), optimizer.writing() as may_write, torch.no_grad():
        if may_write:
            net.head.weight.mul_(2)
        raise ValueError
    assert "has been modified by an inplace operation" in error_of(loss.backward)


@pytest.mark.parametrize("way", ["copy", "data"])
@run_on_ranks()
def test_the_writer_may_evaluate_what_it_has_written(way: str):
    """Rank 0 alone, with other weights than those that are trained."""
    other, theirs = make(), make()
    ours, model, optimizer = trained(2)
    train(*plain(theirs), 4)
    teacher = syncengine.Parallel(make())
    wrong = []
    with optimizer.writing() as may_write, torch.no_grad():
        if may_write:
            own = [p.clone() for p in ours.parameters()]
            for p, average in zip(ours.parameters(), other.parameters(), strict=True):
                if way == "copy":
                    p.copy_(average)
                else:
                    p.data = average.clone()
            wrong = [] if torch.equal(model(batch(0)), other(batch(0))) else ["evaluation"]
            teacher(batch(0))
            for p, before in zip(ours.parameters(), own, strict=True):
                p.copy_(before)
    train(model, optimizer, range(2, 4))
    return wrong + different_weights(ours, theirs) + not_divided(ours, optimizer)


class Normalized(nn.Module):
    """With buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = make(), nn.BatchNorm1d(batch(0).shape[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))


@run_on_ranks()
def test_the_writer_may_evaluate_a_model_with_buffers():
    ours, theirs = Normalized(), Normalized()
    theirs.load_state_dict(ours.state_dict())
    (model, optimizer), (reference, plain_optimizer) = sharded(ours), plain(theirs)
    for steps in (range(2), range(2, 4)):
        train(model, optimizer, steps)
        train(reference, plain_optimizer, steps)
        with optimizer.writing() as may_write, torch.no_grad():
            for _ in range(2 * may_write):
                model.eval()(batch(0))
        model.train()
    return different_weights(ours, theirs) + [n for n, b in ours.named_buffers() if not b.equal(theirs.get_buffer(n))]


@run_on_ranks()
def test_later_writes_are_named():
    """The forward's own look at the weights is back once writing() is over, also after an error."""
    net, model, optimizer = trained(1)
    with suppress(ValueError), optimizer.writing():
        raise ValueError

    def go() -> None:
        syncengine.barrier()  # a rank that is quick would end the others' writing()
        with torch.no_grad():
            net.head.weight.mul_(1)
        model(batch(0))

    assert "parameter head.weight was written to outside of ShardedOptimizer.step()" in error_of(go)


@run_on_ranks()
def test_a_rank_that_is_interrupted_ends_the_others():
    *_, optimizer = trained(1)
    with pytest.raises((KeyboardInterrupt, syncengine.errors.TornWeights)) as left, optimizer.writing() as may_write:
        if may_write:
            raise KeyboardInterrupt
    assert left.type is (KeyboardInterrupt if may_write else syncengine.errors.TornWeights)
    step = error_of(optimizer.step)
    assert step.startswith("TornWeights")
    for text in (step, step if may_write else str(left.value)):
        assert "rank 0 left writing(): KeyboardInterrupt" in text


def with_a_frozen_part() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 200), nn.BatchNorm1d(200), nn.Linear(200, 100), nn.Linear(100, 2))
    net[0].requires_grad_(False)
    net[2].weight.requires_grad_(False)  # too large to travel with others
    return net


def load_twos(net: nn.Module, **options: bool) -> None:
    net.load_state_dict({name: torch.full_like(value, 2) for name, value in net.state_dict().items()}, **options)


def load_a_part(net: nn.Module) -> None:
    load_twos(net[0])


def assign_a_part(net: nn.Module) -> None:
    load_twos(net[0], assign=True)


def by_data(net: nn.Module) -> None:
    """Which versions do not see."""
    net[2].weight.data.fill_(2)


def point_a_frozen_one_elsewhere(net: nn.Module) -> None:
    net[0].weight.data = torch.full_like(net[0].weight, 2).t().contiguous().t()


def statistics(net: nn.Module) -> None:
    net[1].running_mean = torch.full([200], 2.0)


CHANGES = [load_twos, load_a_part, assign_a_part, by_data, point_a_frozen_one_elsewhere, statistics]


def one_changes(change: Callable[[nn.Module], None]) -> tuple[list[str], list[torch.Tensor]]:
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
    return wrong, copies(ours)


@pytest.mark.parametrize("change", CHANGES)
def test_all_ranks_get_what_one_has_written(pool: RankPool, change: Callable[[nn.Module], None]):
    (first, weights), (second, others) = pool.run(one_changes, change)
    assert first == second == []  # other statistics stay each rank's own
    assert all(map(torch.equal, weights, others))


def test_all_hosts_get_it(pool: RankPool):
    assert [wrong for wrong, _ in pool.run(one_changes, load_twos, hosts="aab")] == [[]] * 3


@run_on_ranks()
def test_all_ranks_get_it_after_an_error():
    net, model, optimizer = trained(1, with_a_frozen_part())

    def fail() -> None:
        load_a_part(net)
        raise ValueError("no")

    text = error_in_writing(optimizer, fail)
    if syncengine.rank() == 0:
        assert text == "ValueError: no"
    else:
        assert text.startswith("Aborted: rank 0: in writing(): ValueError: no")
    assert bool((net[0].weight == 2).all())
    train(model, optimizer, 1)


@run_on_ranks()
def test_another_shape_of_a_frozen_one_is_named():
    net, _, optimizer = trained(1, with_a_frozen_part())
    text = error_in_writing(optimizer, lambda: setattr(net[0].bias, "data", net[0].bias.data[:7]))
    assert text.startswith("Mismatch: what rank 0 has written in writing() differs between ranks"), text
    assert "rank 0 has [0.bias: float32 (7,)], rank 1 has [0.bias: float32 (200,)]" in text


@run_on_ranks()
def test_a_graph_of_a_frozen_one_can_not_be_used():
    net, _, optimizer = trained(1, with_a_frozen_part())
    x = torch.ones(2, 24, requires_grad=True)
    loss = nn.functional.linear(x, net[2].weight[:, :24]).sum()
    assert error_in_writing(optimizer, lambda: net[2].weight.mul_(2)) == ""
    assert "has been modified by an inplace operation" in error_of(loss.backward)
