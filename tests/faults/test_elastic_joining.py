"""Ranks and joiners that die while a process joins: nobody waits for the dead, and all that are left go on together."""

import os
import signal

import pytest
import torch.distributed as dist
from faults import FAULT, Outcome, needs_hooks, suffer
from launcher import Launcher
from marks import mostly_nightly
from test_elastic import train, undisturbed

from syncengine import _joining
from syncengine.launch.local import CAME, JOIN

WORLD, STEPS, PACE = 3, 12, 0.05
LONG = 1000.0  # seconds of each wait: a test ends only if nobody waits

# Whether a victim dies before or behind a call there; other places are fault points.
PLACES = {
    "asked": (_joining.Door, "_meet", False),
    "told": (_joining, "connect_beside", False),
    "connected": (_joining.Door, "_meet", True),
    "decided": (_joining, "replace_default", False),
}


def die_at(place):
    if place not in PLACES:
        os.environ[FAULT] = place
        return
    owner, name, behind = PLACES[place]
    call = getattr(owner, name)

    def dies(*arguments):
        if behind:
            call(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dies)


def disturbed(hosts, victims) -> Outcome:
    """`hosts`: of each process a letter; `victims`: of some the place where they die."""
    name = int(os.environ.get(JOIN, os.environ["RANK"]))
    os.environ["SYNCENGINE_HOST_ID"] = hosts[name]
    _joining._LOOK, _joining._PATIENCE = 0.0, LONG
    if name in victims:
        die_at(victims[name])
    return suffer(lambda step: train(count=STEPS, pace=PACE, timeout=LONG), timeout=LONG)


def check(pool, victims, hosts="aaaa"):
    """Processes that join wait already when the others begin, and are let in after the first step."""
    names, expected = range(len(hosts)), undisturbed(pool, count=STEPS)
    with Launcher(pool, disturbed, hosts, victims) as launcher:
        for name in names[WORLD:]:
            launcher.join(name)
        came = launcher.store
        assert launcher.watch(
            lambda: came.check([_joining.CAME]) and len(came.get(_joining.CAME).split()) == len(names) - WORLD
        )
        launcher.start(WORLD)
        outcomes = launcher.outcomes(50.0)
    left = [name for name in names if name not in victims]
    assert sorted(outcomes) == left
    for outcome in outcomes.values():
        outcome.check()
        weights, ranks = outcome.value
        assert weights == expected
        assert sorted(ranks) == left  # those that join are in the order in which they came
    assert len({tuple(outcome.value[1]) for outcome in outcomes.values()}) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("victim", [0, 1, 3], ids=["first", "another", "joins"])
def test_one_dies_while_another_one_joins(pool, victim, place):
    check(pool, {victim: place})


@pytest.mark.thorough
@needs_hooks
@pytest.mark.parametrize("place", mostly_nightly(["listening", "connecting", "handed", "joining"], 3))
@pytest.mark.parametrize("hosts", mostly_nightly(["aaaa", "aaba"], 0))
@pytest.mark.parametrize("victim", mostly_nightly([1, 3], 1), ids=["another", "joins"])
def test_one_dies_while_all_connect(pool, victim, hosts, place):
    first = 2 if victim < WORLD else 1  # behind what init has passed
    if place == "handed" and victim < WORLD:
        first = hosts[:WORLD].count(hosts[victim])
    check(pool, {victim: f"{place}:{first}:kill"}, hosts)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "victims",
    mostly_nightly(
        [
            {3: "asked"},
            {0: "told", 4: "connected"},
            {1: "asked", 2: "connected"},
            {0: "decided", 1: "decided", 3: "told"},
        ],
        3,
    ),
    ids=str,
)
def test_several_join(pool, victims):
    check(pool, victims, "aaaaa")


@pytest.mark.thorough
def test_who_has_joined_trains_again(pool):
    """A second call of elastic(): the process is one of the ranks by now."""
    with Launcher(pool, twice) as launcher:
        launcher.join(2)
        launcher.start(2)
        first, second = zip(*launcher.outcomes(50.0).values(), strict=True)
    assert set(first) == set(second) and len(first) == 3


def twice():
    _joining._LOOK = 0.0
    return [train(count=STEPS, pace=PACE)[0] for _ in range(2)]


def test_what_a_stranger_writes_is_no_rank(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: store)
    store.set(CAME, "3 nonsense -1 \xb2 4 ")
    assert _joining.Door("127.0.0.1:1", None)._read(CAME) == [3, 4]
