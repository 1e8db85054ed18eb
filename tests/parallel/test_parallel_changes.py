"""Changes after wrapping, of which DDP's reducer hears nothing: its ranks go on with gradients of their own."""

import copy

import pytest
import torch
from flat import Parallel as FlatParallel
from parallel_models import CAP, Mlp, assert_averages, backwards, both, data, gradients, outcome, small
from pool import run_on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import syncengine
from syncengine.errors import Aborted, InvalidUsage, SyncError


@run_on_ranks(gloo=True)
def test_dtype_may_change_after_wrapping():
    for dtype in (torch.float64, torch.bfloat16):
        model = syncengine.Parallel(Mlp(), **CAP)
        backwards(model, 2)
        model.to(dtype)
        with model.no_sync():
            model(data().to(dtype)).sum().backward()
        for i in range(3):
            inputs = data(i).to(dtype)
            assert_averages(model, model.module(inputs).square().sum(), lambda out: out.square().sum(), inputs)
            assert all(grad.dtype == dtype for grad in gradients(model))


def in_last_format(module: nn.Module) -> None:
    module.to(memory_format=torch.channels_last)


def transposed(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.transpose(0, -1).contiguous().transpose(0, -1)


def average_beside(model: nn.Module, inputs: torch.Tensor) -> None:
    """One backward; the averages are those of the plain module's gradients, by a communicator's all-reduce."""
    model.zero_grad()
    model.module(inputs).square().sum().backward()
    expected = [grad.contiguous().double() for grad in gradients(model)]
    for grad in expected:
        syncengine.all_reduce(grad, "avg")
    model.zero_grad()
    model(inputs).square().sum().backward()
    torch.testing.assert_close([grad.double() for grad in gradients(model)], expected, rtol=1e-4, atol=1e-4)


@run_on_ranks()
def test_strides_may_change_after_wrapping():
    """Under DDP the averages are permuted from then on."""
    for change in (in_last_format, transposed):
        model = syncengine.Parallel(unusual())
        backwards(model)
        change(model)
        for i in range(3):
            average_beside(model, data(i))


def unusual() -> nn.Module:
    torch.manual_seed(7)
    body = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, (3, 2)), nn.Flatten(), nn.Linear(24, 5)]
    return nn.Sequential(nn.Linear(24, 144), nn.Unflatten(1, (3, 8, 6)), *body[:3], nn.AdaptiveAvgPool2d(2), *body[3:])


def change_strides(model: nn.Module, after: int, alone: int = 1) -> None:
    """The strides change on one rank, after that many steps."""
    backwards(model, after)
    if syncengine.rank() == alone:
        in_last_format(model)
    for i in range(3):
        average_beside(model, data(i))


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("alone", [0, 1])
@run_on_ranks()
def test_strides_that_change_on_one_rank_alone_are_named(alone: int, after: int):
    text = ": ".join(outcome(lambda: change_strides(syncengine.Parallel(unusual()), after, alone)))
    assert "Mismatch: " in text, text
    assert "of Parallel(Sequential) (" in text, text
    assert "with another layout" in text or "strides of " in text, text  # as this rank's own are usual or not


@pytest.mark.parametrize("after", [0, 1, 3])
@run_on_ranks()
def test_strides_may_change_on_one_rank_alone_where_gradients_are_copied(after: int):
    change_strides(FlatParallel(unusual()), after)


@run_on_ranks(gloo=True)
def test_strides_may_change_on_one_rank_alone_under_a_hook():
    model = syncengine.Parallel(unusual())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    change_strides(model, 3)


REPLACED = r"parameter 2\.weight of Parallel\(Sequential\) was replaced after wrapping"


@run_on_ranks()
def test_replaced_parameters_are_an_error():
    model = syncengine.Parallel(small())
    text = r"parameter 0.weight of Parallel\(Sequential\) was replaced after wrapping"
    with pytest.raises(SyncError, match=text):  # this rank's own, or the other's, who may be one backward ahead
        backwards(model)
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        backwards(model)


@pytest.mark.parametrize(
    ("options", "after", "text"),
    [
        ({}, 2, r"Parameters which did not receive grad for rank.*: 2\.weight$"),
        ({"find_unused_parameters": True}, 2, REPLACED),
        ({"static_graph": True}, 0, REPLACED),
    ],
    ids=["plain", "unused parameters", "static graph"],
)
@pytest.mark.parametrize("on_all", [True, False])
@run_on_ranks()
def test_a_replaced_parameter_is_named(options: dict[str, bool], after: int, text: str, on_all: bool):
    inputs = data().requires_grad_()  # a leaf, too, that is none of the parameters
    with pytest.raises(SyncError, match=text):  # the other's may come at any time
        model = syncengine.Parallel(small(), **options)
        for i in range(4):
            if i == after and (on_all or syncengine.rank() == 1):
                model.module[2].weight = nn.Parameter(model.module[2].weight.detach().clone())
            model(inputs).square().mean().backward()
        model(inputs)


@pytest.mark.parametrize("on_all", [True, False])
@run_on_ranks()
def test_replaced_parameters_end_that_model_alone(on_all: bool):
    other, model = syncengine.Parallel(small()), syncengine.Parallel(small(), find_unused_parameters=True)
    backwards(model)
    if on_all or syncengine.rank() == 1:
        model.module[2].weight = nn.Parameter(model.module[2].weight.detach().clone())
    raised = InvalidUsage if on_all or syncengine.rank() == 1 else Aborted
    for _ in range(2):
        with pytest.raises(raised, match=REPLACED):
            backwards(model, 1)
    backwards(other)
    if on_all:
        backwards(syncengine.Parallel(model.module))
    assert syncengine.default_communicator() is model.communicator
    assert model.communicator.exception() is None


class Forked(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, super().forward(x)


@run_on_ranks(gloo=True)
def test_a_backward_past_the_parameters():
    """No error: the outputs do depend on parameters, only this loss does not."""

    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            inputs = data(i).requires_grad_().sin()
            same, out = model(inputs)
            same.sum().backward(retain_graph=True)
            (same.sum() + out.square().sum()).backward()

    both(lambda: Forked(24, 24), step)
