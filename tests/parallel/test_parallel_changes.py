"""Changes after wrapping, of which DDP's reducer hears nothing: its ranks go on with gradients of their own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from parallel_models import CAP, Branches, Conv, Mlp, backwards, both, data, gradients, small
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


def replace_one_parameter(options: dict[str, bool], after: int, on_all: bool) -> str:
    inputs = data().requires_grad_()  # a leaf, too, that is none of the parameters
    with pytest.raises(SyncError) as error:  # the other's may come at any time
        model = syncengine.Parallel(small(), **options)
        for i in range(4):
            if i == after and (on_all or syncengine.rank() == 1):
                model.module[2].weight = nn.Parameter(model.module[2].weight.detach().clone())
            model(inputs).square().mean().backward()
        model(inputs)
    return str(error.value)


def test_one_replaced_parameter_is_named(pool: RankPool):
    for text in pool.run(replace_one_parameter, {}, 2, True):
        assert "Parameters which did not receive grad for rank" in text
        assert text.endswith(": 2.weight")


@pytest.mark.parametrize(
    ("options", "after"),
    [({"find_unused_parameters": True}, 2), ({"static_graph": True}, 0)],
    ids=["unused parameters", "static graph"],
)
@pytest.mark.parametrize("on_all", [True, False])
def test_a_replaced_parameter_is_not_taken_for_an_unused_one(
    pool: RankPool, options: dict[str, bool], after: int, on_all: bool
):
    for text in pool.run(replace_one_parameter, options, after, on_all):
        assert "parameter 2.weight of Parallel(Sequential) was replaced after wrapping" in text


@run_on_ranks(gloo=True)
def test_leaves_that_are_no_parameters():
    """Unused parameters beside inputs that require a gradient, or parameters of others: trained as by DDP."""

    def step(model: nn.Module) -> list[torch.Tensor]:
        inputs, scale = data().requires_grad_(), nn.Parameter(torch.full((24,), 2.0))
        for i in range(3):
            model.zero_grad()
            model(inputs * scale, i == 1).square().mean().backward()
        return [inputs.grad, scale.grad]

    both(Branches, step, find_unused_parameters=True)


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
