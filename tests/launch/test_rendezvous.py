"""Ranks meet where others have met before: restarted by torchrun, trying again, or in a group made anew."""

import errno
import os
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import my_rank, wait_for_file
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import RankPool, run_on_ranks
from test_launchers_real import TORCHRUN, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine
import syncengine_autoload
from syncengine.errors import Aborted, InvalidUsage
from syncengine_autoload import rendezvous
from syncengine_autoload.rendezvous import Failed, Rendezvous

# What ranks do in the attempts that fail: one dies before it comes, when the other waits for it, then the other, then
# one hangs until the other has failed. They need no torch for that, whose import takes longest.
DIES = """
    while not os.path.exists(f'{FOLDER}/{attempt} {1 - rank}'):
        time.sleep(0.01)
    time.sleep(1)
    sys.exit(1)
"""
ALL_IN_TURN = f"""
if attempt < 2 and rank == 1 - attempt:{DIES}
if attempt == 2:
    if rank == 1:
        time.sleep(60)
    import syncengine
    syncengine.init(timeout=1)
if rank == 0:  # of attempt 3: it comes when the other has seen what is left
    time.sleep(1)
"""

# What who is not to die does next: it says so. In the first attempt it waits in the backend for torch.distributed, in
# the second one in init; in the last one all meet in both.
MEETS = """
import torch
from datetime import timedelta
from torch import distributed as dist
import syncengine
open(f'{FOLDER}/{attempt} {rank}', 'w').close()
if attempt in (0, 3):
    dist.init_process_group('syncengine', timeout=timedelta(seconds=20))
syncengine.init(timeout=20)
model = syncengine.Parallel(torch.nn.Linear(1, 1, bias=False))
model(torch.full((1, 1), float(rank))).backward()
sum = torch.ones(1)
dist.all_reduce(sum)
os.write(1, f'{attempt} {model.module.weight.grad.item()} {sum.item()}\\n'.encode())
syncengine.shutdown()
"""


@pytest.mark.nightly
def test_attempts_that_fail_in_turn(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        f"import os, sys, time\nFOLDER = {str(tmp_path)!r}\n"
        "rank, attempt = int(os.environ['RANK']), int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        f"{ALL_IN_TURN}\n{MEETS}"
    )
    ended = start([*TORCHRUN, "--max-restarts=3", str(tmp_path / "train.py")])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines() == ["3 0.5 2.0"] * 2


@run_on_ranks(settings=None)
def test_a_rank_that_failed_before_it_came_joins_those_that_try_again(tmp_path: Path):
    if my_rank() == 0:
        with pytest.raises(Aborted, match=r"rank 1 failed in init: InvalidUsage: numerics='no such'"):
            syncengine.init(timeout=60)
        (tmp_path / "gave up").touch()
    else:
        with pytest.raises(InvalidUsage, match="numerics"):
            syncengine.init(numerics="no such")
        wait_for_file(tmp_path / "gave up")
    assert syncengine.init(timeout=60).size == 2


@run_on_ranks(world=3, settings=None)
def test_groups_of_one_name_with_other_members(tmp_path: Path):
    """The groups are over the same store, one after the other."""
    rank, shared, seconds = my_rank(), str(tmp_path / "store"), timedelta(seconds=60)
    for ranks in ([0, 1], [2, 0, 1]):
        dist.init_process_group("syncengine", store=dist.FileStore(shared), rank=rank, world_size=3, timeout=seconds)
        group = dist.new_group(ranks)
        if rank in ranks:
            dist.all_reduce(value := torch.tensor([float(rank)]), group=group)
            assert value.item() == sum(ranks)
        dist.barrier()
        dist.destroy_process_group()


def two_patched_models() -> list[bool | str]:
    syncengine_autoload.patch()
    rank, made = dist.get_rank(), []
    shared = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1].underlying_store
    for module in (nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)):
        if rank == 1 and len(made) == 1:
            time.sleep(1)
        try:
            made.append(isinstance(DistributedDataParallel(module), syncengine.Parallel))
        except Exception as error:  # torch's, of a model on meta
            made.append(type(error).__name__)
        dist.destroy_process_group()
        dist.init_process_group("syncengine", store=shared, rank=rank, world_size=2)
    return made


@pytest.mark.thorough
def test_reasons_against_a_model_are_not_those_against_the_next(pool: RankPool):
    """Of a group with the name and the store of the one before."""
    with pool.spawn_ranks(two_patched_models, gloo=True, settings=None) as ranks:
        first, second = (rank.result() for rank in ranks)
    assert first == second
    assert first[1] is True


# ---- ranks as objects over one store, in any order of their steps ----


class Life:
    """One rank's, from its coming until it has met the others, fails, or hears that one has failed."""

    def __init__(self, shared: dist.Store, rank: int, size: int, number: int) -> None:
        self.payload = f"{rank} {number}".encode()
        self.meeting = Rendezvous(shared, "test", rank, range(size))

    def step(self) -> bool:
        return self.meeting.gather(self.payload)


def check_hears(life: Life, text: str) -> None:
    with pytest.raises(Failed, match=text):
        life.step()


def attempt(shared: dist.Store, size: int, dice: random.Random, lives: list[int], steps: int, failures: int) -> bool:
    """Whether all have met within so many steps, of one rank each; if so, they have given each other the same."""
    ranks: list[Life | None] = [None] * size
    met: set[int] = set()
    told: list[Life] = []  # there when another failed
    for _ in range(steps):
        rank = dice.randrange(size)
        life = ranks[rank]
        if life is None:
            lives[rank] += 1
            ranks[rank] = Life(shared, rank, size, lives[rank])
        elif failures and not met and dice.random() < 0.1:
            failures -= 1
            is_news = life not in told and life.meeting._told is None
            life.meeting.fail(b"a bad day")
            ranks[rank] = None
            told += [other for other in ranks if other is not None and is_news]
        elif rank not in met:
            try:
                if life.step():
                    assert life not in told
                    met.add(rank)
            except Failed:
                assert not met
                ranks[rank] = None
        if len(met) == size:
            given = {rank: life.payload for rank, life in enumerate(ranks)}
            assert [life.meeting.values for life in ranks] == [given] * size
            assert not any(life.meeting.superseded() for life in ranks)
            return True
    return False


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 4), cut=st.lists(st.integers(0, 40), max_size=3), seed=st.integers(0, 2**32))
def test_the_living_meet_and_nobody_else(size: int, cut: list[int], seed: int):
    """Attempts that end after any number of steps, as a launcher ends them, and one that does not."""
    shared, dice, lives = dist.HashStore(), random.Random(seed), [0] * size
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("GROUP_WORLD_SIZE", "1")
        for number, steps in enumerate(cut):
            environ.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
            attempt(shared, size, dice, lives, steps, failures=2)
        environ.setenv("TORCHELASTIC_RESTART_COUNT", str(len(cut)))
        assert attempt(shared, size, dice, lives, 2000, failures=3)


def test_failures_are_heard_once_and_of_this_attempt(monkeypatch: pytest.MonkeyPatch):
    shared = dist.HashStore()
    first = Life(shared, 0, 2, 0)
    first.meeting.fail(b"a bad day")
    late = Life(shared, 1, 2, 0)
    check_hears(late, "a bad day")
    assert not Life(shared, 1, 2, 1).step()  # it has heard that
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # of one of several nodes
    last = Life(shared, 0, 2, 1)
    assert not last.step()
    other = Life(shared, 1, 2, 2)
    last.meeting.fail(b"another")  # while that one is here
    check_hears(other, "another")


def test_who_signs_in_anew_supersedes():
    shared = dist.HashStore()
    ranks = [Life(shared, rank, 2, 0) for rank in range(2)]
    waiting = list(ranks)
    while waiting := [rank for rank in waiting if not rank.step()]:
        assert not any(rank.meeting.superseded() for rank in ranks)
    assert not any(rank.meeting.superseded() for rank in ranks)
    again = Life(shared, 0, 2, 1)
    assert ranks[1].meeting.superseded()
    assert not again.meeting.superseded()


@pytest.mark.parametrize("before", ["", "0", "1", "01", "10", "2", "02", "12", "0120", "1021", "201", "0212", "1202"])
def test_a_failure_is_heard_though_the_rank_is_there_again(before: str):
    """By each that was there when rank 1 failed; `before`: which ranks had looked. Rank 2 comes when first named."""
    shared = dist.HashStore()
    ranks = [Life(shared, rank, 3, 0) for rank in range(2)]
    for rank in map(int, before):
        if rank == len(ranks):
            ranks.append(Life(shared, 2, 3, 0))
        else:
            assert not ranks[rank].step()
    ranks[1].meeting.fail(b"a bad day")
    waiting = [Life(shared, 1, 3, 1)]
    assert not waiting[0].step()
    for rank, life in enumerate(ranks):
        if rank != 1:
            check_hears(life, "a bad day")
    waiting += [Life(shared, rank, 3, 1) for rank in (0, 2)]
    for _ in range(3):
        waiting = [life for life in waiting if not life.step()]
    assert not waiting


def test_of_who_failed_and_is_there_again_the_next_failure_is_heard_too():
    shared = dist.HashStore()
    first, other = Life(shared, 0, 2, 0), Life(shared, 1, 2, 0)
    other.meeting.fail(b"a bad day")
    again = Life(shared, 1, 2, 1)
    check_hears(first, "a bad day")
    first = Life(shared, 0, 2, 1)
    again.meeting.fail(b"another")
    check_hears(first, "another")


def test_who_meets_the_others_last_hears_of_their_next_failure_in_its_next_one():
    shared = dist.HashStore()
    last, first = Life(shared, 0, 2, 0), Life(shared, 1, 2, 0)
    assert not last.step()
    assert first.step()
    Life(shared, 1, 2, 1).meeting.fail(b"a bad day")
    assert last.step()
    check_hears(Life(shared, 0, 2, 1), "a bad day")


def test_a_failure_that_is_counted_first_and_written_later():
    """As by a rank that stops in between."""
    shared = dist.HashStore()
    stopped, dead, waiting = (Life(shared, rank, 3, 0).meeting for rank in range(3))
    number = stopped.store.add("failures", 1)
    dead.fail(b"a bad day")
    Life(shared, 1, 3, 1)
    with pytest.raises(Failed, match="a bad day"):
        waiting.gather(b"")
    stopped.store.set(f"failure/{number}", stopped._signature(b"late"))
    waiting = Life(shared, 2, 3, 1).meeting
    stopped, dead = (Life(shared, rank, 3, 2).meeting for rank in range(2))
    number = stopped.store.add("failures", 1)
    assert not waiting.gather(b"")
    stopped.store.set(f"failure/{number}", stopped._signature(b"another"))
    Life(shared, 0, 3, 3)
    with pytest.raises(Failed, match="another"):
        waiting.gather(b"")


def test_a_failure_after_an_older_one_that_was_heard_late():
    shared = dist.HashStore()
    Life(shared, 1, 3, 0).meeting.fail(b"a bad day")
    slow = Life(shared, 0, 3, 0)
    ranks = [Life(shared, rank, 3, 1) for rank in (1, 2)]
    check_hears(slow, "a bad day")
    again = Life(shared, 0, 3, 1)
    ranks[1].meeting.fail(b"another")
    check_hears(again, "another")


def test_a_process_that_cannot_be_looked_at_has_not_ended(monkeypatch):
    nonce = b"of this process:" + rendezvous._process(os.getpid())
    assert not rendezvous._has_ended(nonce)

    def read_text(self):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", read_text)
    assert not rendezvous._has_ended(nonce)
