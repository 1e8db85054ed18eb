"""The torch.distributed backend "syncengine" over several hosts: one machine split by SYNCENGINE_HOST_ID."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from faults import needs_hooks, set_fault
from marks import mostly_nightly
from parallel_models import different_bits
from pool import RankPool
from test_torch_backend_training import train as train_some
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_backend_values import ours

from syncengine.errors import PeerLost, SyncError


def train(how: str) -> list[torch.Tensor]:
    group = ours()
    if how == "ddp":
        _, parameters = train_some(lambda module: DistributedDataParallel(module, process_group=group))
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        _, parameters = train_some(lambda module: fully_shard(module, mesh=mesh))
    communicator = group._get_backend(torch.device("cpu")).communicator
    assert (communicator.counters()["interhost_bytes"] > 0) == (len(set(communicator.hosts)) > 1)
    return parameters


@pytest.mark.thorough
@pytest.mark.parametrize("how", mostly_nightly(["ddp", "fsdp2"], 1))
def test_training_has_the_bits_of_one_host(pool: RankPool, how: str) -> None:
    alone, over_hosts = (pool.run(train, how, hosts=hosts, gloo=True, settings=None) for hosts in ("aaaa", "aabb"))
    for one, other in zip(alone, over_hosts, strict=True):
        assert not different_bits(one, other)


def die_in_a_group(interhost: str) -> str | None:
    """Rank 2 dies, and rank 1 says what it hears of it. In the group they are ranks 1 and 0."""
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
    with pool.spawn_ranks(die_in_a_group, interhost, hosts="abc", gloo=True, settings=None) as ranks:
        text = ranks[1].result()
        assert re.match("rank 2 died, or the (network|way) to it broke", text), text
        assert " while rank 1 was in recv(" in text


def connect_a_group(how: str) -> str:
    """What ranks 1 and 2 hear of a failure while their group connects."""
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
        dist.new_group([1, 2], timedelta(seconds=60) if how == "secret" else None, "syncengine")
    return str(error.value)


@needs_hooks
@pytest.mark.parametrize(
    ("hosts", "how", "said"),
    [
        ("aaa", "numerics", "rank 1 has numerics='ring', rank 2 has numerics='rank_order'"),
        ("abc", "secret", "rank 1 and rank 2 have different secrets"),
        ("aaa", "connecting", "rank 1 died while the ranks connected"),
        ("abc", "tcp_rendezvous", "rank 1 died while the ranks connected"),
    ],
)
def test_a_group_that_does_not_connect_names_ranks_as_the_job_does(
    pool: RankPool, hosts: str, how: str, said: str
) -> None:
    with pool.spawn_ranks(connect_a_group, how, hosts=hosts, gloo=True, settings=None) as ranks:
        assert ranks[2].result().startswith(said)
