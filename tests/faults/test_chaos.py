"""Elastic training in which ranks die, stop, wake and join at random: the weights are those of an undisturbed run.

`SYNCENGINE_TEST_CHAOS=200 pytest tests/faults/test_chaos.py` plays other stories, one for each number.
"""

import contextlib
import os
import random
import signal
import time

import pytest
import torch.distributed as dist
from faults import Outcome, needs_hooks, suffer
from pool import RankFailure
from test_elastic import train

from syncengine.launch.local import JOIN, MEET, PLACE

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
    return suffer(lambda step: train(count=STEPS, pace=PACE)[0], timeout=60.0)


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
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {MEET: f"127.0.0.1:{store.port}"}
    with contextlib.ExitStack() as ending:
        arguments = (disturbed, story.hosts, story.faults)
        ranks = ending.enter_context(pool.spawn_ranks(*arguments, world=story.world, settings=None, environ=common))
        processes = dict(enumerate(ranks))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if all("elastic begins" in rank.output() or rank.exit_code(0) is not None for rank in ranks):
                break
            time.sleep(0.005)
        began = time.monotonic()
        for at, name, what in story.events:
            time.sleep(max(0.0, began + at - time.monotonic()))
            if what is None:
                one = pool.spawn_ranks(*arguments, world=1, settings=None, environ=common | {JOIN: str(name)})
                processes[name] = ending.enter_context(one)[0]
            elif name in processes:
                processes[name].signal(what)
        joined = 0
        for name, process in sorted(processes.items()):
            ticket = f"{PLACE}/ticket/{name}"
            while name >= story.world and not process.connection.poll(0.1) and store.check([ticket]):
                pass
            if name >= story.world and not process.connection.poll(0) and not store.check([ticket]):
                process.signal(signal.SIGKILL)  # it waits for a run that has ended
                continue
            try:
                outcome = process.result(120.0)
            except RankFailure:
                if name in story.victims and process.exit_code() == -signal.SIGKILL:
                    continue
                raise
            assert (outcome.error, outcome.left) == ("", []), (vars(story), name, outcome)
            assert outcome.value == undisturbed, (vars(story), name)
            joined += name >= story.world
        print(f"{vars(story)}: {joined} joined")
