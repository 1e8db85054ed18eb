"""A rank ends, or fails, somewhere in an update: survivors know whether the weights are whole, and of which step."""

import copy
import gc
import io
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from faults import needs_hooks, set_fault
from pool import RankPool, run_on_ranks
from sharded_training import batch, digest, error_of, make, plain, sharded, snapshot, train, trained
from torch import nn

import syncengine
from syncengine.sharded.update import Update


def stops() -> list:
    """This rank is stopped in the middle of its second update, and goes on when the others have given up."""
    set_fault(1, "updating:2:stop")
    syncengine.init(timeout=3.0)
    net = make()
    return [error_of(lambda: trained(4, net)), error_of(net.state_dict)]


@pytest.mark.thorough
@needs_hooks
def test_a_stopped_rank_leaves_torn_weights(pool: RankPool):
    with pool.spawn_ranks(stops, world=3, settings=None) as ranks:
        for rank in (0, 2, 1):
            if rank == 1:
                ranks[rank].signal(signal.SIGCONT)
            update, state = ranks[rank].result()
            assert ("TornWeights" if rank == 1 else "TornWeights: the weights are torn at step 2") in update
            assert "TornWeights" in state


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@run_on_ranks()
def test_an_error_within_an_update_tears_the_weights_on_all_ranks(kind: type[BaseException]):
    net, model, optimizer = trained(2)
    fails = syncengine.rank() == 1

    def fail(inner: torch.optim.Optimizer) -> None:
        raise kind("stop")

    if fails:
        optimizer._sharing.blocks[0].shard._step = fail
    texts = []
    if fails and kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 1)
    else:
        texts.append(error_of(lambda: train(model, optimizer, 1)))
    texts += map(error_of, (net.state_dict, optimizer.state_dict, optimizer.step))
    assert all("TornWeights: the weights are torn at step 3" in text for text in texts), texts
    assert not fails or "rank 1 raised" in texts[0], texts


@run_on_ranks(world=3)
def test_after_another_failure_each_survivor_has_its_own_weights():
    undisturbed, _, ordinary = trained(3)
    expected = digest(undisturbed, ordinary)
    net, model, optimizer = trained(2)

    def go() -> None:  # a rank that is not as far may fail within its last step
        train(model, optimizer, range(2, 3))
        if syncengine.rank() == 1:
            model.communicator.abort("rank 1: enough")
        train(model, optimizer, range(3, 4))

    assert "enough" in error_of(go)
    net.state_dict()
    assert digest(net, optimizer) == expected
    assert len(optimizer.state_dict()["state"]) == 10
    with torch.no_grad():
        net.head.bias.fill_(syncengine.rank())  # nobody else sees it
    assert bool((net.head.bias == syncengine.rank()).all())


@pytest.mark.parametrize("recovers", ["", "releases", "drops"])
@run_on_ranks()
def test_a_torn_optimizer_concerns_its_own_weights_until_they_are_loaded(recovers: str):
    """A torn optimizer that somebody still holds, as a scheduler does; other models of this process go on."""
    net, other = make(), make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)
    checkpoint = {name: value.clone() for name, value in net.state_dict().items()}
    if syncengine.rank() == 1:
        optimizer._sharing.blocks[0].shard._step = lambda inner: 1 / 0
    assert "TornWeights" in error_of(lambda: train(model, optimizer, 1))
    train(*plain(other), 1)
    kept = [optimizer]
    if recovers == "releases":
        optimizer.release()
    elif recovers == "drops":
        kept.clear()
        del optimizer
        gc.collect()
    new, new_optimizer = sharded(net)
    assert "TornWeights" in error_of(lambda: train(new, new_optimizer, 1))
    assert "TornWeights" in error_of(new_optimizer.step)
    net.load_state_dict(checkpoint)
    train(new, new_optimizer, 1)


class FailsBehind:
    """A communicator that fails in the last barrier before an update, when the others have made it."""

    def __init__(self, optimizer: syncengine.ShardedOptimizer, barriers: int = 0) -> None:
        self._sharing, self._barriers = optimizer._sharing, barriers
        self._communicator = optimizer._sharing.host.communicator

    def __getattr__(self, name: str) -> object:
        return getattr(self._communicator, name)

    def barrier(self) -> None:
        self._communicator.barrier()
        self._barriers -= 1
        if self._barriers == 0:
            self._fail_behind(2)

    def _fail_behind(self, ranks: int) -> None:
        """Fails once so many ranks have made the update."""
        memory, number = self._sharing.blocks[0].weights.memory, self._sharing.steps + 1
        while sum(done >= number for done in memory.completed(3)) < ranks:
            time.sleep(0.001)
        self._communicator.abort("rank 1: enough")
        self._communicator.check_peers()


def fails_behind(loads: str, fails: bool) -> list:
    net, model, optimizer = trained(2)
    weights, state = copy.deepcopy(net.state_dict()), snapshot(optimizer)
    train(model, optimizer, range(2, 4))
    if "model" in loads:
        net.load_state_dict(weights)
    if "optimizer" in loads:
        optimizer.load_state_dict(state)
    if fails and syncengine.rank() == 1:
        optimizer._sharing.host.communicator = FailsBehind(optimizer, len(loads.split()))
    train(model, optimizer, range(4, 5))
    found, state = digest(net, optimizer), error_of(optimizer.state_dict)
    return [error_of(lambda: train(model, optimizer, range(5, 6))) if fails else "", found, state]


@pytest.mark.parametrize("loads", ["model", "optimizer", "model optimizer"])
def test_a_rank_that_fails_when_others_update_what_was_loaded(pool: RankPool, loads: str):
    """All of them have what was loaded and this update of it, the one that has failed before it, too; what comes next
    raises."""
    wanted = pool.run(fails_behind, loads, False, world=3)[0][1]
    for text, found, state in pool.run(fails_behind, loads, True, world=3):
        assert "enough" in text
        assert (found, state) == (wanted, "")


class Counts(torch.optim.SGD):
    """Keeps a number for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1


class FailsAtTheEnd(FailsBehind):
    """One that fails when the ranks tell each other that they have made the update."""

    def all_reduce(self, *args: Any) -> None:
        self._fail_behind(3)


@run_on_ranks(world=3)
def test_what_is_not_shared_is_after_the_same_step():
    """As an update that all ranks have made when the communicator fails."""
    net, alone = make("odd"), nn.Linear(7, 3)
    alone.load_state_dict({"weight": torch.full((3, 7), 0.5), "bias": torch.zeros(3)})
    model = syncengine.Parallel(net)
    parameters = [*net.parameters(), *alone.parameters()]
    optimizer = syncengine.ShardedOptimizer(parameters, Counts, elements=True, lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        alone(model(batch(number))).square().mean().backward()
        optimizer.step()

    for number in range(3):
        step(number)
    before = [parameter.detach().clone() for parameter in parameters]
    if syncengine.rank() == 1:
        optimizer._sharing.host.communicator = FailsAtTheEnd(optimizer)
    step(3)
    still = [i for i, parameter in enumerate(parameters) if torch.equal(parameter, before[i])]
    counts = [optimizer.state[parameter]["count"] for parameter in parameters]
    assert "enough" in error_of(lambda: step(4))
    assert (still, counts) == ([], [4] * 6)


class Reaches(nn.Module):
    """Its forward reads the parameter of a part that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 97), nn.Linear(97, 7)
        self.whole = nn.Tanh()  # nothing that could be torn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.whole(nn.functional.linear(x, self.first.weight, self.first.bias)))


def through_file(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def uses(net: nn.Module) -> dict[str, Callable[[], object]]:
    def trained_on() -> None:
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.optim.SGD(net.parameters(), lr=0.1).step()

    return {
        "bare": lambda: net(batch(0)),
        "part": lambda: net.second(torch.ones(1, 97)),
        "outer": lambda: nn.Sequential(net)(batch(0)),
        "functional": lambda: torch.func.functional_call(net, dict(net.named_parameters()), (batch(0),)),
        "optimizer": trained_on,
        "other": lambda: train(*plain(net), 1),
        "copy": lambda: copy.deepcopy(net),
        "file": lambda: through_file(net),
    }


@run_on_ranks()
def test_torn_weights_are_used_by_nobody_until_others_are_loaded():
    net, unrelated = Reaches(), Reaches()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)
    checkpoint = {name: value.clone() for name, value in net.state_dict().items()}
    unrelated.load_state_dict(checkpoint)
    if syncengine.rank() == 1:
        optimizer._sharing.blocks[0].shard._step = lambda inner: 1 / 0
    error_of(lambda: train(model, optimizer, 1))
    for name, use in uses(net).items():
        text = error_of(use)
        assert text.startswith("TornWeights: the weights are torn at step 3"), (name, text)
    net.whole(batch(0))
    train(*sharded(Reaches()), 2)
    net.load_state_dict(checkpoint)
    wanted = unrelated(batch(0))
    for each in (net, copy.deepcopy(net), through_file(net), net):
        assert torch.equal(each(batch(0)), wanted)
    for use in uses(net).values():
        use()
    assert not net._forward_pre_hooks and not net.second._forward_pre_hooks  # those that have looked are gone


def test_a_second_interrupt_leaves_no_weights_that_may_be_torn():
    """This rank has written its part, and another one is in the middle of its own: nobody knows how that ends."""
    update = Update.__new__(Update)
    update._is_done, update._number = True, 3
    update._host = mock.Mock(size=2)
    update._memory = mock.Mock(torn=0, **{"completed.return_value": [3, 2]})
    update._communicator = mock.Mock(timeout=100.0, **{"ended.side_effect": [set(), KeyboardInterrupt]})
    with pytest.raises(KeyboardInterrupt):
        update._see_whether_whole(KeyboardInterrupt())
    update._memory.tear.assert_called_once_with(3)
