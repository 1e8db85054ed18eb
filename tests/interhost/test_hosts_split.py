"""One run stays one: hosts lose each other while all live, or are killed, and one part at most goes on."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults import Outcome, my_rank, suffer, wait_for_file
from hosts import INTERFACE, Hosts
from marks import mostly_nightly
from pool import RankPool, Ranks
from torch import nn

import syncengine
from syncengine.errors import SyncError

pytestmark = pytest.mark.thorough

SHORT = 4.0  # seconds of patience with hosts that stay away, within which the others have to find each other
LONG = 20.0  # seconds of patience: more than any of this takes, where nobody is to be given up
ATTEMPTS = [0, *(pytest.param(attempt, marks=pytest.mark.nightly) for attempt in range(1, 20))]


def train(patience: float, begun: str) -> list[int]:
    """The ranks that are there at the end. `begun`: each makes a file of that name and its rank."""
    torch.manual_seed(0)
    model = syncengine.Parallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(elastic: syncengine.Elastic) -> None:
        for step in elastic.steps(60):
            model(torch.ones(2, 4)).sum().backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                Path(f"{begun}.{my_rank()}").touch()

    syncengine.elastic(body, patience=patience, model=model, optimizer=optimizer)
    return syncengine.default_communicator().global_ranks


def enter_and_train(
    enter: Callable[[int], None], interfaces: list[str], patience: float, begun: str, timeout: float
) -> Outcome:
    enter(my_rank())
    os.environ["SYNCENGINE_INTERFACE"] = interfaces[my_rank()]
    return suffer(lambda step: train(patience, begun), timeout=timeout)


def spawn(
    pool: RankPool, hosts: Hosts, places: str, patience: float, folder: Path, v6: bool = False, timeout: float = 60.0
) -> Ranks:
    """Ranks that train; `places`: of each a letter, its host."""
    where = ["abc".index(letter) for letter in places]
    interfaces = [f"fd77::{host + 1:x}" if v6 else INTERFACE for host in where]
    arguments = (hosts.entering(where), interfaces, patience, str(folder / "begun"), timeout)
    return pool.spawn_ranks(enter_and_train, *arguments, world=len(places), settings=None)


def start(pool: RankPool, hosts: Hosts, places: str, patience: float, folder: Path, v6: bool = False) -> Ranks:
    """Ranks that have all begun to train."""
    ranks = spawn(pool, hosts, places, patience, folder, v6)
    for number in range(len(places)):
        wait_for_file(folder / f"begun.{number}")
    return ranks


def check_split(ranks: Ranks, left: list[int]) -> None:
    """These go on, together, and nobody else does."""
    for number, rank in enumerate(ranks):
        outcome = rank.result(120.0)
        if number in left:
            outcome.check()
            assert outcome.value == left
        else:
            assert outcome.error in ("PeerLost", "Aborted"), outcome
            assert "may live" in outcome.text or "went on without" in outcome.text, outcome


SPLITS = mostly_nightly(
    [
        ("abb", "both", [1, 2], False),
        ("aabb", "near", [0, 1], True),
        ("abb", "near", [1, 2], True),
        ("abb", "far", [1, 2], False),
        ("aabb", "both", [0, 1], False),
        ("aabb", "far", [0, 1], False),
        ("abc", "both", [0, 2], False),
    ],
    1,
)


@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize(("places", "towards", "left", "v6"), SPLITS)
def test_one_part_goes_on_where_connections_are_reset(
    pool: RankPool, tmp_path: Path, places: str, towards: str, left: list[int], v6: bool, attempt: int
) -> None:
    draw = random.Random(f"{places} {towards} {attempt}")
    with Hosts(len(set(places))) as hosts, start(pool, hosts, places, SHORT, tmp_path, v6) as ranks:
        time.sleep(draw.uniform(0, 0.3))
        with hosts.resetting(1, towards):
            check_split(ranks, left)


@pytest.mark.nightly
@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.parametrize("attempt", range(20))
@pytest.mark.parametrize("towards", ["both", "far"])
def test_one_part_goes_on_where_connections_are_reset_in_a_shrink(
    pool: RankPool, tmp_path: Path, towards: str, attempt: int
) -> None:
    """The resets begin before the shrink, within it, or shortly after it."""
    draw = random.Random(f"{towards} {attempt}")
    with Hosts(2) as hosts, start(pool, hosts, "aabb", SHORT, tmp_path) as ranks:
        ranks[3].signal(signal.SIGKILL)
        time.sleep(draw.choice([0.0, draw.uniform(0, 0.1), draw.uniform(0, 0.5)]))
        with hosts.resetting(1, towards):
            check_split(ranks[:3], [0, 1])


@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("towards", ["both", pytest.param("near", marks=pytest.mark.nightly)])
def test_one_part_trains_where_connections_are_reset_in_init(
    pool: RankPool, tmp_path: Path, towards: str, attempt: int
) -> None:
    """The resets end while ranks connect. All ranks train then, or one part of them, or nobody."""
    draw = random.Random(f"{towards} {attempt}")
    with Hosts(2) as hosts, contextlib.ExitStack() as stack:
        with hosts.resetting(1, towards):
            ranks = stack.enter_context(spawn(pool, hosts, "abb", SHORT, tmp_path, timeout=15.0))
            time.sleep(draw.uniform(0, 2))
        outcomes = [rank.result(120.0) for rank in ranks]
    left = {tuple(outcome.value) for outcome in outcomes if not outcome.error}
    assert len(left) <= 1, outcomes
    for number, outcome in enumerate(outcomes):
        assert outcome.error in (("",) if left and number in min(left) else ("PeerLost", "Aborted", "Timeout"))


@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize(("places", "victim", "unread"), mostly_nightly([("abb", "b", False), ("aabb", "a", True)], 1))
def test_the_others_go_on_where_a_host_is_killed(
    pool: RankPool, tmp_path: Path, places: str, victim: str, unread: bool, attempt: int
) -> None:
    """`unread`: with bytes in its sockets, so that its kernel resets the connections."""
    draw = random.Random(f"{places} {victim} {attempt}")
    with Hosts(2) as hosts, start(pool, hosts, places, LONG, tmp_path) as ranks:
        time.sleep(draw.uniform(0, 0.3))
        victims = [rank for rank, place in zip(ranks, places, strict=True) if place == victim]
        if unread:
            for rank in victims:
                rank.signal(signal.SIGSTOP)
            time.sleep(0.6)  # heartbeats come
        for rank in victims:
            rank.signal(signal.SIGKILL)
        left = [number for number, place in enumerate(places) if place != victim]
        for number in left:
            outcome = ranks[number].result(120.0)
            outcome.check()
            assert outcome.value == left


class Hanging(torch.utils.data.Dataset):
    """Workers that fetch from it write down their ids and outlive their rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        (self._folder / str(os.getpid())).touch()
        time.sleep(600)
        return index


def die_with_children(folder: Path) -> Outcome:
    """Rank 0 is killed, and leaves two workers of a DataLoader, and a program that was given all descriptors."""

    def body(step: Callable[[], None]) -> list[int]:
        communicator = syncengine.default_communicator()
        if my_rank() == 0:
            program = subprocess.Popen(["sleep", "600"], close_fds=False)
            (folder / str(program.pid)).touch()
            fetched = iter(torch.utils.data.DataLoader(Hanging(folder), num_workers=2))
            while len(list(folder.iterdir())) < 3:
                time.sleep(0.01)
            communicator.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
            del fetched
        communicator.barrier()
        with contextlib.suppress(SyncError):
            communicator.barrier()
        return syncengine.shrink(patience=LONG).global_ranks

    return suffer(body, timeout=60.0)


def test_children_do_not_keep_a_dead_rank_alive(pool: RankPool, tmp_path: Path) -> None:
    with pool.spawn_ranks(die_with_children, tmp_path, hosts="ab", settings=None) as ranks:
        outcome = ranks[1].result()
        children = [int(file.name) for file in tmp_path.iterdir()]
        for child in children:
            os.kill(child, signal.SIGKILL)  # it was still there
        outcome.check()
        assert outcome.value == [1]
        assert len(children) == 3


def stay_or_go(stops: str, goes: str) -> Outcome:
    """Rank 1 is stopped; rank 0 gives it up, goes on, and ends."""

    def body(step: Callable[[], None]) -> list[int]:
        communicator = syncengine.default_communicator()
        communicator.barrier()
        if my_rank() == 1:
            Path(stops).touch()
            wait_for_file(goes)
        with contextlib.suppress(SyncError):
            communicator.barrier()
        return syncengine.shrink(patience=1.0).global_ranks

    return suffer(body, timeout=60.0, silence=2.0)


def test_who_wakes_when_the_others_have_ended_does_not_go_on(pool: RankPool, tmp_path: Path) -> None:
    """Their ports refuse then, though they have gone on."""
    stops, goes = tmp_path / "stops", tmp_path / "goes"
    with pool.spawn_ranks(stay_or_go, str(stops), str(goes), hosts="ab", settings=None) as ranks:
        wait_for_file(stops)
        ranks[1].signal(signal.SIGSTOP)
        outcome = ranks[0].result()
        outcome.check()
        assert outcome.value == [0]
        assert ranks[0].exit_code() == 0
        goes.touch()
        ranks[1].signal(signal.SIGCONT)
        ranks[1].result().check("PeerLost", "may live")
