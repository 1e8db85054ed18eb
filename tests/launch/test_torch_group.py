"""init(torch_group=True): torch.distributed's default group over the engine, for what asks torch for ranks."""

import copy
import os
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faults import ended
from pool import RankPool, run_on_ranks
from torch import nn
from torch.utils.data import DistributedSampler

import syncengine
from syncengine import torch_group
from syncengine.errors import InvalidUsage, PeerLost


def summed(value: float, group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@run_on_ranks(world=3, settings=None)
def test_torch_sees_the_ranks_until_shutdown():
    communicator = syncengine.init(torch_group=True, timeout=50)
    assert (dist.get_rank(), dist.get_world_size()) == (communicator.rank, communicator.size)
    assert dist.get_backend() == "syncengine"
    assert summed(dist.get_rank()) == 3
    sampler = DistributedSampler(range(9), shuffle=False)
    assert list(sampler) == list(range(dist.get_rank(), 9, 3))
    total = torch.ones(1)
    syncengine.all_reduce(total)  # beside it, in an order of its own
    assert total.item() == 3
    model = syncengine.Parallel(nn.Linear(2, 2))
    assert model.communicator is communicator
    assert model.process_group is dist.group.WORLD
    pairs = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        assert summed(1, pairs) == 2
    assert syncengine.init(torch_group=True) is communicator  # again: nothing new
    assert model.process_group is dist.group.WORLD
    syncengine.shutdown()
    assert not dist.is_initialized()
    syncengine.init(torch_group=True)  # and anew
    assert summed(1) == 3


@run_on_ranks(settings=None)
def test_the_group_has_inits_settings():
    syncengine.init(torch_group=True, numerics="ring", timeout=41)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.communicator.numerics == "ring"
    assert backend.communicator.timeout == 41
    assert backend.options._timeout.total_seconds() == 41


@run_on_ranks(settings=None)
def test_shutdown_closes_the_communicator_though_the_group_can_not_be_destroyed():
    communicator = syncengine.init(torch_group=True)
    syncengine.barrier()
    interrupt = mock.patch.object(dist, "destroy_process_group", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        syncengine.shutdown()
    assert not syncengine.is_initialized()
    with pytest.raises(InvalidUsage, match="closed"):
        communicator.barrier()
    dist.destroy_process_group()


@run_on_ranks(settings=None)
def test_nothing_else_makes_a_group():
    syncengine.init()
    model = syncengine.Parallel(nn.Linear(2, 2))
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    assert not dist.is_initialized()
    syncengine.init(torch_group=True)  # later
    assert summed(1) == 2


@run_on_ranks(gloo=True, settings=None)
def test_a_group_of_the_users_is_kept():
    before = dist.group.WORLD
    syncengine.init(torch_group=True)
    assert dist.group.WORLD is before
    syncengine.shutdown()
    assert dist.group.WORLD is before
    assert summed(1) == 2


@run_on_ranks(settings=None)
def test_a_group_that_the_user_makes_later_is_left_alone():
    syncengine.init(torch_group=True)
    dist.destroy_process_group()
    number = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=torch_group_store(), rank=number, world_size=2)
    syncengine.shutdown()
    assert summed(1) == 2


def torch_group_store() -> dist.Store:
    from syncengine.launch import store

    return dist.PrefixStore("users", store.open_store("", 0, 0, 2, 1.0, 1.0))


@run_on_ranks(settings=None)
def test_where_only_some_ranks_have_a_group_all_say_so():
    syncengine.init()
    if syncengine.rank() == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(InvalidUsage, match=r"initialized on rank 1, but not on rank 0: .* on all ranks, or on none"):
        syncengine.init(torch_group=True)


@run_on_ranks(settings=None)
def test_after_a_failure_it_is_made_anew():
    failed = syncengine.init(torch_group=True, timeout=50)
    store = torch_group_store()
    store.set(f"through {failed.rank}", "")
    store.wait([f"through {rank}" for rank in range(2)])  # nobody's init is to fail
    failed.abort("a bad day")
    with pytest.raises(syncengine.errors.SyncError):
        summed(1)
    assert syncengine.init(torch_group=True) is not failed
    assert summed(1) == 2


@run_on_ranks(settings=None)
def test_one_that_is_missing_on_a_rank_is_made_anew_on_all():
    syncengine.init(torch_group=True)
    if syncengine.rank() == 0:
        dist.destroy_process_group()
    syncengine.init(torch_group=True)
    assert summed(1) == 2


def alone() -> None:
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))]:
        del os.environ[name]
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        dist.init_process_group("syncengine")
    syncengine.init(torch_group=True)
    assert (dist.get_rank(), dist.get_world_size(), summed(5)) == (0, 1, 5)


def test_without_a_launchers_variables_it_is_one_rank(pool: RankPool):
    """torch's own error names the variable; init() says what it takes instead."""
    ended(pool, alone, world=1, settings=None)


@run_on_ranks(settings=None)
def test_rank_0_without_a_store_says_so_on_all():
    syncengine.init()
    refused = mock.patch.object(torch_group, "launch_store", side_effect=OSError("no more ports"))
    with refused, pytest.raises(InvalidUsage, match="rank 0 has no store for the ranks of the group: no more ports"):
        syncengine.init(torch_group=True)


def test_the_address_of_the_store(monkeypatch: pytest.MonkeyPatch):
    assert torch_group.store_address([0, 0], {}) == "127.0.0.1"
    assert torch_group.store_address([0, 1], {"MASTER_ADDR": "10.1.2.3"}) == "10.1.2.3"
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    with pytest.raises(InvalidUsage, match="set MASTER_ADDR to an address"):
        torch_group.store_address([0, 1], {})


def train(end: str) -> None:
    syncengine.init(torch_group=True, timeout=30)
    if syncengine.rank() == 1:
        if end == "dies":
            os._exit(3)
        return
    with pytest.raises(PeerLost):
        while True:
            summed(1)


@pytest.mark.parametrize("end", ["dies", "leaves"])
def test_a_rank_that_ends_is_named_and_the_others_end_in_order(pool: RankPool, end: str):
    with pool.spawn_ranks(train, end, settings=None) as ranks:
        ranks[0].result()
        assert ranks[0].exit_code() == 0
        assert ranks[1].exit_code() == (3 if end == "dies" else 0)
