"""What one rank may do in `writing()`, and what the others find after it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from pool import RankPool, run_on_ranks
from sharded_training import (
    batch,
    different_weights,
    error_of,
    make,
    not_divided,
    plain,
    sharded,
    train,
    with_an_older_graph,
)
from torch import nn

import syncengine


def load(net: nn.Module) -> None:
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def load_a_part(net: nn.Module) -> None:
    net.head.load_state_dict({name: value + 1 for name, value in net.head.state_dict().items()})


def point_elsewhere(net: nn.Module) -> None:
    net.head.weight.data = net.head.weight.data + 1


def swap(net: nn.Module) -> None:
    """The first two parameters of one shape."""
    first, second = next(p for p in itertools.combinations(net.parameters(), 2) if p[0].shape == p[1].shape)
    first.data, second.data = second.data, first.data


def transpose(net: nn.Module) -> None:
    square = next(p for p in net.parameters() if p.dim() == 2 and p.shape[0] == p.shape[1])
    square.data = square.data.t()


@pytest.mark.parametrize("change", [load, load_a_part, point_elsewhere, swap, transpose])
@run_on_ranks()
def test_all_ranks_see_what_one_has_loaded(change: Callable[[nn.Module], None]):
    ours, theirs = make(), make()
    model, optimizer = sharded(ours)
    train(model, optimizer, 2)
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


def write_and_share_memory(net: nn.Module) -> None:
    with torch.no_grad():
        net.head.weight.add_(1)
    net.share_memory()


@pytest.mark.parametrize("elements", [True, False])
@pytest.mark.parametrize("change", [load, point_elsewhere, send, write_and_share_memory])
@run_on_ranks(world=3)
def test_training_goes_on_in_common(change: Callable[[nn.Module], None], elements: bool):
    """Beside plain training, so that each rank's part of later steps reaches the others."""
    ours, theirs = make(), make()
    (model, optimizer), (reference, plain_optimizer) = sharded(ours, elements=elements), plain(theirs)
    train(model, optimizer, 2)
    train(reference, plain_optimizer, 2)
    with optimizer.writing() as may_write:
        if may_write:
            change(ours)
    change(theirs)
    train(model, optimizer, range(2, 5))
    train(reference, plain_optimizer, range(2, 5))
    return different_weights(ours, theirs) + not_divided(ours, optimizer)


@pytest.mark.parametrize("change", [load, point_elsewhere, send])
@run_on_ranks()
def test_only_one_rank_may_load(change: Callable[[nn.Module], None]):
    ours, theirs = make(), make()
    model, optimizer = sharded(ours)
    train(model, optimizer, 2)
    theirs.load_state_dict(ours.state_dict())

    def go() -> None:
        with optimizer.writing() as may_write:
            if not may_write:
                change(ours)

    text = error_of(go)
    wrong = different_weights(ours, theirs)
    train(model, optimizer, 2)
    wrong += not_divided(ours, optimizer)
    assert "rank 1: in writing(): " in text
    assert "(on a rank that must not write)" in text
    assert wrong == []


@run_on_ranks()
def test_another_dtype_is_refused():
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)

    def go() -> None:
        with optimizer.writing() as may_write:
            if may_write:
                net.head.half()

    text = error_of(go)
    dtype = str(net.head.weight.dtype)
    after = error_of(lambda: train(model, optimizer, 1))
    assert "rank 0: in writing(): parameter head.weight has another shape or dtype now" in text
    assert (dtype, after) == ("torch.float32", "")


@run_on_ranks()
def test_a_graph_from_before_an_error_can_not_be_used():
    net, _, optimizer, loss = with_an_older_graph()
    try:
        with optimizer.writing() as may_write, torch.no_grad():
            if may_write:
                net.head.weight.mul_(2)
            raise ValueError
    except ValueError:
        pass
    text = error_of(loss.backward)
    assert "has been modified by an inplace operation" in text


@pytest.mark.parametrize("way", ["copy", "data"])
@run_on_ranks()
def test_the_writer_may_evaluate_what_it_has_written(way: str):
    """Rank 0 alone, with other weights than those that are trained."""
    ours, theirs, other = make(), make(), make()
    (model, optimizer), (reference, plain_optimizer) = sharded(ours), plain(theirs)
    train(model, optimizer, 2)
    train(reference, plain_optimizer, 2)
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
    train(reference, plain_optimizer, range(2, 4))
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


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("mover", [0, 1])
@run_on_ranks()
def test_what_was_sent_is_loaded_anew(mover: int, writes: bool):
    """Loading everything anew makes good for weights that have moved elsewhere on one rank."""
    ours, theirs = make(), make()
    (model, optimizer), (reference, plain_optimizer) = sharded(ours), plain(theirs)
    best = {name: value.clone() for name, value in theirs.state_dict().items()}
    train(model, optimizer, 2)
    train(reference, plain_optimizer, 2)
    if syncengine.rank() == mover:
        ours.share_memory()
    for net in (ours, theirs):
        net.load_state_dict(best)
    if writes:
        with optimizer.writing():
            pass
    train(model, optimizer, range(2, 5))
    train(reference, plain_optimizer, range(2, 5))
    return different_weights(ours, theirs) + not_divided(ours, optimizer)


@run_on_ranks()
def test_later_writes_are_named():
    """The forward's own look at the weights is back once writing() is over, also after an error."""
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 1)
    try:
        with optimizer.writing():
            raise ValueError
    except ValueError:
        pass

    def go() -> None:
        syncengine.barrier()  # a rank that is quick would end the others' writing()
        with torch.no_grad():
            net.head.weight.mul_(1)
        model(batch(0))

    text = error_of(go)
    assert "parameter head.weight was written to outside of ShardedOptimizer.step()" in text


def leaves() -> list[str]:
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 1)
    try:
        with optimizer.writing() as may_write:
            if may_write:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        return ["KeyboardInterrupt", error_of(optimizer.step)]
    except syncengine.errors.SyncError as error:
        return [f"{type(error).__name__}: {error}", error_of(optimizer.step)]
    return []


def test_a_rank_that_is_interrupted_ends_the_others(pool: RankPool):
    (first, first_step), (second, second_step) = pool.run(leaves)
    assert first == "KeyboardInterrupt"
    for text in (second, first_step, second_step):
        assert "TornWeights" in text
        assert "rank 0 left writing(): KeyboardInterrupt" in text
