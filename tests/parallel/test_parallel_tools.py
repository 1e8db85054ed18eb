"""DDP's arguments, attributes, private names and methods: what torch and other tools ask of a DDP, with its answers."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import Branches, Conv, Mlp, backwards, both, data, of_both, outcome, small
from pool import run_on_ranks
from random_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_versions import IS_SINCE_2_13, since_2_13

import syncengine
from syncengine.errors import InvalidUsage


def with_statistics(model: nn.Module) -> list[torch.Tensor]:
    """Losses, and this rank's buffers after each step."""
    return [*backwards(model, 2), *(b.clone() for b in model.buffers()), *backwards(model, 2)]


def different() -> nn.Module:
    """Another model on each rank, buffers too."""
    torch.manual_seed(syncengine.rank())
    module = Conv()
    module.body[1].running_mean.normal_()
    return module


@run_on_ranks(gloo=True)
def test_arguments():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for synced in (True, False):
            both(different, with_statistics, broadcast_buffers=synced)
            if IS_SINCE_2_13:
                both(different, with_statistics, forward_sync_buffers=synced)
        both(different, with_statistics, init_sync=False)
        both(Mlp, backwards, bucket_cap_mb=0.1, check_reduction=True)


@run_on_ranks(gloo=True)
def test_ignored_parameters():
    def make() -> nn.Module:
        module = different()
        ignored = ["body.0.weight", "body.1.running_mean"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        return module

    both(make, with_statistics)
    module = Mlp()
    module.head.requires_grad_(False)
    syncengine.Parallel._set_params_and_buffers_to_ignore_for_model(module, ["head.bias"])
    assert module.head.bias._ddp_ignored
    model = syncengine.Parallel(module)
    assert list(map(id, model._module_parameters)) == list(map(id, module.parameters()))[:-1]


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
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        with pytest.raises(RuntimeError, match="training graph has changed in this iteration"):  # the other's, perhaps
            model = wrap(Branches(), static_graph=True)
            for i in range(5):
                model(data(i), i < 3).sum().backward()


@run_on_ranks(gloo=True)
def test_private_attributes():
    ours, theirs = of_both(lambda model: model, small)
    names = "_has_rebuilt_buckets _ddp_sink_clone _delay_all_reduce_params _comm_hooks _distributed_rank _join_config"
    for _ in range(3):
        for name in names.split():
            assert getattr(ours, name) == getattr(theirs, name), name
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
        ours, theirs = of_both(lambda model: model, Conv, **options)
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
    for make, options in (
        (small, {"device_ids": [0]}),
        (small, {"output_device": 1}),
        (small, {"device_ids": [0, 1]}),
        (small, {"delay_all_reduce_named_params": []}),
        (small, {"param_to_hook_all_reduce": nn.Parameter(torch.ones(2))}),
        (small, {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))}),
        (small, {"device_mesh": init_device_mesh("cpu", (1, 2))}),
        (lambda: nn.Linear(2, 2).requires_grad_(False), {}),
        (partial(nn.LazyLinear, 2), {}),
    ):
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            DistributedDataParallel(make(), **options)
        with pytest.raises(theirs.type):  # callers catch it
            syncengine.Parallel(make(), **options)


@run_on_ranks(gloo=True)
def test_the_profiler_names_the_forward():
    def step(model: nn.Module) -> list[str]:
        with torch.profiler.profile() as profiler:
            model(data()).sum().backward()
        return [event.name for event in profiler.events() if event.name.startswith("DistributedDataParallel.")]

    assert of_both(step) == [["DistributedDataParallel.forward"]] * 2


@run_on_ranks(gloo=True)
def test_check_reducer_finalized():
    text = "Expected to have finished reduction in the prior iteration"
    names = r".*\n.*\n.*right.weight, right.bias, never.weight, never.bias"
    for wrap, match in ((DistributedDataParallel, text), (syncengine.Parallel, text + names)):
        model = wrap(Branches())
        model._check_reducer_finalized()
        model(data(), True).sum().backward()
        for check in (model._check_reducer_finalized, model.reducer._check_reducer_finalized):
            with pytest.raises(RuntimeError if wrap is DistributedDataParallel else InvalidUsage, match=match):
                check()
    syncengine.barrier()  # a model that goes with a backward that is not complete refuses it for all ranks


@run_on_ranks(world=4, gloo=True)
def test_update_process_group():
    def step(model: nn.Module) -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
        model(data(0)).square().mean().backward()
        model.zero_grad()
        model._update_process_group(first if dist.get_rank() < 2 else second)
        for i in range(3):
            model(data(i)).square().mean().backward()
        if dist.get_rank() > 1:
            model._update_process_group(first)  # not for these ranks
        assert dist.get_world_size(model.process_group) == 2

    both(Mlp, step)


@run_on_ranks()
def test_sink_clone():
    for clone in (True, False):
        model = syncengine.Parallel(nn.Sequential(nn.Linear(24, 2)), find_unused_parameters=True)
        model._set_ddp_sink_clone(clone)
        model.module.register_forward_hook(lambda module, _, output: setattr(module, "output", output))
        out = model(data())
        assert (out.data_ptr() == model.module.output.data_ptr()) != clone
        out.sum().backward()


@run_on_ranks()
def test_active_ddp_module():
    def ask(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(DistributedDataParallel._get_active_ddp_module())
        x = self.inner(x)
        seen.append(DistributedDataParallel._active_ddp_module)
        return x

    inner = syncengine.Parallel(Layer(ask, inner=nn.Linear(24, 2)))
    outer = syncengine.Parallel(Layer(ask, inner=inner))
    for grad in (True, False):
        seen = []
        with torch.set_grad_enabled(grad):
            outer(data())
        assert seen == [outer, inner, inner, outer]
        assert DistributedDataParallel._active_ddp_module is None

    def meet(self: Any, x: torch.Tensor) -> torch.Tensor:
        events[self.turn].set()
        assert events[self.turn + 1].wait(120)
        return self.linear(x)

    events = [threading.Event() for _ in range(3)]
    first, second = (syncengine.Parallel(Layer(meet, linear=nn.Linear(24, 2), turn=turn)) for turn in range(2))
    with ThreadPoolExecutor(1) as other:  # the first enters, the second does, the first leaves, the second does
        out = other.submit(first, data())
        out.add_done_callback(lambda _: events[2].set())
        assert events[0].wait(120)
        second(data())
        out.result()
    assert DistributedDataParallel._active_ddp_module is None


@run_on_ranks(gloo=True, settings={"numerics": "ring"})
def test_bucket_caps():
    caps = attrgetter("bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default")
    for options in ({}, {"bucket_cap_mb": 3}):
        ours, theirs = of_both(caps, **options)
        assert ours == theirs


@run_on_ranks(gloo=True)
def test_scatter_and_gather():
    def step(model: nn.Module) -> list[Any]:
        assert model.dim == 1
        return [
            outcome(lambda: model.gather([data(1), data(2)], "cpu")),
            outcome(lambda: model.scatter((data(),), {"y": data(1)}, [])),
            outcome(lambda: model.to_kwargs((data(),), {"y": data(1)}, 0)),
        ]

    ours, theirs = of_both(step, dim=1)
    assert ours == theirs  # on CPU ranks these can't do much, but no less than DDP's
    assert ours[2][0] == "returned"


@run_on_ranks()
def test_check_reduction_is_deprecated():
    with pytest.warns(FutureWarning, match="check_reduction"):
        model = syncengine.Parallel(nn.Linear(24, 2), check_reduction=True)
    model(data()).sum().backward()
