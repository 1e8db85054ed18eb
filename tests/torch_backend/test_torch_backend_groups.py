"""The torch.distributed backend "syncengine": groups of some ranks, parts of groups, and the default group."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from faults import ended
from pool import RankPool, run_on_ranks
from torch_backend_values import equal, mine, ours, value, values

import syncengine
from syncengine import _C
from syncengine.communicator import group_communicator
from syncengine.errors import InvalidUsage
from syncengine.launch import store as launch_store


@run_on_ranks(hosts=["aaaa", "aabb", "abab"], gloo=True, settings=None)  # groups of one host, and of two
def test_groups_of_some_ranks() -> None:
    rank = dist.get_rank()
    evens, odds = dist.new_group([0, 2], backend="syncengine"), dist.new_group([3, 1], backend="syncengine")
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=odds if rank % 2 else evens)
    assert tensor[0] == (4 if rank % 2 else 2)
    if rank % 2 == 0:
        assert odds is dist.GroupMember.NON_GROUP_MEMBER
        dist.all_reduce(tensor, group=odds)  # a warning, as everywhere
    else:
        backend = odds._get_backend(torch.device("cpu"))
        assert backend.communicator.global_ranks == [1, 3]
        dist.broadcast(tensor := torch.full((1,), rank), 3, odds)
        assert tensor.item() == 3
    single = dist.new_group([rank], backend="syncengine", use_local_synchronization=True)
    dist.all_reduce(tensor := torch.full((2,), 7.0), group=single)
    dist.all_gather([gathered := torch.zeros(2)], tensor, group=single)
    assert gathered[0] == 7
    dist.destroy_process_group(odds if rank % 2 else evens)


@run_on_ranks(hosts=["aaa", "aba"], gloo=True, settings=None)
def test_a_backend_is_split() -> None:
    group, rank = ours(), dist.get_rank()
    backend = group._get_backend(torch.device("cpu"))
    half = backend.split([0, 2])
    assert backend.supports_splitting
    if rank == 1:
        assert half is None
    else:
        assert isinstance(half, _C.Backend)
        assert half.communicator.global_ranks == [0, 2]
        half.allreduce([tensor := mine(torch.float32, 5)]).wait()
        assert equal(tensor, value(torch.float32, 0, 5) + value(torch.float32, 2, 5))
        half.shutdown()
    # The way of torch's own split_group, whose Python front asks for an accelerator.
    part = group.split_group([2, 1], timeout=timedelta(seconds=20), group_desc="two")
    if rank == 0:
        assert part is None
    else:
        assert (part.rank(), part.size(), part.group_desc) == (rank - 1, 2, "two")
        part.broadcast(tensor := mine(torch.float32, 5), 1).wait()
        assert equal(tensor, value(torch.float32, 2, 5))
        part.shutdown()
    with pytest.raises(InvalidUsage, match="can be lowered only"):
        group.split_group([0, 1], timeout=timedelta(days=2))
    with pytest.raises(InvalidUsage, match="must be more than 0"):
        group.split_group([0, 1], timeout=timedelta(0))
    with pytest.raises(InvalidUsage, match="timeout of 0 s is not allowed"):
        ours(timeout=timedelta(0))
    if rank == 1:
        time.sleep(0.3)  # the others sleep by then, with a deadline
    dist.barrier(group, async_op=True).wait(timedelta(days=200_000))
    dist.barrier(group)


def whole_life(debug: bool) -> None:
    if debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
    rank = int(os.environ["RANK"])
    for backend, generation in (("syncengine", 0), ("cpu:syncengine", 1)):
        store = dist.PrefixStore(str(generation), launch_store.open_store())
        dist.init_process_group(backend, store=store, rank=rank, world_size=2)
        tensor = mine(torch.float32, 10)
        dist.all_reduce(tensor)
        assert equal(tensor, sum(values(torch.float32, 10)))
        dist.barrier()
        model = syncengine.Parallel(torch.nn.Linear(3, 3))
        assert model.communicator is group_communicator(dist.group.WORLD)
        model(torch.ones(2, 3)).sum().backward()
        dist.destroy_process_group()
        assert not dist.is_initialized()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("debug", [False, True])
def test_the_default_group(pool: RankPool, debug: bool, hosts: str):
    ended(pool, whole_life, debug, hosts=hosts, settings=None)


@run_on_ranks(world=1, spawned=True, settings=None)
def test_a_rank_that_the_group_does_not_have_is_refused() -> None:
    for rank, size in ((1, 1), (3, 2)):
        with pytest.raises(InvalidUsage, match=rf"rank {rank} is not in 0\.\.{size - 1}.*WORLD_SIZE.*RANK"):
            dist.init_process_group("syncengine", store=dist.HashStore(), rank=rank, world_size=size)
    assert not dist.is_initialized()


@run_on_ranks(gloo=True, settings=None)
def test_messages_to_oneself_are_refused() -> None:
    """As by Gloo, and by torch's own send and recv."""
    rank = dist.get_rank()
    alone = [dist.new_group([member], backend="syncengine") for member in range(2)][rank]
    backend = alone._get_backend(torch.device("cpu"))
    assert backend.communicator.global_ranks == backend.communicator.split([0]).global_ranks == [rank]
    for group, who in ((alone, "no other rank is here"), (ours(), f"rank {rank} is not another one of 0..1")):
        refused = rf"\(.* tag 2\): {who}; what a rank would send to itself, it can copy"
        for call in (dist.isend, dist.irecv):
            with pytest.raises(InvalidUsage, match=refused):
                call(torch.ones(3), rank, group, tag=2)
        dist.all_to_all_single(same := torch.empty(4), torch.arange(4.0), group=group)
        assert (same.tolist() == [0, 1, 2, 3]) == (group is alone)
    with pytest.raises(InvalidUsage, match=r"recv\(from any rank, tag 0\): no other rank"):
        dist.irecv(torch.ones(3), group=alone)
