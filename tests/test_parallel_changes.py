"""Changes after wrapping, of which DDP's reducer hears nothing: its ranks go on with gradients of their own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from parallel_models import CAP, Conv, Mlp, backwards, both, data, gradients, small
from pool import RankPool, run_on_ranks
from test_parallel_modules import Forked
from torch import nn

import syncengine
from syncengine.errors import SyncError


@run_on_ranks()
def test_dtype_may_change_after_wrapping():
    for dtype in (torch.float64, torch.bfloat16):
        model = syncengine.Parallel(Mlp(), **CAP)
        backwards(model, 2)
        model.to(dtype)
        with model.no_sync():
            model(data().to(dtype)).sum().backward()
        for i in range(3):
            model.zero_grad()
            model(data(i).to(dtype)).square().sum().backward()
            for grad in gradients(model):
                everyone = torch.empty(2, *grad.shape, dtype=dtype)
                syncengine.all_gather(everyone, grad)
                assert grad.dtype == dtype
                assert torch.equal(everyone[0], everyone[1])


def replace_parameters() -> str:
    model = syncengine.Parallel(small())
    with pytest.raises(SyncError) as error:  # this rank's own, or what the other says, who may be one backward ahead
        backwards(model)
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        backwards(model)
    return str(error.value)


def test_replaced_parameters_are_an_error(pool: RankPool):
    for text in pool.run(replace_parameters):
        assert "Parallel(Sequential) depend on none of the parameters that it was made with" in text
        assert "load_state_dict(assign=True)" in text


@run_on_ranks(gloo=True)
def test_a_backward_past_the_parameters():
    """No error: the outputs do depend on parameters, only this loss does not."""

    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            inputs = data(i).requires_grad_().sin()
            same, out = model(inputs, "identity")
            same.sum().backward(retain_graph=True)
            (same.sum() + out.square().sum()).backward()

    both(Forked, step)


@run_on_ranks(gloo=True)
def test_training_goes_on_after_pickling_a_trained_model():
    def step(model: nn.Module) -> list[torch.Tensor]:
        backwards(model)
        other = pickle.loads(pickle.dumps(model))
        return [*backwards(other), *gradients(other), *backwards(copy.deepcopy(other))]

    both(Conv, step)
