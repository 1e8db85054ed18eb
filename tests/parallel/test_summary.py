"""The line at the end of a run, and the numbers that loggers get."""

import multiprocessing
import os
import time
from collections.abc import Callable

import pytest
from marks import mostly_nightly
from parallel_models import backwards, data
from pool import RankPool, Ranks, run_on_ranks
from torch import nn

import syncengine
from syncengine.parallel import summary
from syncengine.parallel.summary import LEAST_STEPS, _size, numbers_of

BYTES = (24 * 100 + 100) * 4  # of the gradients of `Linear(24, 100)`
WANTED = {"SYNCENGINE_SUMMARY": "1"}
KEYS = {"steps", "step_ms", "exposed_sync_ms", "exposed_sync_percent", "latest_rank", "latest_rank_ms"}
KEYS |= {"late_ms", "late_input_ms", "late_forward_ms", "late_backward_ms", "late_optimizer_ms"}
KEYS |= {"total_reduced_bytes", "reduced_bytes", "copied_bytes", "staged_bytes", "buckets"}


def train(steps: int, keeps: bool = True) -> dict[str, float]:
    model = syncengine.Parallel(nn.Linear(24, 100))
    backwards(model, steps)
    with model.no_sync():
        model(data(0)).sum().backward()  # is no step of its own
    numbers = model.stats()
    if not keeps:
        syncengine.shutdown()
    return numbers


def lines(ranks: Ranks) -> list[list[str]]:
    """What each rank has said by its end, without what tracebacks say."""
    assert None not in [rank.exit_code() for rank in ranks]
    return [[line for line in rank.output().splitlines() if line.startswith("syncengine: ")] for rank in ranks]


@pytest.mark.parametrize("keeps", [True, False], ids=["at the end", "after a shutdown"])
def test_rank_0_says_how_the_steps_went(pool: RankPool, keeps: bool):
    steps = 23
    with pool.spawn_ranks(train, steps, keeps, environ=WANTED) as ranks:
        (line,), of_1 = lines(ranks)
    assert of_1 == []
    assert line.startswith(f"syncengine: {steps} steps of Parallel(Linear) on 2 ranks, median ")
    assert " ms, exposed synchronization " in line
    assert f"; {_size(BYTES)} of gradients reduced a step, {_size(BYTES * steps)} in all (" in line


def train_in_a_fork() -> int | None:
    child = multiprocessing.get_context("fork").Process(target=train, args=(12,))
    child.start()
    child.join(120)
    return child.exitcode


def test_also_of_ranks_that_multiprocessing_forks(pool: RankPool):
    with pool.spawn_ranks(train_in_a_fork, settings=None, environ=WANTED) as ranks:
        assert [len(said) for said in lines(ranks)] == [1, 0]
        assert [rank.result() for rank in ranks] == [0, 0]


@pytest.mark.parametrize(
    ("steps", "environ", "settings"),
    mostly_nightly(
        [(LEAST_STEPS - 1, WANTED, {}), (23, {"SYNCENGINE_SUMMARY": "0"}, {}), (23, WANTED, {"summary": False})], 0, 2
    ),
    ids=["few steps", "off by variable", "off by argument"],
)
def test_otherwise_nothing_is_said(pool: RankPool, steps: int, environ: dict, settings: dict):
    with pool.spawn_ranks(train, steps, environ=environ, settings={"timeout": 60.0, **settings}) as ranks:
        assert lines(ranks) == [[], []]
        assert [(rank.exit_code(), rank.result()["steps"]) for rank in ranks] == [(0, steps)] * 2


def train_until_a_peer_is_lost() -> None:
    model = syncengine.Parallel(nn.Linear(24, 100))
    backwards(model, 21)
    if syncengine.rank() == 1:
        os._exit(3)
    backwards(model, 9)


def train_on_a_split() -> None:
    """Whose communicator does not learn of the error that ends the program."""
    everyone = syncengine.default_communicator().split([0, 1])
    model = syncengine.Parallel(nn.Linear(24, 100), process_group=everyone)
    backwards(model, 23)
    everyone.barrier()
    raise ValueError("full disk")


def train_and_fail_later() -> None:
    """The model is gone, and its communicator, which would know of the error."""
    train(23, keeps=False)
    raise ValueError("full disk")


@pytest.mark.parametrize(
    ("body", "text", "code"),
    [
        (train_until_a_peer_is_lost, "PeerLost", 3),
        (train_on_a_split, "full disk", 1),
        (train_and_fail_later, "full disk", 1),
    ],
)
def test_nothing_is_said_after_an_error(pool: RankPool, body: Callable[[], None], text: str, code: int):
    with pool.spawn_ranks(body, environ=WANTED) as ranks:
        assert lines(ranks) == [[], []]
        assert text in ranks[0].output()
        assert [rank.exit_code() for rank in ranks] == [1, code]


def test_by_default_it_is_said():
    assert syncengine.config.Config.read({}).summary
    assert not syncengine.config.Config.read({"SYNCENGINE_SUMMARY": "0"}).summary


def test_sizes():
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 3 * 2**19: "1.50 MiB", 2**40 * 5000: "5000.00 TiB"}
    assert [_size(n) for n in sizes] == list(sizes.values())


@pytest.mark.parametrize("world", [1, 2])
@run_on_ranks()
def test_stats_are_plain_numbers(world: int):
    numbers = train(7)
    assert numbers.keys() == KEYS
    if world == 1:
        assert set(numbers.values()) == {0}
    else:
        assert all(type(number) in (int, float) for number in numbers.values())
        counted = [numbers[name] for name in ("steps", "reduced_bytes", "total_reduced_bytes")]
        assert counted == [7, BYTES, 7 * BYTES]
        assert 0 < numbers["step_ms"] < 60e3
        assert numbers["exposed_sync_ms"] > 0


@run_on_ranks()
def test_what_is_exposed_is_a_part_of_backward():
    """Rank 1 comes late to each backward. The first step, which takes longest, has no beginning, so only one counts."""
    model = syncengine.Parallel(nn.Linear(24, 100))
    for i in range(2):
        loss = model(data(i)).sum()
        if syncengine.rank() == 1:
            time.sleep(0.02 if i else 0.2)
        begin = time.perf_counter_ns()
        loss.backward()
        spent = time.perf_counter_ns() - begin
    numbers = numbers_of(model.reducer.step_times())
    assert 0 < numbers.wait_ms <= spent / 1e6
    assert numbers.step_ms >= numbers.wait_ms


@run_on_ranks()
def test_a_step_that_failed_is_none():
    model = syncengine.Parallel(nn.Linear(24, 100))
    backwards(model, 4)
    for _ in range(2):
        y = model(data(0))
        y.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
    backwards(model)
    numbers = model.stats()
    assert (numbers["steps"], numbers["total_reduced_bytes"]) == (7, 7 * BYTES)


@run_on_ranks(spawned=True, environ=WANTED)
def test_of_many_models_those_with_most_steps_are_remembered():
    models = [syncengine.Parallel(nn.Linear(24, 3)) for _ in range(40)]
    backwards(models[7], 2)
    models += [syncengine.Parallel(nn.Linear(24, 3)) for _ in range(40)]
    steps = [one.times.summary()[0] for one in summary._followed]
    assert (len(steps), sum(steps)) == ((64, 2) if syncengine.rank() == 0 else (0, 0))
