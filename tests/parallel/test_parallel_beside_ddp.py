"""Arguments and private methods whose own tests look at this engine alone, beside DDP: same bits, same errors."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from parallel_models import Branches, Conv, Mlp, Wrap, backwards, both, data, small
from pool import run_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_versions import IS_SINCE_2_13, since_2_13

import syncengine

WRAPS: tuple[Wrap, ...] = (syncengine.Parallel, DistributedDataParallel)


def with_statistics(model: nn.Module) -> list[torch.Tensor]:
    """Losses, and this rank's buffers after each step."""
    return [*backwards(model, 2), *(b.clone() for b in model.buffers()), *backwards(model, 2)]


def different() -> nn.Module:
    """Another model on each rank, buffers too."""
    torch.manual_seed(syncengine.rank())
    module = Conv()
    module.body[1].running_mean.normal_()
    return module


@pytest.mark.thorough
@run_on_ranks(gloo=True)
def test_arguments():
    for synced in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            both(different, with_statistics, broadcast_buffers=synced)
        if IS_SINCE_2_13:
            both(different, with_statistics, forward_sync_buffers=synced)
    both(different, with_statistics, init_sync=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        both(Mlp, backwards, bucket_cap_mb=0.1, check_reduction=True)


@run_on_ranks(gloo=True)
def test_ignored_parameters():
    def make() -> nn.Module:
        torch.manual_seed(syncengine.rank())
        module = Conv()
        ignored = ["body.0.weight", "body.1.running_mean"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        return module

    both(make, with_statistics)


@run_on_ranks(gloo=True)
def test_without_autograd_hooks():
    def step(model: nn.Module) -> None:
        backwards(model)
        out = model(data(5))
        model._remove_autograd_hooks()
        out.sum().backward()

    both(small, step)


@run_on_ranks(gloo=True)
def test_without_clones_behind_the_sink():
    def step(model: nn.Module) -> None:
        model._set_ddp_sink_clone(False)
        for i in range(3):
            model(data(i), i % 2 == 0).square().mean().backward()

    both(Branches, step, find_unused_parameters=True)


@run_on_ranks(gloo=True)
def test_a_static_graph_that_changes():
    for wrap in WRAPS:
        with pytest.raises(RuntimeError, match="training graph has changed in this iteration"):  # the other's, perhaps
            model = wrap(Branches(), static_graph=True)
            for i in range(5):
                model(data(i), i < 3).sum().backward()


@run_on_ranks(gloo=True)
def test_private_attributes():
    ours, theirs = (wrap(small()) for wrap in WRAPS)
    for _ in range(3):
        for name in ("_has_rebuilt_buckets", "_ddp_sink_clone", "_delay_all_reduce_params", "_comm_hooks"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours._distributed_rank == theirs._distributed_rank
        assert ours._join_config == theirs._join_config
        assert [p.shape for p in ours._module_parameters] == [p.shape for p in theirs._module_parameters]
        for model in (ours, theirs):
            backwards(model, 1)


@since_2_13
@run_on_ranks(gloo=True)
def test_attributes():
    """All public ones that are plain values, and that tools read."""
    own = {"logger", "reducer", "process_group", "module", "modules_buffers", "named_module_buffers"}
    own |= {"use_side_stream_for_tensor_copies"}  # nothing is copied on a CPU
    for options in (
        {},
        {"static_graph": True, "gradient_as_bucket_view": True, "dim": 1},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "forward_sync_buffers": False},
        {"batched_grad_copy": True, "bucket_cap_mb_list": [1, 2]},
        {"bucket_cap_mb": 3, "process_group": dist.group.WORLD},
    ):
        ours, theirs = (wrap(Conv(), **options) for wrap in WRAPS)
        names = {name for name in vars(theirs) if not name.startswith("_")} - own
        assert len(names) > 20
        for name in [*names, "broadcast_buffers", "join_device", "join_process_group"]:
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.process_group is theirs.process_group
        assert list(ours.named_module_buffers) == list(theirs.named_module_buffers)
        assert len(ours.modules_buffers) == len(theirs.modules_buffers)
        assert ours.will_sync_module_buffers() == theirs.will_sync_module_buffers()


@run_on_ranks(gloo=True)
def test_what_both_refuse():
    """With an error of the same class: callers catch it."""
    frozen = lambda: nn.Linear(2, 2).requires_grad_(False)  # noqa: E731
    for make, options in (
        (small, {"device_ids": [0]}),
        (small, {"output_device": 1}),
        (small, {"device_ids": [0, 1]}),
        (small, {"delay_all_reduce_named_params": []}),
        (small, {"param_to_hook_all_reduce": nn.Parameter(torch.ones(2))}),
        (small, {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))}),
        (small, {"device_mesh": init_device_mesh("cpu", (1, 2))}),
        (frozen, {}),
        (partial(nn.LazyLinear, 2), {}),
    ):
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            DistributedDataParallel(make(), **options)
        with pytest.raises(theirs.type):
            syncengine.Parallel(make(), **options)
