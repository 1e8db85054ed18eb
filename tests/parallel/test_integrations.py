"""What Lightning and Accelerate do with the model that they think is DDP's, as their sources have it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from parallel_models import Mlp, both, data, gradients
from pool import run_on_ranks
from torch import nn

import syncengine


def prepare(wrapper: nn.Module) -> None:
    """As Lightning does before a backward."""
    wrapper.require_forward_param_sync = True
    wrapper.reducer._rebuild_buckets()
    wrapper.reducer.prepare_for_backward([])


class Redirected(nn.Module):
    """Lightning's forward under manual optimization: synchronization is switched off inside of it, until its end."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.wrapper: list[nn.Module] = []  # in a list, not to be a submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        self.wrapper[0].require_backward_grad_sync = False
        return out


@run_on_ranks(gloo=True)
def test_lightnings_manual_optimization():
    def step(model: nn.Module) -> list[torch.Tensor]:
        model.module.wrapper = [model]
        results = []
        for i in range(3):
            model.zero_grad()
            loss = model(data(i)).square().mean()
            model.require_backward_grad_sync = True
            if i == 1:  # a backward without Lightning's manual_backward: stays local
                loss.backward(retain_graph=True)
                results += gradients(model)
                model.zero_grad()
            prepare(model)
            loss.backward()
            results += gradients(model)
        model.module.wrapper = []
        return results

    both(Redirected, step)


class StepsInside(nn.Module):
    """All of a step is in the forward, as in Lightning's manual optimization: several backwards, also under no_sync."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.wrapper: list[nn.Module] = []
        self.gradients: list[torch.Tensor] = []

    def backward(self, step: int, synchronize: bool) -> None:
        (wrapper,) = self.wrapper
        loss = self.inner(data(step)).square().mean()
        if synchronize:
            prepare(wrapper)
        loss.backward()
        self.gradients += gradients(self.inner)

    def forward(self, step: int) -> torch.Tensor:
        (wrapper,) = self.wrapper
        for i, order in enumerate([(True, False, True), (False, True), (False, False)]):
            self.inner.zero_grad()
            for j, synchronize in enumerate(order):
                with contextlib.nullcontext() if synchronize else wrapper.no_sync():
                    self.backward(100 * step + 10 * i + j, synchronize)
        wrapper.require_backward_grad_sync = False
        return torch.zeros(())


class TwoLossesInside(StepsInside):
    """Both of one graph: the first is synchronized, the second is this rank's own."""

    def forward(self, step: int) -> torch.Tensor:
        (wrapper,) = self.wrapper
        self.inner.zero_grad()
        output = self.inner(data(step))
        prepare(wrapper)
        output.square().mean().backward(retain_graph=True)
        self.gradients += gradients(self.inner)
        with wrapper.no_sync():
            output.abs().mean().backward()
        self.gradients += gradients(self.inner)
        wrapper.require_backward_grad_sync = False
        return torch.zeros(())


def train_inside(model: nn.Module) -> list[torch.Tensor]:
    model.module.wrapper = [model]
    for i in range(3):
        model(i)
        model.require_backward_grad_sync = True
    model.module.wrapper = []
    return model.module.gradients


@pytest.mark.thorough
@run_on_ranks(gloo=True)
def test_lightnings_manual_optimization_under_no_sync():
    both(StepsInside, train_inside)
    both(TwoLossesInside, train_inside)
    model = syncengine.Parallel(Mlp(), bucket_cap_mb=0.1)
    assert model.reducer._rebuild_buckets()
    assert not model.reducer._rebuild_buckets()


class FlushesInside(StepsInside):
    """After the first backward over a static graph Lightning averages by DDP's own private method."""

    def forward(self, step: int) -> torch.Tensor:
        self.inner.zero_grad()
        self.backward(step, True)
        if step == 0:
            self.wrapper[0].reducer._delay_all_reduce()
            self.gradients = gradients(self.inner)
        self.wrapper[0].require_backward_grad_sync = False
        return torch.zeros(())


@run_on_ranks(gloo=True)
def test_lightnings_flush_of_a_static_graph():
    both(FlushesInside, train_inside, static_graph=True)


@run_on_ranks(gloo=True)
def test_accelerates_trigger_sync_in_backward():
    """Which steps on a forward that ran under no_sync."""

    def step(model: nn.Module) -> None:
        for i in range(3):
            with model.no_sync():
                losses = [model(data(10 * i + j)).square().mean() for j in range(3)]
                losses[0].backward()
            before = model.require_backward_grad_sync, model.require_forward_param_sync
            model.require_backward_grad_sync, model.require_forward_param_sync = True, True
            model.reducer.prepare_for_backward([])
            (losses[1] + losses[2]).backward()
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    both(Mlp, step)


# Scripts that are tried with one rank keep these lines.
test_lightnings_manual_optimization_alone = run_on_ranks(world=1, gloo=True)(
    test_lightnings_manual_optimization.on_ranks
)
test_accelerates_trigger_sync_in_backward_alone = run_on_ranks(world=1, gloo=True)(
    test_accelerates_trigger_sync_in_backward.on_ranks
)
