"""A default process group that takes the place of another: who belongs to it, and what lives on the old one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import my_rank
from pool import run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import Aborted, InvalidUsage

TIMEOUT = {"SYNCENGINE_TIMEOUT": "10"}


def wrapped(group: dist.ProcessGroup | syncengine.Communicator | None = None) -> syncengine.Parallel:
    return syncengine.Parallel(nn.Linear(1, 1, bias=False), process_group=group)


def gradient(model: syncengine.Parallel) -> float:
    """1 on rank 0 and 3 on rank 1, of the job: 2 is their average."""
    model.zero_grad()
    model(torch.full((1, 1), 1.0 + 2.0 * my_rank())).backward()
    return model.module.weight.grad.item()


def each_alone(backend: str) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("backend", ["gloo", "syncengine"])
@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
@run_on_ranks(spawned=True, gloo=True, settings=None, environ=TIMEOUT)
def test_ranks_that_go_on_alone(backend: str, both: bool):
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


@run_on_ranks(spawned=True, settings=None, environ=TIMEOUT)
def test_a_group_of_other_ranks_than_those_launched():
    """As under DDP. What init() made before is of the launcher's ranks, and stays so."""
    everyone = syncengine.init()
    each_alone("gloo")
    alone = wrapped(dist.group.WORLD)
    assert gradient(alone) == 1.0 + 2.0 * my_rank()
    assert wrapped().communicator is wrapped(dist.group.WORLD).communicator is alone.communicator
    assert syncengine.init() is everyone
    assert gradient(wrapped(everyone)) == 2.0


@run_on_ranks(spawned=True, settings=None, environ=TIMEOUT)
def test_ranks_in_another_order_are_refused(tmp_path: Path):
    syncengine.init()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store")), rank=1 - my_rank(), world_size=2)
    with pytest.raises(InvalidUsage, match=r"rank \d of the process group is rank \d of the default communicator"):
        wrapped(dist.group.WORLD)


@pytest.mark.parametrize("backend", ["gloo", "syncengine"])
@run_on_ranks(spawned=True, gloo=True, settings=None, environ=TIMEOUT)
def test_the_same_ranks_in_a_new_group(tmp_path: Path, backend: str):
    old = wrapped()
    dist.destroy_process_group()
    assert syncengine.init() is old.communicator  # there is no other group
    dist.init_process_group(backend, store=dist.FileStore(str(tmp_path / "store")), rank=my_rank(), world_size=2)
    new = wrapped()
    assert new.communicator is not old.communicator
    assert new.process_group is dist.group.WORLD
    if backend == "syncengine":
        assert new.communicator is dist.group.WORLD._get_backend(torch.device("cpu")).communicator
    else:
        assert new.communicator is syncengine.default_communicator() is wrapped(dist.group.WORLD).communicator
    assert gradient(old) == gradient(new) == 2.0


@run_on_ranks(spawned=True, gloo=True, settings=None, environ=TIMEOUT)
def test_a_failure_after_the_end_of_the_group(tmp_path: Path):
    model = wrapped()
    dist.barrier()
    if my_rank() == 0:
        model.communicator.abort("a bad day")
    with pytest.raises(Aborted, match="a bad day"):
        syncengine.barrier()
    dist.destroy_process_group()
    with pytest.raises(InvalidUsage, match=r"process group .* has been destroyed: .*init_process_group"):
        syncengine.init()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store")), rank=my_rank(), world_size=2)
    assert gradient(wrapped()) == 2.0
