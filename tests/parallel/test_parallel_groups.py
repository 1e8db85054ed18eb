"""Parallel over some of the ranks: torch process groups, device meshes, communicators."""

from __future__ import annotations

import gc
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from parallel_models import Mlp, different_bits, gradients, of_both
from pool import RankPool, run_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from two_groups import as_under_ddp

import syncengine
from syncengine import groups
from syncengine.errors import InvalidUsage, Mismatch, Timeout


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def gradients_of_both(**options: Any) -> list[list[torch.Tensor | None]]:
    """The gradients after three steps, under Parallel and under DDP."""

    def step(model: nn.Module) -> list[torch.Tensor | None]:
        for i in range(3):
            model(data(i)).square().mean().backward()
        return gradients(model)

    return of_both(step, **options)


def pairs() -> dist.ProcessGroup:
    """The group of ranks 0 and 2, or that of 3 and 1."""
    evens, odds = dist.new_group([0, 2]), dist.new_group([3, 1])
    dist.barrier()  # Gloo fails where a peer has connected and left already
    return odds if dist.get_rank() % 2 else evens


@pytest.mark.thorough
@run_on_ranks(world=4, gloo=True, settings=None)
def test_a_subgroup_trains_as_under_ddp():
    group = pairs()
    assert not different_bits(*gradients_of_both(process_group=group))
    model = syncengine.Parallel(Mlp(), process_group=group)
    assert model.process_group is group
    assert model.join_process_group is group
    assert model.communicator is syncengine.Parallel(Mlp(), process_group=group).communicator
    assert model.communicator.rank == dist.get_rank(group)
    assert model.communicator.global_ranks == dist.get_process_group_ranks(group)
    first, second = dist.get_process_group_ranks(group)
    with pytest.raises(Mismatch, match=f"rank {first} has") as error:
        syncengine.Parallel(nn.Linear(2, 2 + dist.get_rank() // 2), process_group=group)
    assert f"rank {second} has" in str(error.value)
    assert not syncengine.is_initialized()


@run_on_ranks(gloo=True, settings=None)
def test_the_default_group_is_the_default_communicator():
    assert not different_bits(*gradients_of_both(process_group=dist.group.WORLD))
    for group in (None, dist.group.WORLD, init_device_mesh("cpu", (2,)).get_group()):
        model = syncengine.Parallel(Mlp(), process_group=group)
        assert model.communicator is syncengine.default_communicator()
        assert dist.get_rank(model.process_group) == syncengine.rank()
    others = [dist.new_group([0, 1]) for _ in range(2)]
    of_others = {id(syncengine.Parallel(Mlp(), process_group=group).communicator) for group in others for _ in range(2)}
    assert len(of_others - {id(syncengine.default_communicator())}) == 2
    own = syncengine.default_communicator().split([0, 1])
    assert syncengine.Parallel(Mlp(), process_group=own).process_group is own


@pytest.mark.thorough
@pytest.mark.parametrize(("world", "with_default"), mostly_nightly([(2, False), (2, True), (3, False)], 1, 2))
def test_models_over_two_groups_in_two_threads(pool: RankPool, world: int, with_default: bool):
    """Each pair of ranks meets by itself, though each rank comes to another one first."""
    pool.run(as_under_ddp, with_default, world=world, gloo=True, settings=None, environ={"SYNCENGINE_TIMEOUT": "10"})


@pytest.mark.thorough
@run_on_ranks(world=4, gloo=True, settings=None)
def test_device_meshes():
    mesh = init_device_mesh("cpu", (4,))
    ours, theirs = gradients_of_both(device_mesh=mesh)
    assert max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) < 1e-6
    assert syncengine.Parallel(Mlp(), device_mesh=mesh).device_mesh is mesh
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert not different_bits(*gradients_of_both(device_mesh=grid["dp"]))
    with pytest.raises(InvalidUsage, match="Only 1D device mesh is supported"):
        syncengine.Parallel(Mlp(), device_mesh=grid)
    with pytest.raises(InvalidUsage, match="both process_group and device_mesh"):
        syncengine.Parallel(Mlp(), device_mesh=mesh, process_group=dist.group.WORLD)


@pytest.mark.thorough
@run_on_ranks(world=4, gloo=True, settings=None)
def test_with_tensor_parallelism_inside():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # slow

    results = []
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))
        module = parallelize_module(module, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model = wrap(module, device_mesh=grid["dp"])
        parameters = list(model.parameters())  # torch's own workaround loses them in the first forward
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(dist.get_rank() // 2))
        for _ in range(3):
            model(x).square().mean().backward()
        results.append([p.grad.clone() for p in parameters])
    assert results[0][0].shape == (16, 24)
    assert not different_bits(*results)


@run_on_ranks(gloo=True, settings=None)
def test_who_is_not_in_the_group_is_told_so():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        model = syncengine.Parallel(nn.Linear(24, 2), process_group=group)
        assert model.communicator.size == 1
        model(data()).sum().backward()
    else:
        with pytest.raises(InvalidUsage, match="this rank is not in process_group"):
            syncengine.Parallel(nn.Linear(24, 2), process_group=group)
    with pytest.raises(InvalidUsage, match="process_group of type str is no group"):
        syncengine.Parallel(nn.Linear(24, 2), process_group="gloo")


@run_on_ranks(world=4, gloo=True, settings=None)
def test_communicators_of_groups_end_with_shutdown_and_with_the_group():
    group = pairs()
    model = syncengine.Parallel(nn.Linear(24, 2), process_group=group)
    syncengine.shutdown()
    with pytest.raises(InvalidUsage, match="closed"):
        model(data())
    again = syncengine.Parallel(nn.Linear(24, 2), process_group=group)
    again(data()).sum().backward()
    del model, again
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert not groups.all_group_communicators()


@pytest.mark.thorough
@run_on_ranks(world=4, gloo=True, settings=None, environ={"SYNCENGINE_TIMEOUT": "1"})
def test_a_missing_member_is_named():
    group = pairs()
    if dist.get_rank() == 1:
        quiet = mock.patch.object(logging.getLogger("syncengine"), "disabled", True)
        with quiet, pytest.raises(Timeout, match=r"rank 3 did not join .*wrap its model in syncengine.Parallel"):
            syncengine.Parallel(nn.Linear(24, 2), process_group=group)
