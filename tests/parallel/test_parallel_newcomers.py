"""Parameters that a model gets after wrapping, beside its own or in their place: trained apart, but not in silence."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from parallel_models import backwards, data, small
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine


class Adapter(nn.Module):
    """As LoRA: beside a layer, which stays the same object."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(24, 2, bias=False), nn.Linear(2, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if "after wrapping" in str(warning.message)]


def added(call: Callable[[], Any]) -> list[str]:
    """Names of the parameters that are warned of."""
    return sorted(text.split()[1] for text in warnings_of(call))


@run_on_ranks()
def test_parameters_that_are_added_and_trained_are_warned_of_once():
    """Under DDP ranks train them apart without a word."""
    model = syncengine.Parallel(small())
    backwards(model)
    model.module[2] = Adapter(model.module[2])
    texts = warnings_of(lambda: backwards(model))
    assert sorted(text.split()[1] for text in texts) == ["2.down.weight", "2.up.weight"]
    assert all("was added to Parallel(Sequential) after wrapping, or replaces another" in text for text in texts)


@run_on_ranks()
def test_parameters_that_are_added_frozen_or_without_a_shape_are_warned_of_when_they_are_trained():
    model = syncengine.Parallel(small())
    adapter = model.module[2] = Adapter(model.module[2])
    adapter.up.requires_grad_(False)
    adapter.down.requires_grad_(False)
    assert not warnings_of(lambda: backwards(model))
    adapter.up.requires_grad_(True)
    assert added(lambda: backwards(model, 20)) == ["2.up.weight"]
    model.module[2] = nn.Sequential(adapter, nn.LazyLinear(1, bias=False))
    assert not warnings_of(lambda: model(data()))  # gets its shape
    assert added(lambda: backwards(model, 20)) == ["2.1.weight"]


@run_on_ranks()
def test_parameters_that_are_added_on_purpose_or_not_trained_are_not_warned_of():
    model = syncengine.Parallel(small())
    model.module[0].average = copy.deepcopy(model.module[0])  # kept there, as moving averages are
    assert not warnings_of(lambda: backwards(model))
    model.module[0] = Adapter(model.module[0])
    for parameter in (model.module[0].down.weight, model.module[0].up.weight):
        parameter._ddp_ignored = True
    assert not warnings_of(lambda: backwards(model))
    del model.module[0].layer.average
    model.module[2] = Adapter(model.module[2])
    model(data())
    assert not warnings_of(lambda: backwards(syncengine.Parallel(model.module), 2))


def new_head(net: nn.Module) -> None:
    net[2] = nn.Linear(24, 3)


def loaded_head(net: nn.Module) -> None:
    net[2].load_state_dict(copy.deepcopy(net[2].state_dict()), assign=True)
    net[2].requires_grad_(True)


@run_on_ranks()
def test_what_replaces_a_frozen_parameter_is_warned_of():
    """Linear probing, then another head: the old one was in no bucket, so nobody misses it."""
    for replace in (new_head, loaded_head):
        for unused in (False, True):
            net = small()
            net[2].requires_grad_(False)
            model = syncengine.Parallel(net, find_unused_parameters=unused)
            backwards(model)
            replace(net)
            assert added(partial(backwards, model)) == ["2.bias", "2.weight"], (replace, unused)


@run_on_ranks()
def test_what_takes_one_of_two_names_is_warned_of():
    """The old one still gets its gradient, by its other name."""
    net = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    net[1].weight = net[0].weight
    model = syncengine.Parallel(net)
    backwards(model)
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    assert added(lambda: backwards(model)) == ["0.weight"]


@run_on_ranks()
def test_what_takes_a_name_that_another_keeps_is_warned_of():
    net = nn.Sequential(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 3)))
    model = syncengine.Parallel(net)
    backwards(model)
    net[0] = nn.Sequential(nn.Linear(24, 24), *net[0])
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
        model = syncengine.Parallel(net)
        backwards(model)
        put(net)
        assert "0.weight" in added(partial(backwards, model, 20)), what


@run_on_ranks()
def test_what_the_wrapper_itself_gets_is_warned_of():
    """It is among the parameters that users give to the optimizer."""
    model = syncengine.Parallel(small())
    backwards(model)
    model.head, model.scale = nn.Linear(24, 2), nn.Parameter(torch.ones(()))
    names = added(lambda: (model.head(model(data())) * model.scale).sum().backward())
    assert names == ["head.bias", "head.weight", "scale"]
    copied = copy.deepcopy(model)
    assert added(lambda: copied.head(copied(data())).sum().backward()) == ["head.bias", "head.weight"]


@run_on_ranks(gloo=True)
def test_what_ddp_averages_is_not_trained_apart():
    model = syncengine.Parallel(small())
    backwards(model)
    model.head = DistributedDataParallel(nn.Linear(3, 2))
    assert not warnings_of(lambda: (backwards(model), model.head(torch.ones(1, 3)).sum().backward()))
    model.other = nn.Linear(3, 2)
    names = added(lambda: (backwards(model), model.other(torch.ones(1, 3)).sum().backward()))
    assert names == ["other.bias", "other.weight"]
