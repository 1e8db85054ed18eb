"""Copies of models: what goes along; over torch's default group, without ``syncengine.init()`` or beside it."""

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from parallel_models import Mlp, backwards, data, different_bits, gradients, small, warned_of
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel

import syncengine
from syncengine.errors import InvalidUsage
from syncengine.launch import store as launch_store


def init_process_group(backend: str, generation: int = 0) -> None:
    store = dist.PrefixStore(str(generation), launch_store.open_store())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def make(wrap: Callable[..., Any] = syncengine.Parallel, **options: Any) -> Any:
    torch.manual_seed(0)
    return wrap(small(), **options)


def step(model: nn.Module, number: int = 0) -> list[torch.Tensor | None]:
    model.zero_grad()
    model(data(number, dist.get_rank())).square().sum().backward()
    return gradients(model)


def copies(model: Any, folder: Path) -> dict[str, Any]:
    path = folder / f"{os.getpid()}.pt"
    torch.save(model, path)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(path, weights_only=False),
        "average": AveragedModel(model).module,
    }


@pytest.mark.parametrize("then_init", [False, True])
@pytest.mark.parametrize("backend", ["syncengine", "gloo"])
@pytest.mark.parametrize("world", [1, 2])
@run_on_ranks(spawned=True, settings=None)
def test_models_are_copied_without_init(backend: str, then_init: bool, world: int, tmp_path: Path):
    init_process_group(backend)
    model, reference = make(), make(DistributedDataParallel, process_group=dist.new_group(backend="gloo"))
    step(model)
    if then_init:  # another communicator of the same ranks
        syncengine.init()
    others = copies(model, tmp_path) if dist.get_rank() == 0 else {}
    expected = step(reference, 1)
    for name in ("deepcopy", "pickle", "torch.save", "average"):
        other = others[name] if others else copy.deepcopy(model)
        assert other.communicator is model.communicator, name
        assert other.process_group is model.process_group, name
        assert not different_bits(step(other, 1), expected), name
    assert not different_bits(step(model, 1), expected)
    dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.parametrize("world", mostly_nightly([1, 2], 1))
@run_on_ranks(spawned=True, settings=None)
def test_the_copy_of_a_compiled_model_calls_its_own_module(world: int, tmp_path: Path):
    init_process_group("gloo")
    model = make()
    model.compile(backend="eager")
    expected = step(model)
    for name, other in copies(model, tmp_path).items():
        assert not different_bits(step(other), expected), name
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
            assert not other(torch.ones(3, 24)).any(), name  # it was the original's output
    assert not different_bits(step(model), expected)


@run_on_ranks(spawned=True, world=4, settings=None)
def test_models_of_a_default_group_of_some_ranks_are_copied(tmp_path: Path):
    """torch's default group has fewer ranks than the default communicator, or is given by name."""
    everyone = syncengine.init()
    os.environ.update(RANK=str(everyone.rank % 2), WORLD_SIZE="2")
    for backend, generation in (("gloo", 0), ("syncengine", 1)):
        init_process_group(backend, 2 * generation + everyone.rank // 2)
        for model in (make(), make(process_group=dist.group.WORLD)):
            assert model.communicator.size == 2
            expected = step(model)
            for other in copies(model, tmp_path).values():
                assert other.communicator is model.communicator
                assert not different_bits(step(other), expected)
        of_all = make(process_group=everyone)
        assert copy.deepcopy(of_all).communicator is everyone
        dist.destroy_process_group()
        with pytest.raises(InvalidUsage, match="default communicator, or that of torch's default process group"):
            copy.deepcopy(model)


@run_on_ranks(spawned=True, settings=None)
def test_the_default_group_of_the_backend_is_a_default_communicator():
    init_process_group("syncengine")
    assert not syncengine.is_initialized()
    assert (syncengine.rank(), syncengine.world_size()) == (dist.get_rank(), 2)
    assert syncengine.default_communicator() is make().communicator
    syncengine.all_reduce(total := torch.ones(2))
    assert total.tolist() == [2, 2]
    theirs, ours = make(DistributedDataParallel), make()
    for model in (theirs, ours):
        model.register_comm_hook(None, syncengine.hooks.bf16_compress)
    assert not different_bits(step(theirs), step(ours))
    assert syncengine.init() is syncengine.default_communicator() is not ours.communicator


@run_on_ranks(settings=None)
def test_a_copy_made_within_no_sync_is_synchronized():
    init_process_group("syncengine")
    model = make()
    expected = step(model)
    with model.no_sync():
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in (*twins, model):
        assert not different_bits(step(each), expected)


@run_on_ranks()
def test_a_copy_has_no_communication_hook_and_says_so():
    torch.manual_seed(1)
    model = syncengine.Parallel(Mlp())
    assert not warned_of("", lambda: copy.deepcopy(model))
    exact = copy.deepcopy(model)
    model.register_comm_hook(None, syncengine.hooks.bf16_compress)
    with pytest.warns(UserWarning, match="has no communication hook: register it again"):
        other = pickle.loads(pickle.dumps(model))
    for m in (model, other, exact):
        backwards(m, 1)
    assert not different_bits(gradients(other), gradients(exact))
    assert different_bits(gradients(other), gradients(model))


@run_on_ranks()
def test_a_copy_in_mixed_precision_sends_small_gradients_too():
    torch.manual_seed(1)
    model = syncengine.Parallel(Mlp(), mixed_precision=_MixedPrecision(torch.bfloat16))
    assert not warned_of("", lambda: copy.deepcopy(model))
    other = copy.deepcopy(model)
    for m in (model, other):
        backwards(m, 1)
    assert not different_bits(gradients(other), gradients(model))
    assert all(torch.equal(grad, grad.bfloat16().float()) for grad in gradients(other))


@run_on_ranks()
def test_a_copy_takes_neither_a_weight_nor_a_step_along():
    model = syncengine.Parallel(Mlp(), bucket_cap_mb=0.1)
    model._register_fused_optim(torch.optim.SGD, lr=0.1)
    model.weight(1 + syncengine.rank())
    other = pickle.loads(pickle.dumps(model))
    assert other.bucket_bytes_cap == model.bucket_bytes_cap
    local = copy.deepcopy(model.module)
    for each in (other, local):
        backwards(each, 1)
    assert all(map(torch.equal, other.parameters(), local.parameters()))
    for p, grad in zip(local.parameters(), gradients(other), strict=True):
        syncengine.all_reduce(p.grad, "avg")  # not the weighted mean
        assert torch.equal(p.grad, grad)
