"""Who may write to shared weights, and what happens to others."""

import gc
from collections.abc import Callable

import pytest
import torch
from pool import run_on_ranks
from sharded_training import (
    backward,
    batch,
    copies,
    different_weights,
    error_of,
    is_unchanged,
    make,
    not_divided,
    plain,
    sharded,
    train,
    trained,
    unlike_plain,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncengine


@torch.no_grad()
def sharpness_aware(net: nn.Module) -> None:
    """SAM writes so between its two backwards."""
    torch._foreach_add_([net.head.weight], [torch.ones_like(net.head.weight)], alpha=0.05)


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "scale": torch.no_grad()(lambda net: net.head.weight.mul_(1.0)),
    "initialize": lambda net: nn.init.zeros_(net.head.weight),
    "sharpness_aware": sharpness_aware,
    "cast": lambda net: net.head.double().float(),
    "point_elsewhere": lambda net: setattr(net.head.weight, "data", net.head.weight.data.clone()),
}


@pytest.mark.parametrize("before", ["forward", "step"])
@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize("how", WRITES)
@run_on_ranks()
def test_a_write_outside_of_step_is_named(how: str, ranks: list[int], before: str):
    net = make()
    model, optimizer = sharded(net)

    def go() -> None:  # a rank that is quick may end the calls of one that is not as far
        train(model, optimizer, 2)
        if before == "step":
            optimizer.zero_grad()
            backward(model, 2)
        if syncengine.rank() in ranks:
            WRITES[how](net)
        if before == "step":
            optimizer.step()
        else:
            train(model, optimizer, 1)

    text = error_of(go)
    assert "parameter head.weight" in text, text
    assert ("lies in other memory" if how in ("cast", "point_elsewhere") else "the weights are void") in text, text
    assert any(f"rank {rank}: parameter" in text for rank in ranks), text
    assert error_of(optimizer.step) != ""


class Sending(torch.optim.SGD):
    """In whose steps another thread sends the weights to a process, as that of a queue does."""

    when: Callable[[], None] | None = None

    def step(self, closure: None = None) -> None:
        super().step()
        if Sending.when is not None:
            Sending.when()


@pytest.mark.parametrize("what", ["weight", "state"])
@run_on_ranks()
def test_what_moves_during_a_step_is_named(what: str):
    net, model, optimizer = trained(2, make(), Sending, momentum=0.9, elements=True)

    def send() -> None:
        tensor = net.head.weight if what == "weight" else optimizer.state[net.head.weight]["momentum_buffer"]
        tensor.share_memory_()

    def go() -> None:  # the other rank may hear of it before it has left its step
        Sending.when = send if syncengine.rank() == 0 else None
        try:
            train(model, optimizer, 1)
        finally:
            Sending.when = None
        train(model, optimizer, 1)

    text = error_of(go)
    assert "lies in other memory" in text
    assert ("parameter head.weight" if what == "weight" else "'momentum_buffer' of parameter head.weight") in text


@run_on_ranks()
def test_a_plain_optimizer_on_shared_weights_is_stopped():
    net, model, optimizer = trained(2)
    before = net.head.weight.detach().clone()
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    assert "SGD.step() would write to parameter layers.0.weight" in error_of(other.step)
    assert torch.equal(before, net.head.weight)
    train(model, optimizer, 1)  # nothing has been written, so it goes on
    optimizer.release()
    syncengine.barrier()
    other.step()
    assert "released" in error_of(optimizer.step)


@run_on_ranks()
def test_weights_are_private_once_the_optimizer_is_gone():
    net, _, optimizer = trained(2)
    syncengine.barrier()
    del optimizer
    gc.collect()
    syncengine.barrier()
    with torch.no_grad():
        net.head.weight.fill_(syncengine.rank())
    syncengine.barrier()
    assert bool((net.head.weight == syncengine.rank()).all())
    torch.optim.SGD(net.parameters(), lr=0.1).step()


@run_on_ranks()
def test_assign_is_refused():
    net, model, optimizer = trained(1)
    text = error_of(lambda: net.load_state_dict(net.state_dict(), assign=True))
    train(model, optimizer, 1)
    assert "load_state_dict(assign=True) would put another tensor in the place of parameter" in text


@pytest.mark.parametrize("elements", [True, False])
@run_on_ranks()
def test_step_alone_changes_weights_and_the_versions_of_all_of_them(elements: bool):
    net, model, optimizer = trained(1, elements=elements)
    weights = copies(net)
    before = [p._version for p in net.parameters()]
    optimizer.zero_grad()
    backward(model, 1)
    syncengine.barrier()
    assert is_unchanged(net, weights)
    assert before == [p._version for p in net.parameters()]
    optimizer.step()
    assert all(p._version > version for p, version in zip(net.parameters(), before, strict=True))


def with_a_frozen_part() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 200), nn.BatchNorm1d(200), nn.Linear(200, 100), nn.Linear(100, 2))
    net[0].requires_grad_(False)
    return net


@run_on_ranks(world=3)
def test_all_ranks_load_what_one_has_computed():
    """docs/sharding.md has this way to write to weights, and the way to evaluate others on one rank."""
    ours, theirs = with_a_frozen_part(), with_a_frozen_part()
    (model, optimizer), (reference, plain_optimizer) = sharded(ours), plain(theirs)
    train(model, optimizer, 2)
    train(reference, plain_optimizer, 2)
    state = {name: value.clone() for name, value in ours.state_dict().items()}
    if syncengine.rank() == 0:
        for value in state.values():
            value.mul_(2)
        before = copies(ours)
        doubled = torch.func.functional_call(ours.eval(), state, torch.ones(2, 24))
        assert is_unchanged(ours, before)
    for value in state.values():
        syncengine.broadcast(value, 0)
    for net in ours, theirs:
        net.load_state_dict(state)
    if syncengine.rank() == 0:
        assert torch.equal(doubled, theirs.eval()(torch.ones(2, 24)))
    ours.train(), theirs.train()
    wrong = different_weights(ours, theirs)
    train(model, optimizer, range(2, 4))
    train(reference, plain_optimizer, range(2, 4))
    return wrong + different_weights(ours, theirs) + not_divided(ours, optimizer)


class Late(torch.autograd.Function):
    """Reads a weight in backward, long after the weight's own gradient was ready; autograd does not know of it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.weight.square().sum(), None


class ReadsLate(nn.Module):
    """The first part is computed again in backward, where its weights are used again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = make("odd"), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        return self.last(Late.apply(hidden, self.last.weight.detach()))


@run_on_ranks(world=3)
def test_weights_that_backward_reads_late():
    return unlike_plain(5, ReadsLate)


@run_on_ranks()
def test_a_graph_from_before_the_step_can_not_be_used():
    _, model, optimizer = trained(1)
    with model.no_sync():
        loss = model(batch(1)).square().mean()
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert "has been modified by an inplace operation" in error_of(loss.backward)


@pytest.mark.parametrize("elements", [True, False])
@run_on_ranks()
def test_a_parameter_that_has_other_strides_is_named(elements: bool):
    """The same memory, read in another order, on all ranks alike."""
    net, model, optimizer = trained(2, make("odd"), elements=elements)
    weight = net.second.weight

    def turn() -> None:  # a rank that is ahead may end the other's barrier
        syncengine.barrier()
        weight.data = weight.data.view(weight.shape[::-1]).t()
        train(model, optimizer, 1)

    text = error_of(turn)
    assert "parameter second.weight lies in other memory" in text and "or has another shape or strides" in text
