"""Forwards whose backward is still to come while the module changes: frozen for another forward, of another dtype."""

import contextlib
import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from parallel_models import assert_averaged, averages, backwards, both, data, different_bits, gradients, small
from pool import run_on_ranks
from random_layers import Layer
from torch import nn

import syncengine
from syncengine.errors import InvalidUsage


def freeze(module: nn.Module, there: bool) -> None:
    module[0].requires_grad_(not there)


def round_off(module: nn.Module, there: bool) -> None:
    module.to(torch.bfloat16 if there else torch.float32)


def with_another_forward(model: nn.Module, change: Callable, synchronized: bool, first_drops: bool) -> list:
    """The steps of a GAN's discriminator: a forward is pending while the module changes for another one."""
    found = []
    for i in range(4):
        if first_drops:
            model(data(i))
        model.zero_grad()
        pending = model(data(i)).square().mean()
        change(model.module, True)
        with contextlib.nullcontext() if synchronized else model.no_sync():
            other = model(data(i + 1).to(next(model.parameters()).dtype))
        change(model.module, False)
        pending.backward()
        found += gradients(model)
        del other
    return found


@pytest.mark.usefixtures("kinds_of_buckets")
@run_on_ranks(gloo=True)
def test_a_forward_that_is_pending_while_the_module_changes():
    for synchronized, first_drops in itertools.product((True, False), repeat=2):
        step = partial(with_another_forward, synchronized=synchronized, first_drops=first_drops)
        both(small, partial(step, change=freeze))
        # DDP does not follow a change of dtype.
        model = syncengine.Parallel(small())
        reference = copy.deepcopy(model.module).bfloat16().float()
        found = step(model, change=round_off)
        for i in range(1, 4):  # the weights were rounded after the first forward
            expected = averages(reference, reference(data(i)).square().mean())
            assert not different_bits(found[4 * i : 4 * i + 4], expected), (i, synchronized, first_drops)


@run_on_ranks()
def test_hooks_of_parameters_that_are_frozen_meanwhile_see_the_average():
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.ones_(module[0].weight), nn.init.ones_(module[1].weight)
    seen: list = []
    module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    model = syncengine.Parallel(module)
    x = torch.full((1, 1), float(syncengine.rank()))
    for _ in range(3):
        module.zero_grad()
        real = model(x)
        freeze(module, True)
        model(x)
        freeze(module, False)
        real.sum().backward()
    assert seen == [0.5] * 3


@run_on_ranks(gloo=True)
def test_forwards_may_freeze_and_unfreeze():
    """Generator and discriminator in one module, whose forward says which of them is trained."""

    def forward(self: Any, x: torch.Tensor, trains_generator: bool) -> torch.Tensor:
        self.generator.requires_grad_(trains_generator)
        self.discriminator.requires_grad_(not trains_generator)
        return self.discriminator(self.generator(x))

    def make() -> nn.Module:
        return Layer(forward, generator=small(), discriminator=small())

    def alternate(model: nn.Module) -> list:
        found = []
        for i in range(8):
            model.zero_grad()
            model(data(i), i % 4 < 2).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    expected = both(make, alternate, find_unused_parameters=True)
    torch.manual_seed(0)
    assert not different_bits(alternate(syncengine.Parallel(make())), expected)  # DDP would not finish its reduction


@run_on_ranks(gloo=True)
def test_what_can_not_be_averaged_any_more_is_an_error():
    module = small()
    model = syncengine.Parallel(module)
    kept = model(data())
    model(data()).sum().backward()
    freeze(module, True)
    model(data())
    freeze(module, False)
    with pytest.raises(InvalidUsage, match=r"parameter 0\.(weight|bias) of Parallel\(Sequential\).*was frozen"):
        kept.sum().backward()
    backwards(model, 2)
    assert_averaged(module, module(data(1)).square().mean())


@run_on_ranks(gloo=True)
def test_a_parameter_that_stays_frozen_gets_nothing():
    module = small()
    model = syncengine.Parallel(module)
    for i in range(3):
        module.zero_grad()
        pending = model(data(i))
        freeze(module, True)
        expected = averages(module[2], module(data(i)).sum())
        model(data(i + 1))
        pending.sum().backward()
        freeze(module, False)
        assert module[0].weight.grad is None
        assert not different_bits(gradients(module[2]), expected)


@pytest.mark.usefixtures("kinds_of_buckets")
@run_on_ranks(gloo=True)
def test_backwards_past_a_model_that_was_wholly_frozen():
    """A generator's step freezes the discriminator, then come forwards of the bare module, or under no_sync."""

    def step(model: nn.Module, through_the_wrapper: bool) -> list:
        module, found, seen = model.module, [], []
        if isinstance(model, syncengine.Parallel):  # DDP's run before it averages
            module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for i in range(4):
            for frozen in (False, i == 2):
                module.zero_grad()
                module.requires_grad_(not frozen)
                generated = data(i).requires_grad_()
                model(generated).square().mean().backward()
                found.append(generated.grad.clone())
                module.requires_grad_(True)
            for k in range(2):  # averaged the first time, if a backward is due
                module.zero_grad()
                with model.no_sync():
                    (model if through_the_wrapper else module)(data(i + k)).sum().backward()
                found += gradients(module)
                assert not seen or torch.equal(seen[-1], module[0].weight.grad)
        return found

    for through_the_wrapper in (False, True):
        both(small, partial(step, through_the_wrapper=through_the_wrapper))


@run_on_ranks(gloo=True)
def test_backwards_past_a_model_that_was_wholly_frozen_for_its_first_forward():
    def step(model: nn.Module) -> list:
        model.requires_grad_(False)
        model(data(0))
        model.requires_grad_(True)
        model.module(data(1)).sum().backward()
        found = gradients(model)
        for i in range(3):
            model.zero_grad()
            model(data(i)).square().mean().backward()
            found += gradients(model)
        return found

    ours = both(small, step)
    torch.manual_seed(0)  # under DDP it raises
    assert not different_bits(step(syncengine.Parallel(small(), find_unused_parameters=True)), ours)
