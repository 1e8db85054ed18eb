"""A rank ends, or fails, somewhere in an update: survivors know whether the weights are whole, and of which step."""

from __future__ import annotations

import copy
import gc
import io
import signal
import time

import pytest
import torch
from faults import Outcome, needs_hooks, set_fault, suffer
from pool import RankPool, run_on_ranks
from sharded_training import common_memory, digest, error_of, make, plain, sharded, snapshot, train
from torch import nn

import syncengine

STEPS = 6


def undisturbed(steps: int) -> list[int]:
    """Digests after each step, also after none."""
    net = make()
    model, optimizer = sharded(net)
    digests = [digest(net, optimizer)]
    train(model, optimizer, steps, after=lambda step: digests.append(digest(net, optimizer)))
    return digests


def save(net: nn.Module) -> None:
    torch.save(net, io.BytesIO())


def suffer_in_training(victim: int, fault: str) -> Outcome:
    """What a survivor tells: its error, the last step that it has made, and what it then finds."""
    set_fault(victim, fault)

    def body(step) -> dict:
        net = make()
        model, optimizer = sharded(net)
        made = [0]

        def after(number: int) -> None:
            made[0] = number + 1

        error = error_of(lambda: train(model, optimizer, STEPS, after=after))
        found = {"error": error, "made": made[0]}
        found["forward"] = error_of(lambda: train(model, optimizer, 1))
        found["state_dict"] = error_of(optimizer.state_dict)
        found["model"] = error_of(net.state_dict)
        found["save"] = error_of(lambda: save(net))
        found["digest"] = digest(net, optimizer)
        found["shared"] = common_memory()
        return found

    return suffer(body, timeout=30.0)


def check(outcome: Outcome, digests: list[int]) -> bool:
    """Whether the weights were torn; else they are those after some step, which the survivor can tell."""
    assert outcome.left == [], outcome
    found = outcome.value
    assert found["shared"] == [], found
    torn = "TornWeights" in found["error"]
    for what in ("forward", "state_dict", "model", "save"):
        assert ("the weights are torn at step" in found[what]) == torn, found
    if torn:
        assert f"the weights are torn at step {found['made'] + 1}: continue from a checkpoint" in found["error"]
        return True
    assert found["error"].startswith("PeerLost"), found
    assert found["state_dict"] == found["model"] == found["save"] == "", found
    assert found["digest"] in digests[found["made"] : found["made"] + 2], found
    return False


@needs_hooks
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("point", "torn"), [("agreed", None), ("updating", True), ("updated", True), ("completed", False)]
)
def test_killed_in_an_update(pool: RankPool, point: str, torn: bool | None, world: int):
    digests = pool.run(undisturbed, STEPS, world=world)[0]
    for number in (1, 4):
        victim = number % world
        with pool.spawn_ranks(
            suffer_in_training, victim, f"{point}:{number}:kill", world=world, settings=None
        ) as ranks:
            assert ranks[victim].exit_code() == -signal.SIGKILL
            for rank in ranks:
                if rank is not ranks[victim]:
                    outcome = rank.result()
                    found = check(outcome, digests)
                    # Who dies when it has agreed dies before the others know, or when they have begun. The first update
                    # ends with an exchange of new state, and with it all of it is there.
                    either = torn is None or (number == 1 and point in ("updated", "completed"))
                    assert either or found == torn, outcome


def stops() -> list:
    """This rank is stopped in the middle of its second update, and goes on when the others have given up."""
    set_fault(1, "updating:2:stop")
    syncengine.init(timeout=3.0)
    net = make()
    model, optimizer = sharded(net)
    return [error_of(lambda: train(model, optimizer, 4)), error_of(net.state_dict)]


@needs_hooks
def test_a_stopped_rank_leaves_torn_weights(pool: RankPool):
    with pool.spawn_ranks(stops, world=3, settings=None) as ranks:
        for rank in (ranks[0], ranks[2]):
            update, state = rank.result()
            assert "TornWeights: the weights are torn at step 2" in update and "TornWeights" in state
        ranks[1].signal(signal.SIGCONT)
        update, state = ranks[1].result()
        assert "TornWeights" in update and "TornWeights" in state


def raises_in_update(kind: type[BaseException]) -> list[str]:
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)

    def fail(inner: torch.optim.Optimizer) -> None:
        raise kind("stop")

    if syncengine.rank() == 1:
        optimizer._sharing.blocks[0].shard._step = fail
    try:
        text = error_of(lambda: train(model, optimizer, 1))
    except KeyboardInterrupt:
        text = "KeyboardInterrupt"
    return [text, error_of(net.state_dict), error_of(optimizer.state_dict), error_of(optimizer.step)]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_within_an_update_tears_the_weights_on_all_ranks(pool: RankPool, kind: type[BaseException]):
    torn = "TornWeights: the weights are torn at step 3"
    for rank, answer in enumerate(pool.run(raises_in_update, kind, world=3)):
        if rank == 1 and kind is KeyboardInterrupt:
            assert answer.pop(0) == "KeyboardInterrupt"
        assert all(torn in text for text in answer), answer


def fails_elsewhere() -> list:
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)

    def go() -> None:  # a rank that is not as far may fail within its last step
        train(model, optimizer, range(2, 3))
        if syncengine.rank() == 1:
            model.communicator.abort("rank 1: enough")
        train(model, optimizer, range(3, 4))

    texts = [error_of(go), error_of(net.state_dict)]
    whole = digest(net, optimizer)
    state = optimizer.state_dict()
    with torch.no_grad():
        net.head.bias.fill_(syncengine.rank())  # nobody else sees it
    alone = bool((net.head.bias == syncengine.rank()).all())
    return [texts, whole, alone, len(state["state"])]


def test_after_another_failure_each_survivor_has_its_own_weights(pool: RankPool):
    digests = pool.run(undisturbed, 3, world=3)[0]
    for texts, whole, alone, states in pool.run(fails_elsewhere, world=3):
        assert "enough" in texts[0] and texts[1] == ""
        assert whole == digests[3]
        assert alone and states == 10


@run_on_ranks()
def test_a_torn_model_goes_on_from_a_checkpoint():
    """A torn model is whole again once it has loaded a checkpoint; all ranks are still there."""
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)
    checkpoint = {name: value.clone() for name, value in net.state_dict().items()}
    if syncengine.rank() == 1:
        optimizer._sharing.blocks[0].shard._step = lambda inner: 1 / 0
    texts = [error_of(lambda: train(model, optimizer, 1)), error_of(net.state_dict)]
    net.load_state_dict(checkpoint)
    texts.append(error_of(net.state_dict))
    del optimizer
    model, optimizer = sharded(net)
    texts.append(error_of(lambda: train(model, optimizer, 1)))
    update, before, after, step = texts
    assert "TornWeights" in update and "TornWeights" in before
    assert (after, step) == ("", "")


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
    texts = [error_of(lambda: train(model, optimizer, 1)), error_of(lambda: train(*plain(other), 1))]
    kept = [optimizer]
    if recovers == "releases":
        optimizer.release()
    elif recovers == "drops":
        kept.clear()
        del optimizer
        gc.collect()
    new, new_optimizer = sharded(net)
    texts.append(error_of(lambda: train(new, new_optimizer, 1)))
    texts.append(error_of(new_optimizer.step))
    net.load_state_dict(checkpoint)
    texts.append(error_of(lambda: train(new, new_optimizer, 1)))
    update, unrelated, forward, step, loaded = texts
    assert "TornWeights" in update and unrelated == ""
    assert "TornWeights" in forward and "TornWeights" in step
    assert loaded == ""


class FailsBehind:
    """A communicator that fails in the last barrier before an update, when the others have made it."""

    def __init__(self, optimizer: syncengine.ShardedOptimizer, barriers: int) -> None:
        self._sharing, self._barriers = optimizer._sharing, barriers
        self._communicator = optimizer._sharing.host.communicator

    def __getattr__(self, name: str) -> object:
        return getattr(self._communicator, name)

    def barrier(self) -> None:
        self._communicator.barrier()
        self._barriers -= 1
        if self._barriers == 0:
            memory, number = self._sharing.blocks[0].weights.memory, self._sharing._updates + 1
            while sum(done >= number for done in memory.completed(3)) < 2:
                time.sleep(0.001)
            self._communicator.abort("rank 1: enough")
            self._communicator.check_peers()


def fails_behind(loads: str, fails: bool) -> list:
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)
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
