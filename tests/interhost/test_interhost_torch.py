"""interhost="torch": virtual hosts that a process group of Gloo connects. Bits, training, faults."""

import itertools
import os
import signal
import time
from functools import partial
from unittest import mock

import pytest
import test_hosts
import torch
import torch.distributed as dist
from faults import WITHIN, ended, live_on, suffer
from marks import mostly_nightly
from pool import RankPool, run_on_ranks
from test_hosts import start, wait_until_busy
from two_groups import as_under_ddp, in_two_threads

import syncengine
from syncengine import interhost
from syncengine.interhost import agree_on_number
from syncengine.interhost import torch as interhost_torch

TORCH = {"SYNCENGINE_INTERHOST": "torch"}
on_torch = partial(run_on_ranks, settings=None, gloo=True, environ=TORCH)


def run(pool, function, hosts, *args):
    """One rank for each letter of `hosts`; equal letters share a host."""
    return pool.run(function, hosts, *args, world=len(hosts), settings=None, gloo=True, environ=TORCH)


def spawn(pool, function, hosts, *args, environ=TORCH, gloo=True):
    return pool.spawn_ranks(function, hosts, *args, world=len(hosts), settings=None, gloo=gloo, environ=environ)


@pytest.mark.parametrize("hosts", mostly_nightly(["ab", "aaab", "abab"], 1))
def test_every_collective(pool: RankPool, hosts: str) -> None:
    run(pool, test_hosts.use_everything, hosts)


@pytest.mark.thorough
@pytest.mark.parametrize("numerics", mostly_nightly(["rank_order", "ring"], 0))
def test_bits_are_those_of_one_host(pool: RankPool, numerics: str) -> None:
    alone = run(pool, test_hosts.reduce_all, "aaa", numerics)
    for hosts in ("aab", "abc"):
        for got in run(pool, test_hosts.reduce_all, hosts, numerics):
            assert test_hosts.same(got, alone[0]), hosts


def use_other_groups(hosts):
    """Beside the program's own messages, with groups of its own, and after it has destroyed all of them."""
    communicator = start(hosts, checksum=True)
    rank, peer = communicator.rank, 1 - communicator.rank % 2
    theirs = torch.full((1000,), float(rank))
    works = [dist.isend(theirs, peer, tag=5), dist.irecv(got := torch.empty(1000), peer, tag=5)]
    tensor = torch.ones(300_000)
    syncengine.all_reduce(tensor)
    for work in works:
        work.wait()
    assert got.eq(peer).all()
    assert tensor.eq(2).all()
    model = syncengine.Parallel(torch.nn.Linear(8, 8), process_group=dist.new_group([0, 1]))
    model(torch.ones(2, 8)).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    syncengine.all_reduce(tensor)
    assert tensor.eq(4).all()
    syncengine.shutdown()


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_beside_the_programs_own_groups(pool: RankPool, debug: str) -> None:
    environ = {**TORCH, "TORCH_DISTRIBUTED_DEBUG": debug}
    ended(pool, use_other_groups, "ab", settings=None, gloo=True, environ=environ)


@pytest.mark.thorough
@on_torch(hosts=mostly_nightly(["ab", "aba"], 1), environ={**TORCH, "SYNCENGINE_TIMEOUT": "10"})
def test_models_over_two_groups_in_two_threads() -> None:
    as_under_ddp(with_default=False)


def agree_on_numbers() -> list[int]:
    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def meet(payload: bytes, of: int) -> list[bytes]:
        answers = [b""] * 2
        dist.all_gather_object(answers, payload, group=groups[of])
        return answers

    return in_two_threads(lambda of: agree_on_number([0, 1], 2, partial(meet, of=of)))


def test_transports_of_two_groups_have_numbers_of_their_own(pool: RankPool) -> None:
    first, second = pool.run(agree_on_numbers, gloo=True, settings=None)
    assert first == second
    assert first[0] != first[1]


@on_torch(hosts=["ab"])
def test_tags_of_transports_far_apart_differ() -> None:
    """Models train over groups of which the first member has opened so many transports before."""
    syncengine.init(timeout=60.0)
    tags, models, opened = [], [], interhost_torch.torch_packet_transport

    def opening(group, ranks, tag, *others):
        assert tag not in tags
        tags.append(tag)
        return opened(group, ranks, tag, *others)

    for count in (1_000, 6_000, 10**9):
        counter = mock.patch.object(interhost, "_opened", itertools.count(count))
        with counter, mock.patch.object(interhost_torch, "torch_packet_transport", opening):
            models.append(syncengine.Parallel(torch.nn.Linear(8, 8), process_group=dist.new_group([0, 1])))
    for model in models:
        model(torch.full((2, 8), dist.get_rank() + 1.0)).sum().backward()
        assert model.module.weight.grad.eq(3).all()
    assert len(tags) == 3


@on_torch(hosts=["aab"])
def test_below_the_torch_backend() -> None:
    """Groups of the backend "syncengine" beside a default one of Gloo, which connects their hosts."""
    for ranks in ([0, 1, 2], [0, 2], [0, 2]):
        group = dist.new_group(ranks, backend="syncengine")
        if dist.get_rank() in ranks:
            tensor = torch.ones(1000)
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(len(ranks)).all()
            dist.destroy_process_group(group)


@on_torch(hosts=["ab"])
def test_shutdown_gives_the_group_back() -> None:
    for _ in range(2):
        syncengine.init(timeout=60.0)
        assert len(dist.distributed_c10d._world.pg_map) == 2  # the program's and ours
        tensor = torch.ones(10)
        syncengine.all_reduce(tensor)
        assert tensor.eq(2).all()
        syncengine.shutdown()


def test_exit_without_shutdown(pool: RankPool) -> None:
    ended(pool, test_hosts.leave_in_the_middle, "ab", settings=None, gloo=True, environ=TORCH)


@pytest.mark.parametrize("hosts", mostly_nightly(["ab", "aaab"], 1))
def test_killed_on_another_host(pool: RankPool, hosts: str) -> None:
    with spawn(pool, test_hosts.all_reduce_for_long, hosts, None) as ranks:
        test_hosts.kill_the_last(ranks)


@pytest.mark.thorough
def test_stopped_on_another_host(pool: RankPool) -> None:
    environ = {**TORCH, "SYNCENGINE_SILENCE": "2"}
    with spawn(pool, test_hosts.all_reduce_for_long, "aab", None, environ=environ) as ranks:
        wait_until_busy(ranks)
        stopped_at = time.monotonic()
        ranks[2].signal(signal.SIGSTOP)
        for rank in ranks[:2]:
            outcome = rank.result()
            outcome.check("PeerLost", "rank 2 has been silent")
            assert outcome.at - stopped_at < WITHIN


def only_init(hosts, group):
    live_on(hosts)
    if group == "syncengine":
        os.environ["SYNCENGINE_INTERHOST"] = "tcp"
        dist.init_process_group("syncengine")
        os.environ["SYNCENGINE_INTERHOST"] = "torch"
    return suffer(lambda step: None, timeout=100.0)


@pytest.mark.parametrize(
    ("group", "text"), [("none", "needs an initialized torch.distributed"), ("syncengine", "is syncengine's own")]
)
def test_what_can_not_carry_it_is_refused(pool: RankPool, unused_port: int, group: str, text: str) -> None:
    environ = {**TORCH, "MASTER_PORT": str(unused_port)}
    with spawn(pool, only_init, "ab", group, environ=environ, gloo=False) as ranks:
        outcomes = [rank.result() for rank in ranks]
        assert any(outcome.error == "InvalidUsage" for outcome in outcomes), outcomes
        assert all(text in outcome.text for outcome in outcomes), outcomes
