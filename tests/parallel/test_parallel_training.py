"""The ways people train: precision, optimizers, averaged models, each with the bits of DDP."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from parallel_models import Conv, Mlp, both, data, small
from pool import run_on_ranks
from torch import nn

import syncengine


@pytest.mark.thorough
@run_on_ranks(gloo=True)
def test_autocast_and_gradient_scaler():
    def step(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for i in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = model(data(i)).float().square().mean()
            if i == 2 and syncengine.rank() == 1:
                loss = loss * float("inf")  # on one rank: both must skip the step
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
        return scales

    for dtype in (torch.bfloat16, torch.float16):
        scales = both(Mlp, partial(step, dtype=dtype))
        assert [scale.item() for scale in scales] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]


@run_on_ranks(gloo=True)
def test_optimizers_that_call_the_model():
    def step(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data()).square().mean()
            loss.backward()
            syncengine.all_reduce(shared := loss.detach().clone())  # the line search must decide alike
            return shared

        return [optimizer.step(closure) for _ in range(2)]

    both(small, step)


@run_on_ranks(gloo=True)
def test_averaged_models():
    def step(model: nn.Module) -> list[torch.Tensor]:
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)  # a deep copy of the wrapper
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(3):
            optimizer.zero_grad()
            model(data(i)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
        torch.optim.swa_utils.update_bn([data(9)], average)
        return [*average.state_dict().values(), average(data())]

    both(Conv, step)
