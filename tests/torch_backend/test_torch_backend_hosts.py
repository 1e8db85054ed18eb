"""The torch.distributed backend "syncengine" over several hosts: one machine split by SYNCENGINE_HOST_ID."""

from __future__ import annotations

import importlib
import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from faults import needs_hooks, set_fault
from parallel_models import different_bits
from pool import RankPool
from test_hosts import live_on
from test_torch_backend_groups import whole_life
from test_torch_backend_messages import NOT_SENT, receive_what_was_not_sent
from test_torch_backend_training import train as train_some
from test_torch_backend_works import wait_for_rank_1
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_backend_values import ours

from syncengine.errors import PeerLost, SyncError

# What holds on one host holds on several: by the hosts that the ranks live on, the tests of one host, by module.
SHARED = {
    "ab": {"_works": ["test_works_and_futures"], "_messages": ["test_messages_match_by_tag_and_in_order"]},
    "aba": {
        "_groups": ["test_a_backend_is_split"],
        "_messages": ["test_a_future_of_a_message_that_comes_late_does_not_hold_up_the_others"],
    },
    "aabb": {"_groups": ["test_groups_of_some_ranks"], "_messages": ["test_receive_from_any_rank"]},
    "abab": {"_groups": ["test_groups_of_some_ranks"]},  # of which each lives on one host
}


def call_on_hosts(hosts: str, tests: dict[str, list[str]]) -> None:
    live_on(hosts)
    for module, names in tests.items():
        for name in names:
            getattr(importlib.import_module(f"test_torch_backend{module}"), name).on_ranks()


@pytest.mark.parametrize("hosts", SHARED)
def test_as_on_one_host(pool: RankPool, hosts: str) -> None:
    pool.run(call_on_hosts, hosts, SHARED[hosts], world=len(hosts), gloo=True, settings=None)


def wait(hosts: str, how: str) -> str | None:
    live_on(hosts)
    return wait_for_rank_1(how)


@pytest.mark.parametrize("how", ["group", "monitored"])
def test_timeouts_name_the_rank_that_is_missing(pool: RankPool, how: str) -> None:
    text = pool.run(wait, "ab", how, gloo=True, settings=None)[0]
    assert "rank 0 waits for rank 1" in text


def train(hosts: str, how: str) -> list[torch.Tensor]:
    live_on(hosts)
    group = ours()
    if how == "ddp":
        _, parameters = train_some(lambda module: DistributedDataParallel(module, process_group=group))
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        _, parameters = train_some(lambda module: fully_shard(module, mesh=mesh))
    sent = group._get_backend(torch.device("cpu")).communicator.counters()["interhost_bytes"]
    assert (sent > 0) == (len(set(hosts)) > 1)
    return parameters


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_training_has_the_bits_of_one_host(pool: RankPool, how: str) -> None:
    alone = pool.run(train, "aaaa", how, world=4, gloo=True, settings=None)
    over_hosts = pool.run(train, "aabb", how, world=4, gloo=True, settings=None)
    for one, other in zip(alone, over_hosts, strict=True):
        assert not different_bits(one, other)


def lives_and_dies(hosts: str, debug: bool) -> None:
    live_on(hosts)
    whole_life(debug)


@pytest.mark.parametrize("debug", [False, True])
def test_the_default_group(pool: RankPool, debug: bool) -> None:
    with pool.spawn_ranks(lives_and_dies, "ab", debug, settings=None) as ranks:
        for rank in ranks:
            rank.result()
            assert rank.exit_code() == 0, rank.output()


def receive(hosts: str, how: str) -> str | None:
    live_on(hosts)
    return receive_what_was_not_sent(how)


@pytest.mark.parametrize(("how", "text"), NOT_SENT)
def test_what_does_not_come_is_named(pool: RankPool, how: str, text: str) -> None:
    with pool.spawn_ranks(receive, "ab", how, gloo=True, settings=None) as ranks:
        got = ranks[0].result()
        assert all(part in got for part in text.split(" while "))  # why it is thought to be dead stands between them
        if how != "die":
            ranks[1].result()


def die_in_a_group(hosts: str, interhost: str) -> str | None:
    """Rank 2 dies, and rank 1 says what it hears of it. In the group they are ranks 1 and 0."""
    live_on(hosts)
    os.environ["SYNCENGINE_INTERHOST"] = interhost
    group = dist.new_group([1, 2], backend="syncengine")
    rank = dist.get_rank()
    if rank == 0:
        return None
    dist.all_reduce(torch.ones(3), group=group)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as error:
        dist.recv(torch.ones(3), 2, group)
    return str(error.value)


@pytest.mark.parametrize("interhost", ["tcp", "torch"])
def test_a_group_of_some_ranks_names_them_as_the_job_does(pool: RankPool, interhost: str) -> None:
    with pool.spawn_ranks(die_in_a_group, "abc", interhost, world=3, gloo=True, settings=None) as ranks:
        text = ranks[1].result()
        assert re.match("rank 2 died, or the (network|way) to it broke", text), text
        assert " while rank 1 was in recv(" in text


def connect_a_group(hosts: str, how: str) -> str:
    """What ranks 1 and 2 hear of a failure while their group connects."""
    live_on(hosts)
    rank = dist.get_rank()
    if rank == 0:
        return ""
    if how == "numerics":
        os.environ["SYNCENGINE_NUMERICS"] = ["ring", "rank_order"][rank - 1]
    elif how == "secret":
        os.environ["SYNCENGINE_SECRET"] = f"a secret of rank {rank}"
    else:
        set_fault(1, f"{how}:1:kill")
    with pytest.raises(SyncError) as error:
        dist.new_group([1, 2], timedelta(seconds=5) if how == "secret" else None, "syncengine")
    return str(error.value)


@needs_hooks
@pytest.mark.parametrize(
    ("hosts", "how", "said"),
    [
        ("aaa", "numerics", "rank 1 has numerics='ring', rank 2 has numerics='rank_order'"),
        ("abc", "secret", "rank 1 and rank 2 have different secrets"),
        ("aaa", "connecting", "rank 1 died while the ranks connected"),
        ("abc", "tcp_rendezvous", "rank 1 refused the connection from rank 2"),
    ],
)
def test_a_group_that_does_not_connect_names_ranks_as_the_job_does(
    pool: RankPool, hosts: str, how: str, said: str
) -> None:
    with pool.spawn_ranks(connect_a_group, hosts, how, world=3, gloo=True, settings=None) as ranks:
        assert ranks[2].result().startswith(said)
