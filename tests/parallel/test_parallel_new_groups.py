"""A default process group that takes the place of another: who belongs to it, and what lives on the old one."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import nn

import syncengine
from syncengine.errors import Aborted, InvalidUsage

TIMEOUT = {"SYNCENGINE_TIMEOUT": "10"}


def my_rank() -> int:
    return int(os.environ["RANK"])


def wrapped(group: dist.ProcessGroup | syncengine.Communicator | None = None) -> syncengine.Parallel:
    return syncengine.Parallel(nn.Linear(1, 1, bias=False), process_group=group)


def gradient(model: syncengine.Parallel) -> float:
    """1 on rank 0 and 3 on rank 1, of the job: 2 is their average."""
    model.zero_grad()
    model(torch.full((1, 1), 1.0 + 2.0 * my_rank())).backward()
    return model.module.weight.grad.item()


def each_alone(backend: str) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def alone_after_all(backend: str, both: bool) -> None:
    old = wrapped()
    assert gradient(old) == 2.0
    if both or my_rank() == 0:
        dist.destroy_process_group()
        each_alone(backend)
        for group in (None, dist.group.WORLD):
            alone = wrapped(group)
            assert alone.communicator.size == 1
            assert gradient(alone) == 1.0 + 2.0 * my_rank()
        assert syncengine.init().size == syncengine.world_size() == 1
    assert gradient(old) == 2.0


@pytest.mark.parametrize("backend", ["gloo", "syncengine"])
@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
def test_ranks_that_go_on_alone(pool: RankPool, backend: str, both: bool):
    with pool.spawn_ranks(alone_after_all, backend, both, gloo=True, settings=None, environ=TIMEOUT) as ranks:
        for rank in ranks:
            rank.result()


def alone_beside_the_launched() -> None:
    everyone = syncengine.init()
    each_alone("gloo")
    alone = wrapped(dist.group.WORLD)
    assert gradient(alone) == 1.0 + 2.0 * my_rank()
    assert wrapped().communicator is wrapped(dist.group.WORLD).communicator is alone.communicator
    assert syncengine.init() is everyone
    assert gradient(wrapped(everyone)) == 2.0


def test_a_group_of_other_ranks_than_those_launched(pool: RankPool):
    """As under DDP. What init() made before is of the launcher's ranks, and stays so."""
    with pool.spawn_ranks(alone_beside_the_launched, settings=None, environ=TIMEOUT) as ranks:
        for rank in ranks:
            rank.result()


def in_another_order(shared: str) -> None:
    syncengine.init()
    dist.init_process_group("gloo", store=dist.FileStore(shared), rank=1 - my_rank(), world_size=2)
    with pytest.raises(InvalidUsage, match=r"rank \d of the process group is rank \d of the default communicator"):
        wrapped(dist.group.WORLD)


def test_ranks_in_another_order_are_refused(pool: RankPool, tmp_path):
    with pool.spawn_ranks(in_another_order, str(tmp_path / "store"), settings=None, environ=TIMEOUT) as ranks:
        for rank in ranks:
            rank.result()


def the_same_ranks_again(shared: str, backend: str) -> None:
    old = wrapped()
    dist.destroy_process_group()
    assert syncengine.init() is old.communicator  # there is no other group
    dist.init_process_group(backend, store=dist.FileStore(shared), rank=my_rank(), world_size=2)
    new = wrapped()
    assert new.communicator is not old.communicator
    assert new.process_group is dist.group.WORLD
    if backend == "syncengine":
        assert new.communicator is dist.group.WORLD._get_backend(torch.device("cpu")).communicator
    else:
        assert new.communicator is syncengine.default_communicator() is wrapped(dist.group.WORLD).communicator
    assert gradient(old) == gradient(new) == 2.0


@pytest.mark.parametrize("backend", ["gloo", "syncengine"])
def test_the_same_ranks_in_a_new_group(pool: RankPool, tmp_path, backend: str):
    arguments = (str(tmp_path / "store"), backend)
    with pool.spawn_ranks(the_same_ranks_again, *arguments, gloo=True, settings=None, environ=TIMEOUT) as ranks:
        for rank in ranks:
            rank.result()


def failed_without_a_group(shared: str) -> None:
    model = wrapped()
    dist.barrier()
    if my_rank() == 0:
        model.communicator.abort("a bad day")
    with pytest.raises(Aborted, match="a bad day"):
        syncengine.barrier()
    dist.destroy_process_group()
    with pytest.raises(InvalidUsage, match=r"process group .* has been destroyed: .*init_process_group"):
        syncengine.init()
    dist.init_process_group("gloo", store=dist.FileStore(shared), rank=my_rank(), world_size=2)
    assert gradient(wrapped()) == 2.0


def test_a_failure_after_the_end_of_the_group(pool: RankPool, tmp_path):
    store = str(tmp_path / "store")
    with pool.spawn_ranks(failed_without_a_group, store, gloo=True, settings=None, environ=TIMEOUT) as ranks:
        for rank in ranks:
            rank.result()
