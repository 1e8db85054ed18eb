"""After a communicator has failed: all ranks that call init() or Parallel again get a new one, and train on with it."""

import copy
import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import Resources, my_rank, wait_for_failure, wait_for_file
from marks import mostly_nightly
from parallel_models import Mlp
from pool import RankPool, run_on_ranks
from torch import nn

import syncengine
from syncengine import connect
from syncengine.errors import Aborted, InvalidUsage, SyncError

Communicator = syncengine.Communicator


def check_training(model: nn.Module, communicator: Communicator | None = None) -> None:
    """A few steps, beside the same on one rank with the data of all."""
    communicator = communicator or syncengine.default_communicator()
    alone = copy.deepcopy(model.module)
    batches = [torch.randn(3, 24, generator=torch.Generator().manual_seed(r)) for r in range(communicator.size)]
    for _ in range(3):
        for each in (model, alone):
            each.zero_grad()
        model(batches[communicator.rank]).square().mean().backward()
        (sum(alone(batch).square().mean() for batch in batches) / communicator.size).backward()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
                theirs.copy_(ours.sub_(0.01 * ours.grad))


def error_of(call, *args) -> tuple[str, str]:
    with pytest.raises(SyncError) as caught:
        call(*args)
    return type(caught.value).__name__, str(caught.value)


def other_count() -> None:
    syncengine.all_reduce(torch.ones(5 + syncengine.rank()))


def abort(communicator: Communicator | None = None, text: str = "rank 1: ValueError: a bad batch") -> None:
    """By member 1, when the others have done what was before."""
    communicator = communicator or syncengine.default_communicator()
    communicator.barrier()
    if communicator.rank == 1:
        communicator.abort(text)
    communicator.barrier()


LIMIT = 5.0  # seconds, of communicators that time out: enough for init, and for training, on a busy machine


def late() -> None:
    if syncengine.rank() == 1:
        wait_for_failure()
    syncengine.barrier()


class Breaks(Mlp):
    broken = False
    broken_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise ValueError("not this batch")
        y = super().forward(x)
        if self.broken_backward:
            y.register_hook(lambda _: 1 / 0)
        return y + 1.0


def train_and_raise(module: Breaks, where: str) -> None:
    model = syncengine.Parallel(module)
    for step in range(2):
        module.broken = step == 1 and where == "forward" and my_rank() == 1
        module.broken_backward = step == 1 and where == "backward" and my_rank() == 1
        model(torch.ones(2, 24)).sum().backward()


@pytest.mark.thorough
@pytest.mark.parametrize("where", mostly_nightly(["forward", "backward"], 1))
@run_on_ranks(hosts=mostly_nightly(["aaa", "ab", "aab"], 2), settings=None)
def test_the_rank_that_raised_wraps_its_model_again_at_once(where: str):
    """It waits for nobody before. Nothing has failed: the communicator stays."""
    old = syncengine.init(timeout=20.0)
    module = Breaks()
    for failed in range(1, 4):
        raised = {"forward": ValueError, "backward": ZeroDivisionError}[where]
        with pytest.raises(raised if my_rank() == 1 else Aborted) as caught:
            train_and_raise(module, where)
        module.broken = module.broken_backward = False
        module.zero_grad()
        if failed == 2:
            del caught
            gc.collect()  # the model that has refused its step is gone
        check_training(syncengine.Parallel(module))
        assert syncengine.default_communicator() is old


@run_on_ranks(settings=None)
def test_a_model_over_a_group_of_the_backend_is_wrapped_again(tmp_path: Path):
    """torch's group stays what it was: only who wraps a model gets another communicator."""
    dist.init_process_group("syncengine", f"file://{tmp_path}/store", rank=my_rank(), world_size=2)
    group = dist.new_group([0, 1])
    for process_group in (None, group):
        module = Mlp()
        model = syncengine.Parallel(module, process_group=process_group)
        assert error_of(abort, model.communicator, "not this batch") == ("Aborted", "not this batch")
        model = syncengine.Parallel(module, process_group=process_group)
        check_training(model, model.communicator)
        assert syncengine.Parallel(module, process_group=process_group).communicator is model.communicator
        with pytest.raises(Aborted, match="not this batch"):
            dist.all_reduce(torch.ones(1), group=process_group)


FAILURES = {
    "Mismatch": (other_count, "elements"),
    "Aborted": (abort, "a bad batch"),
    "Timeout": (late, f"the timeout is {LIMIT} s"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hosts", "how", "numerics"),
    mostly_nightly(
        [
            *((hosts, how, "rank_order") for hosts in ("aaa", "ab", "aab") for how in FAILURES),
            ("aa", "Aborted", "ring"),
        ],
        6,
    ),
)
@run_on_ranks(settings=None)
def test_a_new_communicator_after_a_failure(hosts: str, how: str, numerics: str):
    """It has the settings of the old one."""
    old = syncengine.init(timeout=LIMIT if how == "Timeout" else 20.0, numerics=numerics)
    assert syncengine.init() is old
    dead, tensor = syncengine.Parallel(Mlp()), syncengine.empty(300)
    check_training(dead)
    fail, text = FAILURES[how]
    kind, first = error_of(fail)
    assert text in first
    assert error_of(syncengine.barrier) == (kind, first)  # only init and Parallel ask for another one

    model = syncengine.Parallel(Mlp())
    new = syncengine.default_communicator()
    assert new is not old and model.communicator is new and syncengine.init() is new
    assert (new.size, new.rank, new.numerics, new.timeout) == (len(hosts), old.rank, old.numerics, old.timeout)
    check_training(model)

    assert error_of(dead, torch.ones(2, 24)) == (kind, first)
    assert error_of(old.all_reduce, tensor) == (kind, first)
    assert error_of(syncengine.Parallel, Mlp(), None, None, 0, None, True, old) == (kind, first)
    with pytest.raises(InvalidUsage, match="default communicator"):
        copy.deepcopy(dead)
    tensor.fill_(1.0)
    syncengine.all_reduce(tensor)  # an ordinary one by now
    assert tensor.eq(len(hosts)).all()
    check_training(model)


@run_on_ranks(settings=None)
def test_it_may_have_other_settings():
    syncengine.init(timeout=20.0, numerics="ring", log_after=3.0)
    with pytest.raises(InvalidUsage, match="already has numerics='ring'"):
        syncengine.init(numerics="rank_order")
    error_of(abort)
    communicator = syncengine.init(numerics="rank_order", timeout=30.0)
    assert (communicator.numerics, communicator.timeout) == ("rank_order", 30.0)
    syncengine.init(log_after=3.0)
    error_of(abort)
    only_rank_1 = "ring" if my_rank() == 1 else "rank_order"
    assert error_of(lambda: syncengine.init(numerics=only_rank_1))[0] == "Mismatch"
    assert error_of(syncengine.barrier)[0] == "Aborted"
    assert syncengine.init().numerics == "rank_order"
    syncengine.barrier()


@pytest.mark.parametrize("hosts", mostly_nightly(["aaa", "aab"], 1))
@run_on_ranks(settings=None)
def test_ranks_that_have_not_noticed(hosts: str, tmp_path: Path):
    """Rank 0 aborts and comes back, while the others, which wait for nothing, have not heard of it."""
    old = syncengine.init(timeout=20.0)
    syncengine.barrier()
    (tmp_path / f"ready {old.rank}").touch()  # who is still in the barrier would hear of it there
    if old.rank == 0:
        for rank in range(len(hosts)):
            wait_for_file(tmp_path / f"ready {rank}")
        old.abort("rank 0: RuntimeError: the scheduler broke")
        (tmp_path / "aborted").touch()
    else:
        wait_for_file(tmp_path / "aborted")
        if hosts[0] != hosts[old.rank]:
            time.sleep(0.5)
    model = syncengine.Parallel(Mlp())
    assert model.communicator is not old and model.communicator.size == len(hosts)
    check_training(model)
    assert error_of(old.barrier) == ("Aborted", "rank 0: RuntimeError: the scheduler broke")


class Quiet:
    """A communicator that hears of its end late, or never."""

    def __init__(self, looks: float) -> None:
        self.looks, self.aborted = looks, ""

    def check_peers(self) -> None:
        self.looks -= 1
        if self.looks < 0 or self.aborted:
            raise Aborted("the first error")

    def abort(self, text: str) -> None:
        self.aborted = text

    def close_devices(self) -> None:
        """It has none."""


class Asked:
    """An exchange whose next one some rank has opened, or not."""

    def __init__(self, superseded: bool) -> None:
        self.superseded = lambda: superseded


def test_another_host_is_ahead_of_its_message(monkeypatch) -> None:
    monkeypatch.setattr(connect, "given_up", set())

    def has_failed(communicator: Quiet, exchange: Asked | None) -> bool:
        return connect.Connection(communicator, exchange).has_failed()

    for exchange in (None, Asked(False)):
        assert not has_failed(Quiet(looks=1e9), exchange)
        assert has_failed(Quiet(looks=0), exchange)
    soon, never = Quiet(looks=3), Quiet(looks=1e9)
    monkeypatch.setattr(connect, "_LATE", 1e9)
    assert has_failed(soon, Asked(True)) and not soon.aborted
    monkeypatch.setattr(connect, "_LATE", 0.05)
    assert has_failed(never, Asked(True)) and "another rank has given up this communicator" in never.aborted


def one_stays_away(folder: str) -> list[tuple[str, str]]:
    syncengine.init(timeout=LIMIT)
    error_of(abort)
    answers = []
    if my_rank() == 2:
        for rank in (0, 1):
            wait_for_file(Path(folder, str(rank)))
    while True:
        try:
            syncengine.init()
            break
        except SyncError as error:
            answers.append((type(error).__name__, str(error)))
            Path(folder, str(my_rank())).touch()
            time.sleep(0.5)  # until all have looked: that a rank has failed is not seen once it has come again
    syncengine.barrier()
    return answers


@pytest.mark.thorough
def test_a_rank_that_does_not_come_is_named(pool: RankPool, tmp_path: Path) -> None:
    """It comes later, while the others try again, and all meet in the end."""
    said = pool.run(one_stays_away, str(tmp_path), world=3, settings=None)
    assert said[0] and said[1]
    for answers in said:
        assert all(kind == "Timeout" and "did not join" in text for kind, text in answers), answers
    for answers in said[:2]:  # later it may have come just before another one's time is up
        assert answers[0][1].startswith("rank 2 did not join"), answers


def die_or_try() -> str:
    syncengine.init(timeout=LIMIT)
    if my_rank() == 1:
        os._exit(3)
    assert error_of(syncengine.barrier)[0] == "PeerLost"
    return error_of(syncengine.init)[1]  # at once, as often as it is called


def test_a_rank_that_has_died_is_named(pool: RankPool) -> None:
    with pool.spawn_ranks(die_or_try, world=3, settings=None) as ranks:
        for rank in (0, 2):
            assert ranks[rank].result().startswith("rank 1 died")


def break_down() -> str:
    old = syncengine.default_communicator()
    alive = old.split([0, 1])
    error_of(other_count)
    check_training(syncengine.Parallel(Mlp()))
    if syncengine.rank() == 1:
        raise ValueError("nobody catches this")
    return error_of(alive.barrier)[1]


def test_an_uncaught_error_reaches_what_came_of_the_old_one(pool: RankPool) -> None:
    with pool.spawn_ranks(break_down) as ranks:
        assert ranks[0].result() == "rank 1: ValueError: nobody catches this"


@run_on_ranks()
def test_a_communicator_that_was_passed_in_stays_dead():
    """What the user chose stays what it is."""
    default = syncengine.default_communicator()
    split = default.split(list(range(default.size)))
    error_of(abort, split, "split: a bad day")
    for _ in range(2):
        assert error_of(split.barrier) == ("Aborted", "split: a bad day")
        assert error_of(lambda: syncengine.Parallel(Mlp(), process_group=split)) == ("Aborted", "split: a bad day")
    assert syncengine.init() is default  # which has not failed
    check_training(syncengine.Parallel(Mlp()))
    alive = default.split(list(range(default.size)))
    error_of(other_count)
    check_training(syncengine.Parallel(Mlp()))
    assert syncengine.default_communicator() is not default
    alive.barrier()  # nobody has aborted the job, nor this one
    check_training(syncengine.Parallel(Mlp(), process_group=alive), alive)


@run_on_ranks(world=3, gloo=True, settings=None)
def test_communicators_of_torch_groups():
    """A group of torch's whose store works; the others are not asked."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    model = syncengine.Parallel(Mlp(), process_group=group)
    old = model.communicator
    check_training(model, old)
    for round in range(3):
        assert error_of(abort, model.communicator, f"round {round}") == ("Aborted", f"round {round}")
        model = syncengine.Parallel(Mlp(), process_group=group)
        assert model.communicator is not old and model.process_group is group
        check_training(model, model.communicator)
    assert error_of(old.barrier) == ("Aborted", "round 0")
    assert not syncengine.is_initialized()


@run_on_ranks(gloo=True, settings=None)
def test_the_default_group_of_torch():
    communicator = syncengine.Parallel(Mlp(), process_group=dist.group.WORLD).communicator
    error_of(abort, communicator)
    for group in (dist.group.WORLD, None):
        model = syncengine.Parallel(Mlp(), process_group=group)
        assert model.communicator is not communicator
        check_training(model)


@run_on_ranks()
def test_one_rank_may_copy_a_dead_model():
    """On one rank alone, for a last checkpoint: it must not wait for the others."""
    model = syncengine.Parallel(Mlp())
    check_training(model)
    error_of(abort)
    if syncengine.rank() == 0:
        dead = copy.deepcopy(model)
        assert error_of(dead, torch.ones(2, 24)) == ("Aborted", "rank 1: ValueError: a bad batch")
    check_training(syncengine.Parallel(model.module))


@pytest.mark.thorough
@run_on_ranks(hosts=mostly_nightly(["aaa", "aab"], 1), settings=None)
def test_nothing_is_left_of_old_ones():
    before = Resources.now()
    syncengine.init(timeout=20.0)
    check_training(syncengine.Parallel(Mlp()))
    gc.collect()
    counts = []
    for _ in range(5):
        model, tensor = syncengine.Parallel(Mlp()), syncengine.empty(100_000).fill_(1.0)
        syncengine.all_reduce(tensor)
        check_training(model)
        error_of(abort)
        syncengine.init()
        check_training(syncengine.Parallel(Mlp()))
        del model, tensor
        gc.collect()
        syncengine.barrier()
        now = Resources.now()
        counts.append((len(now.descriptors), len(now.mappings), len(now.threads)))
        syncengine.barrier()  # a peer that shuts down takes its connections along: not before all have counted
    syncengine.shutdown()
    gc.collect()
    assert len(set(counts)) == 1, counts
    assert before.left() == []
