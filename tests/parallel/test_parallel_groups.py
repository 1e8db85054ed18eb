"""The ranks of a Parallel: torch process groups, also new default ones, device meshes, communicators."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import my_rank
from marks import mostly_nightly
from parallel_models import Mlp, both, data, different_bits, gradients, of_both
from pool import RankPool, run_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from two_groups import as_under_ddp

import syncengine
from syncengine.errors import Aborted, InvalidUsage, Mismatch, Timeout


def accumulate(model: nn.Module) -> list[torch.Tensor | None]:
    for i in range(3):
        model(data(i, dist.get_rank())).square().mean().backward()
    return gradients(model)


def pairs() -> dist.ProcessGroup:
    """The group of ranks 0 and 2, or that of 3 and 1."""
    evens, odds = dist.new_group([0, 2]), dist.new_group([3, 1])
    dist.barrier()  # Gloo fails where a peer has connected and left already
    return odds if dist.get_rank() % 2 else evens


@run_on_ranks(world=4, gloo=True, settings=None)
def test_a_subgroup_trains_as_under_ddp():
    group = pairs()
    both(Mlp, accumulate, process_group=group)
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
    both(Mlp, accumulate, process_group=dist.group.WORLD)
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
@pytest.mark.parametrize(("world", "with_default"), mostly_nightly([(2, False), (2, True), (3, False)], 1))
def test_models_over_two_groups_in_two_threads(pool: RankPool, world: int, with_default: bool):
    """Each pair of ranks meets by itself, though each rank comes to another one first."""
    pool.run(as_under_ddp, with_default, world=world, gloo=True, settings=None, environ={"SYNCENGINE_TIMEOUT": "10"})


@run_on_ranks(world=4, gloo=True, settings=None)
def test_device_meshes():
    mesh = init_device_mesh("cpu", (4,))
    ours, theirs = of_both(accumulate, device_mesh=mesh)
    assert max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) < 1e-6
    assert syncengine.Parallel(Mlp(), device_mesh=mesh).device_mesh is mesh
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both(Mlp, accumulate, device_mesh=grid["dp"])
    with pytest.raises(InvalidUsage, match="Only 1D device mesh is supported"):
        syncengine.Parallel(Mlp(), device_mesh=grid)
    with pytest.raises(InvalidUsage, match="both process_group and device_mesh"):
        syncengine.Parallel(Mlp(), device_mesh=mesh, process_group=dist.group.WORLD)


@run_on_ranks(world=4, gloo=True, settings=None)
def test_with_tensor_parallelism_inside():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # slow

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))
        return parallelize_module(module, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def step(model: nn.Module) -> list[torch.Tensor]:
        parameters = list(model.parameters())  # torch's own workaround loses them in the first forward
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(dist.get_rank() // 2))
        for _ in range(3):
            model(x).square().mean().backward()
        return [p.grad.clone() for p in parameters]

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours, theirs = of_both(step, make, device_mesh=grid["dp"])
    assert ours[0].shape == (16, 24)
    assert not different_bits(ours, theirs)


@run_on_ranks(gloo=True, settings=None)
def test_who_is_not_in_the_group_is_told_so():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        model = syncengine.Parallel(nn.Linear(24, 2), process_group=group)
        assert model.communicator.size == 1
        model(torch.ones(5, 24)).sum().backward()
    else:
        with pytest.raises(InvalidUsage, match="this rank is not in process_group"):
            syncengine.Parallel(nn.Linear(24, 2), process_group=group)


@run_on_ranks(world=4, gloo=True, settings=None)
def test_communicators_of_groups_end_with_shutdown_and_with_the_group():
    group = pairs()
    model = syncengine.Parallel(nn.Linear(24, 2), process_group=group)
    syncengine.shutdown()
    with pytest.raises(InvalidUsage, match="closed"):
        model(torch.ones(5, 24))
    again = syncengine.Parallel(nn.Linear(24, 2), process_group=group)
    again(torch.ones(5, 24)).sum().backward()
    del model, again
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert not syncengine.groups.all_group_communicators()


@run_on_ranks(world=4, gloo=True, settings=None, environ={"SYNCENGINE_TIMEOUT": "1"})
def test_a_missing_member_is_named():
    group = pairs()
    if dist.get_rank() == 1:
        with pytest.raises(Timeout, match=r"rank 3 did not join .*wrap its model in syncengine.Parallel"):
            syncengine.Parallel(nn.Linear(24, 2), process_group=group)


TIMEOUT = {"SYNCENGINE_TIMEOUT": "10"}


def wrapped(group: dist.ProcessGroup | syncengine.Communicator | None = None) -> syncengine.Parallel:
    return syncengine.Parallel(nn.Linear(1, 1, bias=False), process_group=group)


def gradient(model: syncengine.Parallel) -> float:
    """1 on rank 0 and 3 on rank 1, of the job: 2 is their average."""
    model.zero_grad()
    model(torch.full((1, 1), 1.0 + 2.0 * my_rank())).backward()
    return model.module.weight.grad.item()


@pytest.mark.parametrize("backend", ["gloo", "syncengine"])
@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
@run_on_ranks(spawned=True, gloo=True, settings=None, environ=TIMEOUT)
def test_ranks_that_go_on_alone(backend: str, both: bool):
    old = wrapped()
    assert gradient(old) == 2.0
    if both or my_rank() == 0:
        dist.destroy_process_group()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
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
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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
