"""Elastic training in which ranks die, stop, wake and join at random: the weights are those of an undisturbed run.

`SYNCENGINE_TEST_CHAOS=200 pytest tests/faults/test_chaos.py` plays other stories, one for each number.
"""

import itertools
import os
import random
import signal
import time

import pytest
from faults import Outcome, needs_hooks, suffer
from launcher import Launcher
from test_elastic import train

from syncengine.launch.local import JOIN

STORIES = int(os.environ.get("SYNCENGINE_TEST_CHAOS", "6"))
STEPS, PACE = 30, 0.03  # seconds that a step takes at least: others may join meanwhile
POINTS = ["opened", "staged", "reducing", "reduced", "pulled"]
POINTS_OF_SHRINK = ["arriving", "arrived", "proposing", "proposed", "telling", "stating", "stated"]


def disturbed(hosts, faults) -> Outcome:
    """`hosts`: of each rank a letter; `faults`: of some a fault point."""
    rank = int(os.environ.get(JOIN, os.environ["RANK"]))
    os.environ["SYNCENGINE_HOST_ID"] = hosts[rank]
    if rank in faults:
        os.environ["SYNCENGINE_TEST_FAULT"] = faults[rank]
    return suffer(lambda step: train(count=STEPS, pace=PACE)[:2], timeout=60.0)


@pytest.fixture(scope="module")
def undisturbed(pool):
    return pool.run(train, (), 1, STEPS, world=1, settings=None)[0][0]


class Story:
    """What happens to whom, and when: seconds after all have begun."""

    def __init__(self, seed):
        draw = random.Random(f"{STORIES} {seed}")
        self.world = draw.randint(2, 5)
        self.joiners = draw.randint(0, 2)
        several = draw.random() < 0.5
        self.hosts = "".join(draw.choice("ab") if several else "a" for _ in range(self.world + self.joiners))
        victims = draw.sample(range(self.world), draw.randint(1, self.world - 1))
        victims += [name for name in range(self.world, self.world + self.joiners) if draw.random() < 0.3]
        self.faults, self.events = {}, []
        for name in victims:
            at = draw.uniform(0, 1.5)
            if name < self.world and draw.random() < 0.5:
                inside = draw.random() < 0.4
                point, n = (
                    (draw.choice(POINTS_OF_SHRINK), 1) if inside else (draw.choice(POINTS), draw.randint(40, 400))
                )
                self.faults[name] = f"{point}:{n}:kill"
            elif draw.random() < 0.3:
                self.events += [(at, name, signal.SIGSTOP), (at + draw.uniform(0.1, 0.5), name, signal.SIGKILL)]
            else:
                self.events += [(at, name, signal.SIGKILL)]
        for name in range(self.world):
            if name not in victims and draw.random() < 0.4:
                at = draw.uniform(0, 1.5)
                self.events += [(at, name, signal.SIGSTOP), (at + draw.uniform(0.05, 0.8), name, signal.SIGCONT)]
        self.events += [(draw.uniform(0, 1.0), name, None) for name in range(self.world, self.world + self.joiners)]
        self.events.sort(key=lambda event: event[:2])
        self.victims = set(victims)


@needs_hooks
@pytest.mark.parametrize("seed", range(STORIES))
def test_story(pool, undisturbed, seed):
    story = Story(seed)
    with Launcher(pool, disturbed, story.hosts, story.faults) as launcher:
        launcher.start(story.world)
        ranks = list(launcher.processes.values())
        launcher.watch(
            lambda: all("elastic begins" in rank.output() or rank.exit_code(0) is not None for rank in ranks)
        )
        began = time.monotonic()
        for at, name, what in story.events:
            launcher.watch(lambda: time.monotonic() >= began + at)  # noqa: B023
            if what is None:
                launcher.join(name)
            elif name in launcher.processes:
                launcher.processes[name].signal(what)
        outcomes = launcher.outcomes()
        for name in launcher.processes.keys() - outcomes.keys():
            assert name in story.victims or launcher.waits(name), (vars(story), name)
    members = {}
    for name, outcome in outcomes.items():
        assert (outcome.error, outcome.left) == ("", []), (vars(story), name, outcome)
        weights, members[name] = outcome.value
        assert weights == undisturbed, (vars(story), name)
    # Two parts of the run never go on beside each other. Who has ended is gone for those that still wait for others.
    for one, other in itertools.combinations([name for name in members if name < story.world], 2):
        assert one in members[other] or other in members[one], (vars(story), members)
    print(f"{vars(story)}: {len(outcomes.keys() - range(story.world))} joined")
