"""Elastic training in which ranks die, stop, wake and join at random: the weights are those of an undisturbed run.

`SYNCENGINE_TEST_CHAOS=5000 pytest tests/faults/test_chaos.py` plays other stories, one for each number.
"""

import gc
import itertools
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults import Outcome, needs_hooks, suffer
from launcher import Launcher
from marks import mostly_nightly
from test_elastic import KINDS, train, undisturbed

from syncengine import _joining
from syncengine.launch.local import JOIN

pytestmark = pytest.mark.thorough

STORIES = int(os.environ.get("SYNCENGINE_TEST_CHAOS", "200"))
OF_A_TEST, AT_A_TIME = 20, 4  # stories: most of their time is waiting
STEPS, PACE = 16, 0.015  # seconds that a step takes at least: others may join meanwhile
WHILE = 0.3  # seconds in which all happens
POINTS = ["opened", "staged", "reducing", "reduced", "pulled"]
POINTS_OF_SHRINK = ["arriving", "arrived", "proposing", "proposed", "telling", "stating", "stated"]


def disturbed(hosts, faults, how) -> Outcome:
    """`hosts`: of each rank a letter; `faults`: of some a fault point; `how` they train."""
    gc.freeze()  # the collector is quick where there is little
    rank = int(os.environ.get(JOIN, os.environ["RANK"]))
    os.environ["SYNCENGINE_HOST_ID"] = hosts[rank]
    _joining._LOOK = 0.02
    if rank in faults:
        os.environ["SYNCENGINE_TEST_FAULT"] = faults[rank]
    return suffer(lambda step: train(count=STEPS, pace=PACE, **how), timeout=60.0)


class Story:
    """What happens to whom, and when: seconds after all have begun."""

    def __init__(self, seed):
        draw = random.Random(f"{STORIES} {seed}")
        self.seed = seed
        self.world = draw.randint(2, 5)
        self.joiners = draw.randint(0, 2)
        several = draw.random() < 0.5
        self.hosts = "".join(draw.choice("ab") if several else "a" for _ in range(self.world + self.joiners))
        victims = draw.sample(range(self.world), draw.randint(1, self.world - 1))
        victims += [name for name in range(self.world, self.world + self.joiners) if draw.random() < 0.3]
        self.faults, self.events = {}, []
        for name in victims:
            at = draw.uniform(0, WHILE)
            if name < self.world and draw.random() < 0.5:
                inside = draw.random() < 0.4
                point, n = (
                    (draw.choice(POINTS_OF_SHRINK), 1) if inside else (draw.choice(POINTS), draw.randint(40, 400))
                )
                self.faults[name] = f"{point}:{n}:kill"
            elif draw.random() < 0.3:
                self.events += [(at, name, signal.SIGSTOP), (at + draw.uniform(0.02, 0.2), name, signal.SIGKILL)]
            else:
                self.events += [(at, name, signal.SIGKILL)]
        for name in range(self.world):
            if name not in victims and draw.random() < 0.4:
                at = draw.uniform(0, WHILE)
                self.events += [(at, name, signal.SIGSTOP), (at + draw.uniform(0.02, 0.3), name, signal.SIGCONT)]
        self.events += [(draw.uniform(0, WHILE / 2), name, None) for name in range(self.world, len(self.hosts))]
        self.events.sort(key=lambda event: event[:2])
        self.victims = set(victims)
        self.how = {"kind": draw.choice(KINDS), "tells": draw.random() < 0.3}
        self.how["whims"] = seed if draw.random() < 0.5 else None


def play(pool, expected, story):
    """How many have joined, and whether it has ended by an error."""
    with Launcher(pool, disturbed, story.hosts, story.faults, story.how) as launcher:
        launcher.start(story.world)
        ranks = list(launcher.processes.values())
        launcher.watch(
            lambda: all("elastic begins" in rank.output() or rank.exit_code(0) is not None for rank in ranks)
        )
        began = time.monotonic()
        for at, name, what in story.events:
            launcher.watch(lambda: time.monotonic() > began + at - 0.01)  # noqa: B023
            time.sleep(max(0.0, began + at - time.monotonic()))
            if what is None:
                launcher.join(name)
            elif name in launcher.processes:
                launcher.processes[name].signal(what)
        outcomes = launcher.outcomes()
        for name in launcher.processes.keys() - outcomes.keys():
            assert name in story.victims or launcher.waits(name), f"rank {name} has not come back"
    members = {}
    for name, outcome in outcomes.items():
        if story.how["tells"] and outcome.error:  # ranks were lost behind an update: nobody can go on, or come
            assert re.search("can neither keep nor repeat|nobody is left with whole weights", outcome.text), outcome
            continue
        assert (outcome.error, outcome.left) == ("", []), (name, outcome)
        weights, members[name] = outcome.value
        assert weights == expected[story.how["kind"]], name
    # Two parts of the run never go on beside each other. Who has ended is gone for those that still wait for others.
    for one, other in itertools.combinations([name for name in members if name < story.world], 2):
        assert one in members[other] or other in members[one], members
    return len(outcomes.keys() - range(story.world)), any(outcome.error for outcome in outcomes.values())


@needs_hooks
@pytest.mark.parametrize("first", mostly_nightly(range(0, STORIES, OF_A_TEST), 0))
def test_stories(pool, first):
    expected = {kind: undisturbed(pool, kind, STEPS) for kind in KINDS}
    stories = [Story(seed) for seed in range(first, min(first + OF_A_TEST, STORIES))]
    with ThreadPoolExecutor(AT_A_TIME) as players:
        played = [(story, players.submit(play, pool, expected, story)) for story in stories]
    failed = [f"{vars(story)}: {error!r}" for story, future in played if (error := future.exception())]
    assert not failed, "\n\n".join(failed)
    joined, ended = map(sum, zip(*(future.result() for _, future in played), strict=True))
    print(f"{joined} processes have joined, {ended} stories of {len(stories)} have ended by an error")
    assert ended <= len(stories) / 2
