"""Hooks on buffers, and optimizers that run in backward."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import flat_at_night
from parallel_models import Mlp, backwards, both, data, different_bits, gradients, of_both
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

import syncengine
from syncengine.errors import Aborted, InvalidUsage

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x[0, :2]
        return self.layer(x)


@run_on_ranks(gloo=True)
def test_buffer_hooks():
    def hook(state: list[str], buffers: dict[str, torch.Tensor]) -> Any:
        state += buffers
        work = [dist.all_reduce(b, async_op=True) for b in buffers.values()]
        return [w.get_future() for w in work]

    def blocking_hook(state: list[str], buffers: dict[str, torch.Tensor]) -> None:
        state += buffers
        for buffer in buffers.values():
            dist.all_reduce(buffer)

    for function, location in ((hook, Location.POST_FORWARD), (blocking_hook, Location.PRE_FORWARD)):

        def step(model: nn.Module, function=function, location=location) -> None:
            names: list[str] = []
            model._register_buffer_comm_hook(names, function, location)
            backwards(model)
            assert names == ["seen"] * 3

        both(Counting, step)


@run_on_ranks(gloo=True)
def test_buffer_hooks_under_no_sync():
    def hook(state: list[float], buffers: dict[str, torch.Tensor]) -> None:
        dist.all_reduce(buffers["seen"])
        state.append(buffers["seen"].sum().item())

    for location in (Location.POST_FORWARD, Location.PRE_FORWARD):

        def step(model: nn.Module, location=location) -> list[float]:
            seen: list[float] = []
            model._register_buffer_comm_hook(seen, hook, location)
            for i in range(7):
                with model.no_sync() if i % 3 else contextlib.nullcontext():
                    model(data(i)).sum().backward()
            return [*seen, model.module.seen.sum().item()]

        ours, theirs = of_both(step, Counting)
        assert ours == theirs
        assert 1 < len(ours) < 8


@pytest.mark.parametrize(
    ("location", "kind"), [(Location.PRE_FORWARD, ValueError), (Location.POST_FORWARD, InvalidUsage)], ids=str
)
@run_on_ranks(gloo=True, settings={"timeout": 20.0})
def test_an_error_in_a_buffer_hook_is_told_to_ranks_that_wait_in_theirs(location: Location, kind: type[Exception]):
    def hook(rank: int, buffers: dict[str, torch.Tensor]) -> None:
        if rank == 1:
            raise kind("no buffers today")
        syncengine.all_reduce(buffers["seen"])

    model = syncengine.Parallel(Counting())
    model._register_buffer_comm_hook(syncengine.rank(), hook, location)
    with pytest.raises((kind, Aborted)) as error:
        model(data(0)).sum().backward()
    dist.barrier()  # rank 1 lives on
    told = "" if syncengine.rank() == 1 else f"rank 1 raised in its buffer hook: {kind.__name__}: "
    assert str(error.value) == told + "no buffers today"


@run_on_ranks(gloo=True)
def test_a_buffer_hook_may_call_the_models_own_broadcast():
    def hook(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
        model._default_broadcast_coalesced(list(buffers.values()))

    for location in Location:
        results = []
        for wrap in (
            partial(syncengine.Parallel, process_group=syncengine.default_communicator()),
            nn.parallel.DistributedDataParallel,
        ):
            torch.manual_seed(0)
            model = wrap(Counting())
            model._register_buffer_comm_hook(model, hook, location)
            for i in range(3):
                model(data(i)).sum().backward()
            results.append([*gradients(model), model.module.seen])
        assert not different_bits(*results)


@pytest.mark.thorough
@flat_at_night
@run_on_ranks()
def test_a_fused_optimizer_without_torch_distributed():
    for optimizer in (torch.optim.SGD, torch.optim.NAdam):  # of the second torch has no functional form
        torch.manual_seed(0)
        model, plain_model = syncengine.Parallel(Mlp()), syncengine.Parallel(Mlp())
        plain_model.load_state_dict(model.state_dict())
        head = list(model.module.head.parameters())
        model._register_fused_optim(optimizer, 0.01, optim_params=head)
        reference = optimizer(plain_model.module.head.parameters(), 0.01)
        for i in range(3):
            with model.no_sync():
                model(data(i)).square().mean().backward()  # no step
            for m in (model, plain_model):
                m.zero_grad()
                m(data(i)).square().mean().backward()
            reference.step()
        for ours, expected in zip(model.parameters(), plain_model.parameters(), strict=True):
            torch.testing.assert_close(ours, expected)
