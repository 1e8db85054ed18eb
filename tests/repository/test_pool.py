"""The rank processes that other tests rely on: they are ranks, report what failed where, and end."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from pool import PATIENCE, RankFailure

import syncengine


def who_am_i():
    return syncengine.rank(), syncengine.world_size(), syncengine.local_rank(), torch.get_num_threads()


def gloo_sum():
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    return tensor.item(), syncengine.world_size()


def fail_on(rank):
    if syncengine.rank() == rank:
        raise ValueError("told to fail")


def hang_on(rank):
    if syncengine.rank() == rank:
        time.sleep(600)


def kill_on(rank):
    if syncengine.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def set_variable():
    os.environ["LEFT_BY_THE_FUNCTION"] = "1"
    return os.environ["LEFT_BY_THE_TEST"]


def variables_left():
    return [name for name in os.environ if name.startswith("LEFT_")]


def say_and_raise():
    print("some words", flush=True)
    sys.exit(7) if syncengine.rank() == 0 else (_ for _ in ()).throw(ValueError("told to fail"))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_each_rank_is_a_rank(pool, world):
    assert pool.run(who_am_i, world=world) == [(rank, world, rank, 1) for rank in range(world)]


def test_processes_are_kept(pool):
    first = pool.run(os.getpid, world=3)
    assert len(set(first)) == 3
    assert pool.run(os.getpid, world=3) == first


def test_no_variable_stays_for_the_next_test(pool):
    assert pool.run(set_variable, environ={"LEFT_BY_THE_TEST": "2"}) == ["2", "2"]
    assert pool.run(variables_left) == [[], []]


def test_init_is_left_to_the_function_if_it_wants(pool):
    assert pool.run(syncengine.is_initialized, world=2, settings=None) == [False, False]


def test_gloo_is_there_on_demand(pool):
    assert pool.run(gloo_sum, world=3, gloo=True) == [(6.0, 3)] * 3


@pytest.mark.parametrize(
    ("function", "text"), [(fail_on, "ValueError: told to fail"), (kill_on, "exit code -9"), (hang_on, "in hang_on")]
)
def test_failure_names_the_rank_and_the_pool_recovers(pool, function, text):
    for timeout in (3, 60) if function is hang_on else (PATIENCE,):  # a busy machine may need 3 s to connect the ranks
        with pytest.raises(RankFailure) as caught:
            pool.run(function, 1, world=2, timeout=timeout)
        if text in caught.value.texts[1]:
            break
    assert text in caught.value.texts[1]
    assert pool.run(who_am_i, world=2) == [(rank, 2, rank, 1) for rank in range(2)]


def test_spawned_ranks_end_as_programs_do(pool):
    with pool.spawn_ranks(say_and_raise) as ranks:
        assert ranks[0].exit_code() == 7
        assert ranks[1].exit_code() == 1
        for rank in ranks:
            assert "some words" in rank.output()
        assert ranks[1].output().count("ValueError: told to fail") == 1
        with pytest.raises(RankFailure, match="ValueError: told to fail"):
            ranks[1].result()


def test_leaving_the_block_ends_spawned_ranks(pool):
    with pool.spawn_ranks(os.getpid, settings=None) as ranks:
        assert ranks[1].result() == ranks[1].pid
        assert ranks[1].exit_code() == 0
    with pool.spawn_ranks(time.sleep, 60, settings=None) as ranks:
        ranks[0].signal(signal.SIGSTOP)
    assert ranks[0].exit_code(0) == -signal.SIGKILL
