"""Changes after wrapping, of which DDP's reducer hears nothing: its ranks go on with gradients of their own."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flat import Parallel as FlatParallel
from parallel_models import (
    CAP,
    Mlp,
    assert_averages,
    backwards,
    both,
    data,
    gradients,
    outcome,
    small,
    trained,
    warned_of,
)
from pool import run_on_ranks
from random_layers import Layer, linear
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import syncengine
from syncengine.errors import Aborted, InvalidUsage, SyncError


@run_on_ranks(gloo=True)
def test_dtype_may_change_after_wrapping():
    for dtype in (torch.float64, torch.bfloat16):
        model = trained(Mlp(), 2, **CAP).to(dtype)
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


def unusual() -> nn.Module:
    torch.manual_seed(7)
    body = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, (3, 2)), nn.Flatten(), nn.Linear(24, 5)]
    return nn.Sequential(nn.Linear(24, 144), nn.Unflatten(1, (3, 8, 6)), *body[:3], nn.AdaptiveAvgPool2d(2), *body[3:])


def change_strides(model: nn.Module, after: int = 3, ranks: Any = (1,), change: Callable = in_last_format) -> None:
    """After so many steps strides change on these ranks; averages stay those of the plain module's gradients."""
    backwards(model, after)
    if syncengine.rank() in ranks:
        change(model)
    for i in range(3):
        model.zero_grad()
        model.module(data(i)).square().sum().backward()
        expected = [grad.contiguous().double() for grad in gradients(model)]
        for grad in expected:
            syncengine.all_reduce(grad, "avg")
        model.zero_grad()
        model(data(i)).square().sum().backward()
        torch.testing.assert_close([grad.double() for grad in gradients(model)], expected, rtol=1e-4, atol=1e-4)


@run_on_ranks()
def test_strides_may_change_after_wrapping():
    """Under DDP the averages are permuted from then on."""
    for change in (in_last_format, transposed):
        change_strides(syncengine.Parallel(unusual()), ranks=(0, 1), change=change)


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("alone", [0, 1])
@run_on_ranks()
def test_strides_that_change_on_one_rank_alone_are_named(alone: int, after: int):
    text = ": ".join(outcome(lambda: change_strides(syncengine.Parallel(unusual()), after, (alone,))))
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
    change_strides(model)


REPLACED = r"\.weight of Parallel\(Sequential\) was replaced after wrapping"


@run_on_ranks()
def test_replaced_parameters_are_an_error():
    model = syncengine.Parallel(small())
    with pytest.raises(SyncError, match="parameter 0" + REPLACED):  # its own, or the other's, who may be ahead
        backwards(model)
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        backwards(model)


@pytest.mark.parametrize(
    ("options", "after", "text"),
    [
        ({}, 2, r"Parameters which did not receive grad for rank.*: 2\.weight$"),
        ({"find_unused_parameters": True}, 2, "parameter 2" + REPLACED),
        ({"static_graph": True}, 0, "parameter 2" + REPLACED),
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
    other, model = syncengine.Parallel(small()), trained(small(), find_unused_parameters=True)
    if on_all or syncengine.rank() == 1:
        model.module[2].weight = nn.Parameter(model.module[2].weight.detach().clone())
    raised = InvalidUsage if on_all or syncengine.rank() == 1 else Aborted
    for _ in range(2):
        with pytest.raises(raised, match="parameter 2" + REPLACED):
            backwards(model, 1)
    backwards(other)
    if on_all:
        backwards(syncengine.Parallel(model.module))
    assert syncengine.default_communicator() is model.communicator
    assert model.communicator.exception() is None


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

    both(lambda: Layer(lambda self, x: (x, self.layer(x)), layer=linear()), step)


# --- Parameters that a model gets beside its own or in their place: trained apart, but not in silence


def with_adapter(layer: nn.Module) -> nn.Module:
    """An adapter, as LoRA's, beside a layer, which stays the same object."""
    down, up = nn.Linear(24, 2, bias=False), nn.Linear(2, 24, bias=False)
    return Layer(lambda self, x: self.layer(x) + self.up(self.down(x)), layer=layer, down=down, up=up)


def added(call: Callable[[], Any]) -> list[str]:
    """Names of the parameters that are warned of."""
    texts = warned_of("after wrapping", call)
    assert all("was added to Parallel(Sequential) after wrapping, or replaces another" in text for text in texts)
    return sorted(text.split()[1] for text in texts)


@run_on_ranks()
def test_parameters_that_are_added_and_trained_are_warned_of_once():
    """Under DDP ranks train them apart without a word."""
    model = trained(small())
    model.module[2] = with_adapter(model.module[2])
    assert added(lambda: backwards(model)) == ["2.down.weight", "2.up.weight"]


@run_on_ranks()
def test_parameters_that_are_added_frozen_or_without_a_shape_are_warned_of_when_they_are_trained():
    model = syncengine.Parallel(small())
    adapter = model.module[2] = with_adapter(model.module[2])
    adapter.up.requires_grad_(False)
    adapter.down.requires_grad_(False)
    assert not added(lambda: backwards(model))
    adapter.up.requires_grad_(True)
    assert added(lambda: backwards(model, 20)) == ["2.up.weight"]
    model.module[2] = nn.Sequential(adapter, nn.LazyLinear(1, bias=False))
    assert not added(lambda: model(data()))  # gets its shape
    assert added(lambda: backwards(model, 20)) == ["2.1.weight"]


@run_on_ranks()
def test_parameters_that_are_added_on_purpose_or_not_trained_are_not_warned_of():
    model = syncengine.Parallel(small())
    model.module[0].average = copy.deepcopy(model.module[0])  # kept there, as moving averages are
    assert not added(lambda: backwards(model))
    adapter = model.module[0] = with_adapter(model.module[0])
    adapter.down.weight._ddp_ignored = adapter.up.weight._ddp_ignored = True
    assert not added(lambda: backwards(model))
    del adapter.layer.average
    model.module[2] = with_adapter(model.module[2])
    model(data())
    assert not added(lambda: backwards(syncengine.Parallel(model.module), 2))


@run_on_ranks()
def test_what_replaces_a_frozen_parameter_is_warned_of():
    """Linear probing, then another head: the old one was in no bucket, so nobody misses it."""
    for loaded, unused in itertools.product((False, True), repeat=2):
        net = small()
        net[2].requires_grad_(False)
        model = trained(net, find_unused_parameters=unused)
        if loaded:
            net[2].load_state_dict(copy.deepcopy(net[2].state_dict()), assign=True)
            net[2].requires_grad_(True)
        else:
            net[2] = nn.Linear(24, 3)
        assert added(partial(backwards, model)) == ["2.bias", "2.weight"], (loaded, unused)


@run_on_ranks()
def test_what_takes_one_of_two_names_is_warned_of():
    """The old parameter still gets its gradient, by its other name, or by the one that it is moved to."""
    net = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    net[1].weight = net[0].weight
    model = trained(net)
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    assert added(lambda: backwards(model)) == ["0.weight"]
    model = trained(nn.Sequential(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 3))))
    model.module[0] = nn.Sequential(nn.Linear(24, 24), *model.module[0])
    assert added(lambda: backwards(model)) == ["0.0.bias", "0.0.weight"]


@run_on_ranks()
def test_what_is_put_past_registration_is_warned_of_within_some_steps():
    for what, put in {
        "inserted": lambda net: net.insert(0, nn.Linear(24, 24)),
        "a module": lambda net: net._modules.update({"0": nn.Linear(24, 24)}),
        "a parameter": lambda net: net[0]._parameters.update(weight=nn.Parameter(torch.randn(24, 24))),
    }.items():
        net = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 3))
        net[0].requires_grad_(False)
        model = trained(net)
        put(net)
        assert "0.weight" in added(partial(backwards, model, 20)), what


@run_on_ranks()
def test_what_the_wrapper_itself_gets_is_warned_of():
    """The wrapper's own parameters are among those that users give to the optimizer."""
    model = trained(small())
    model.head, model.scale = nn.Linear(24, 2), nn.Parameter(torch.ones(()))
    names = added(lambda: (model.head(model(data())) * model.scale).sum().backward())
    assert names == ["head.bias", "head.weight", "scale"]
    copied = copy.deepcopy(model)
    assert added(lambda: copied.head(copied(data())).sum().backward()) == ["head.bias", "head.weight"]


@run_on_ranks(gloo=True)
def test_what_ddp_averages_is_not_trained_apart():
    model = trained(small())
    model.head = DistributedDataParallel(nn.Linear(24, 2))
    assert not added(lambda: (backwards(model), model.head(data()).sum().backward()))
    model.other = nn.Linear(24, 2)
    assert added(lambda: (backwards(model), model.other(data()).sum().backward())) == ["other.bias", "other.weight"]
