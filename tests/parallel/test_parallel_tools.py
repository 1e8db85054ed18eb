"""What torch and other tools ask of a DDP model: attributes, private names, methods."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import Branches, Mlp, data, different_bits, gradients, of_both, outcome
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine
from syncengine.errors import InvalidUsage


@run_on_ranks(gloo=True)
def test_the_profiler_names_the_forward():
    def step(model: nn.Module) -> list[str]:
        with torch.profiler.profile() as profiler:
            model(data()).sum().backward()
        return [event.name for event in profiler.events() if event.name.startswith("DistributedDataParallel.")]

    assert of_both(step) == [["DistributedDataParallel.forward"]] * 2


@run_on_ranks(gloo=True)
def test_check_reducer_finalized():
    ddp = DistributedDataParallel(Branches())
    ddp._check_reducer_finalized()
    ddp(data(), True).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        ddp._check_reducer_finalized()
    model = syncengine.Parallel(Branches())
    model._check_reducer_finalized()
    model(data(), True).sum().backward()
    for check in (model._check_reducer_finalized, model.reducer._check_reducer_finalized):
        with pytest.raises(
            InvalidUsage,
            match=r"Expected to have finished reduction.*\n.*\n.*right.weight, right.bias, never.weight, never.bias",
        ):
            check()
    syncengine.barrier()  # a model that goes with a backward that is not complete refuses it for all ranks


@pytest.mark.thorough
@run_on_ranks(world=4, gloo=True)
def test_update_process_group():
    def step(model: nn.Module) -> list[torch.Tensor]:
        first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
        model(data(0)).square().mean().backward()
        model.zero_grad()
        model._update_process_group(first if dist.get_rank() < 2 else second)
        for i in range(3):
            model(data(i)).square().mean().backward()
        if dist.get_rank() > 1:
            model._update_process_group(first)  # not for these ranks
        assert dist.get_world_size(model.process_group) == 2
        return gradients(model)

    assert not different_bits(*of_both(step))


@run_on_ranks()
def test_sink_clone():
    for clone in (True, False):
        model = syncengine.Parallel(nn.Sequential(nn.Linear(24, 2)), find_unused_parameters=True)
        model._set_ddp_sink_clone(clone)
        seen = []
        model.module.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        out = model(data())
        assert (out.data_ptr() == seen[0].data_ptr()) != clone
        out.sum().backward()


class Asks(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(DistributedDataParallel._get_active_ddp_module())
        x = self.inner(x)
        self.seen.append(DistributedDataParallel._active_ddp_module)
        return x


@run_on_ranks()
def test_active_ddp_module():
    inner = Asks(nn.Linear(24, 2))
    outer = syncengine.Parallel(Asks(syncengine.Parallel(inner)))
    for grad in (True, False):
        inner.seen.clear()
        outer.module.seen.clear()
        with torch.set_grad_enabled(grad):
            outer(data())
        assert outer.module.seen == [outer, outer]
        assert inner.seen == [outer.module.inner] * 2
        assert DistributedDataParallel._active_ddp_module is None


class Meets(nn.Linear):
    """Its forward begins and ends by events of another thread."""

    def __init__(self, entered: threading.Event, leave: threading.Event) -> None:
        super().__init__(24, 2)
        self.entered, self.leave = entered, leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.leave.wait(120)
        return super().forward(x)


@run_on_ranks()
def test_active_ddp_module_in_two_threads():
    events = [threading.Event() for _ in range(3)]
    first, second = (syncengine.Parallel(Meets(*events[i : i + 2])) for i in range(2))
    with ThreadPoolExecutor(1) as other:  # the first enters, the second does, the first leaves, the second does
        out = other.submit(first, data())
        out.add_done_callback(lambda _: events[2].set())
        assert events[0].wait(120)
        second(data())
        out.result()
    assert DistributedDataParallel._active_ddp_module is None


@run_on_ranks()
def test_ignored_parameters_are_none_of_the_modules():
    module = Mlp()
    module.head.requires_grad_(False)
    syncengine.Parallel._set_params_and_buffers_to_ignore_for_model(module, ["head.bias"])
    assert module.head.bias._ddp_ignored
    model = syncengine.Parallel(module)
    assert list(map(id, model._module_parameters)) == list(map(id, module.parameters()))[:-1]


@run_on_ranks(gloo=True, settings={"numerics": "ring"})
def test_bucket_caps():
    for options in ({}, {"bucket_cap_mb": 3}):
        ours, theirs = of_both(
            lambda m: (m.bucket_bytes_cap, m.bucket_bytes_cap_list, m.bucket_bytes_cap_default), **options
        )
        assert ours == theirs


@run_on_ranks(gloo=True)
def test_scatter_and_gather():
    """On CPU ranks these can't do much, but no less than DDP's."""

    def step(model: nn.Module) -> list[Any]:
        assert model.dim == 1
        return [
            outcome(lambda: model.gather([data(1), data(2)], "cpu")),
            outcome(lambda: model.scatter((data(),), {"y": data(1)}, [])),
            outcome(lambda: model.to_kwargs((data(),), {"y": data(1)}, 0)),
        ]

    ours, theirs = of_both(step, dim=1)
    assert ours == theirs
    assert ours[2][0] == "returned"


@run_on_ranks()
def test_check_reduction_is_deprecated():
    with pytest.warns(FutureWarning, match="check_reduction"):
        model = syncengine.Parallel(nn.Linear(24, 2), check_reduction=True)
    model(data()).sum().backward()
