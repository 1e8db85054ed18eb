"""SIGKILL at each protocol state of a whole life with ShardedOptimizer, and at random instants: never silently torn.

The life: weights move into shared memory, are updated, loaded, written to, and the state with them. Survivors know of
all values that there should be, from a life that nothing disturbs.
"""

import copy
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Outcome, needs_hooks, set_fault, suffer, wait_for_file
from marks import mostly_nightly
from pool import RankPool, Ranks
from sharded_training import common_memory, digest, error_of, make, sharded, snapshot, train
from torch.distributed.algorithms.join import Join

import syncengine
from syncengine._C import fault_point

INSTANTS = int(os.environ.get("SYNCENGINE_TEST_KILLS", "40"))  # other ones for another number
POINTS: dict[str, Sequence[int]] = {  # which occurrences of them
    "listening": range(1, 5),  # memory is handed over: by init, for the weights, for new state, for loaded state
    "connecting": range(1, 5),
    "agreed": range(1, 8),
    "updating": range(1, 8),
    "updated": range(1, 8),
    "completed": range(1, 8),
    "opened": [*range(8, 24), *range(24, 64, 8)],  # of collectives; the first are init's
    "reducing": range(8, 20, 2),
    "finished": range(8, 64, 8),
}


KINDS = ("slices", "whole", "blocks", "join", "torch's Join")  # of lives


class Life:
    """What becomes of a model and its optimizer; `digests` after each of its stages.

    `kind`: "slices" of parameters that are shared at once, "whole" ones, or in several "blocks", one after another; or
    ranks that run out of batches one after another, in "join" of the model or in "torch's Join".
    """

    def __init__(self, kind: str) -> None:
        self.net = make("odd")
        self.model, self.optimizer = sharded(self.net, elements=None if kind != "whole" else False)
        self._later: list[torch.nn.Parameter] = []
        if kind == "blocks":
            self._later = [self.net.first.bias, *self.net.second.parameters()]
            self.optimizer = syncengine.ShardedOptimizer([self.net.first.weight], torch.optim.AdamW, lr=1e-2)
        self.digests: list[int] = []
        self.steps = 0
        self._is_over = False
        self.updates: list[int] = []  # by when there were how many
        self._joins = "oin" in kind
        if self._joins:
            self._join = self.model.join if kind == "join" else lambda: Join([self.model, self.optimizer])
            self._follow_updates()

    def live(self) -> None:
        self._look()
        if self._joins:
            self._live_unevenly()
        else:
            self._live_evenly()

    def _live_unevenly(self) -> None:
        """The first rank has joined before it has had a batch; the last trains alone at the end."""
        with self._join():
            train(self.model, self.optimizer, 3 * syncengine.rank(), after=lambda step: fault_point("between"))
        train(self.model, self.optimizer, range(6, 7))

    def _follow_updates(self) -> None:
        """Also on a rank that has joined."""
        update = self.optimizer._sharing.update

        def followed(*args: Any) -> None:
            update(*args)
            if not self._is_over:
                self._after_step(0)

        self.optimizer._sharing.update = followed

    def _live_evenly(self) -> None:
        self._train(0, 1)
        for parameter in self._later:
            self.optimizer.add_param_group({"params": [parameter]})
        self._train(1, 2)
        weights, state = copy.deepcopy(self.net.state_dict()), snapshot(self.optimizer)
        self._train(2, 4)
        self.net.load_state_dict(weights)
        self._look()
        self.optimizer.load_state_dict(state)
        self._look()
        self._train(2, 4)
        self._train(4, 6)

    def go_on(self) -> None:
        self._is_over = True
        train(self.model, self.optimizer, 1)

    def _train(self, begin: int, end: int) -> None:
        train(self.model, self.optimizer, range(begin, end), after=self._after_step)

    def _after_step(self, step: int) -> None:
        self.steps += 1
        self._look()

    def _look(self) -> None:
        self.digests.append(digest(self.net, self.optimizer))
        self.updates.append(self.steps)


def undisturbed(kind: str) -> list[tuple[int, int]]:
    life = Life(kind)
    life.live()
    life.go_on()
    return [*zip(life.updates, life.digests, strict=True), (life.steps + 1, digest(life.net, life.optimizer))]


def stages_of(pool: RankPool, kind: str, world: int) -> list[tuple[int, int]]:
    """Each stage of a life that nothing disturbs: how many updates there were, and the digest."""
    return pool.run(undisturbed, kind, world=world, gloo=kind == "torch's Join")[0]


def live_beside(victim: int, fault: str, kind: str, started: str = "") -> Outcome:
    """What a survivor tells."""
    set_fault(victim, fault)

    def body(step: Callable[[], None]) -> dict[str, Any]:
        life = Life(kind)
        if started:
            Path(started).touch()
        found: dict[str, Any] = {"error": error_of(life.live), "digests": life.digests}
        found["steps"] = life.steps
        found["forward"] = error_of(life.go_on)
        found["state_dict"] = error_of(life.optimizer.state_dict)
        found["model"] = error_of(life.net.state_dict)
        found["copy"] = error_of(lambda: copy.deepcopy(life.net))
        found["digest"] = digest(life.net, life.optimizer)
        found["shared"] = common_memory()
        return found

    return suffer(body, timeout=100.0)


def check(outcome: Outcome, stages: list[tuple[int, int]]) -> bool | None:
    """Whether the weights are torn; else they are those of some stage. None: this rank has come through."""
    assert outcome.left == [], outcome
    found = outcome.value
    if found is None:  # before anything was shared
        assert outcome.error == "PeerLost", outcome
        return None
    made = len(found["digests"])
    assert found["digests"] == [value for _, value in stages[:made]], found
    if not found["error"] and not found["forward"]:
        return None
    assert found["shared"] == [], found
    torn = "TornWeights" in found["error"] or "TornWeights" in found["forward"]
    for what in ("forward", "state_dict", "model", "copy"):
        assert ("the weights are torn at step" in found[what]) == torn, found
    if torn:
        assert f"torn at step {found['steps'] + 1}: continue from a checkpoint" in found["forward"], found
    else:
        assert found["state_dict"] == found["model"] == found["copy"] == "", found
        assert "PeerLost" in found["error"] + found["forward"], found
        assert updates_of(outcome, stages), found
    return torn


def updates_of(outcome: Outcome, stages: list[tuple[int, int]]) -> set[int]:
    """How many updates there are in what a survivor is left with: as many as it knows of, or one more."""
    made = len(outcome.value["digests"])
    return {number for number, value in stages[max(made - 1, 0) : made + 1] if value == outcome.value["digest"]}


def check_survivors(ranks: Ranks, victim: int, stages: list[tuple[int, int]]) -> list[bool | None]:
    outcomes = [rank.result() for rank in ranks if rank is not ranks[victim]]
    torn = [check(outcome, stages) for outcome in outcomes]
    whole = [updates_of(outcome, stages) for outcome, is_torn in zip(outcomes, torn, strict=True) if is_torn is False]
    assert not whole or set.intersection(*whole), outcomes  # all after the same update
    return torn


@pytest.mark.thorough
@needs_hooks
@pytest.mark.parametrize("point", mostly_nightly(POINTS, 5))
def test_killed_at_each_state(pool: RankPool, point: str):
    stages = {world: stages_of(pool, "slices", world) for world in (2, 3)}
    for number in POINTS[point]:
        world = 2 + number % 2
        victim = number // 2 % world
        with spawn(pool, victim, f"{point}:{number}:kill", "slices", world) as ranks:
            torn = check_survivors(ranks, victim, stages[world])
            assert ranks[victim].exit_code() == -signal.SIGKILL, f"there is no {point} number {number}"
            if point == "updating" or (point == "updated" and number > 1):
                assert all(torn)
            if point == "completed":
                assert not any(torn)


@pytest.mark.thorough
@needs_hooks
@pytest.mark.parametrize("point", mostly_nightly(["agreed", "updating", "updated", "completed"], 1))
@pytest.mark.parametrize("kind", mostly_nightly(KINDS[1:], 1))
def test_killed_in_updates_of_other_lives(pool: RankPool, kind: str, point: str):
    stages = stages_of(pool, kind, 3)
    for number in (2, 3, 6):
        victim = number % 3
        with spawn(pool, victim, f"{point}:{number}:kill", kind, 3) as ranks:
            torn = check_survivors(ranks, victim, stages)
            assert ranks[victim].exit_code() == -signal.SIGKILL, f"there is no {point} number {number}"
            if point == "updating":
                assert all(torn)


@pytest.mark.thorough
@needs_hooks
@pytest.mark.parametrize("kind", mostly_nightly(KINDS[3:], 1))
def test_killed_between_batches_of_a_join(pool: RankPool, kind: str):
    """The others wait for it in the context: in torch's, over torch's own process group."""
    stages = stages_of(pool, kind, 3)
    for victim, number in ((1, 2), (1, 3), (2, 2), (2, 5)):  # after the first, which makes state
        with spawn(pool, victim, f"between:{number}:kill", kind, 3) as ranks:
            assert not any(check_survivors(ranks, victim, stages))
            assert ranks[victim].exit_code() == -signal.SIGKILL


def spawn(pool: RankPool, victim: int, fault: str, kind: str, world: int, started: str = "") -> Ranks:
    gloo = kind == "torch's Join"
    return pool.spawn_ranks(live_beside, victim, fault, kind, started, world=world, settings=None, gloo=gloo)


@pytest.mark.thorough
@needs_hooks
@pytest.mark.parametrize("hosts", mostly_nightly(["aab", "abb"], 1))
def test_each_host_has_weights_of_its_own(pool: RankPool, hosts: str):
    """The last rank dies in the third update: that of other hosts is complete."""
    stages = stages_of(pool, "slices", 3)
    with pool.spawn_ranks(live_beside, 2, "updating:3:kill", "slices", hosts=hosts, settings=None) as ranks:
        for rank in (0, 1):
            assert check(ranks[rank].result(), stages) == (hosts[rank] == "b")
        assert ranks[2].exit_code() == -signal.SIGKILL


@pytest.mark.nightly
def test_killed_at_random_instants(pool: RankPool, tmp_path: Path):
    began = time.monotonic()
    lives = list(itertools.product(KINDS, (2, 3)))
    stages = {(kind, world): stages_of(pool, kind, world) for kind, world in lives}
    lasts = (time.monotonic() - began) / len(lives)
    moments = random.Random(INSTANTS)
    found: list[bool | None] = []
    for attempt in range(INSTANTS):
        kind, world = lives[attempt % len(lives)]
        victim = attempt // len(lives) % world
        started = tmp_path / str(attempt)
        with spawn(pool, -1, "", kind, world, str(started)) as ranks:
            wait_for_file(started)
            time.sleep(moments.random() * lasts)
            ranks[victim].signal(signal.SIGKILL)
            found += check_survivors(ranks, victim, stages[kind, world])
    assert False in found
