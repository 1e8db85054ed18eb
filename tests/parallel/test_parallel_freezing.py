"""Parameters that are frozen while gradients are accumulated: what they have got by then is averaged, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from parallel_models import CAP, Branches, both, data, different_bits, gradients, of_both, small
from pool import run_on_ranks
from torch import nn

import syncengine

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")

UNUSED = {"find_unused_parameters": True}  # else DDP does not follow


def backward(model: nn.Module, number: int, synchronized: bool = True, *arguments: Any) -> None:
    with contextlib.nullcontext() if synchronized else model.no_sync():
        model(data(number), *arguments).square().mean().backward()


def in_turns(model: nn.Module, first_plain: int = 0) -> list[Any]:
    """One part in the micro-batch that does not synchronize, the other in the one that does."""
    found: list[Any] = []
    for i in range(first_plain):
        backward(model, i)
        found += gradients(model)
        model.zero_grad()
    for i in range(4):
        model.module[0].requires_grad_(True)
        model.module[2].requires_grad_(False)
        backward(model, 2 * i, False)
        model.module[0].requires_grad_(False)
        model.module[2].requires_grad_(True)
        backward(model, 2 * i + 1)
        found += gradients(model)
        model.zero_grad()
    return found


def once(model: nn.Module, after: int) -> list[Any]:
    """Frozen for good in the middle of a step; then trained on without it."""
    found: list[Any] = []
    for i in range(5):
        backward(model, 3 * i, False)
        if i == after:
            model.module[0].requires_grad_(False)
        backward(model, 3 * i + 1, False)
        backward(model, 3 * i + 2)
        found += gradients(model)
        model.zero_grad()
    assert [grad is None for grad in found[-4:]] == [True, True, False, False]
    return found


STEPS: list[Callable[[nn.Module], list[Any]]] = [
    partial(in_turns),
    partial(in_turns, first_plain=3),
    partial(once, after=0),
    partial(once, after=3),
]


@run_on_ranks(gloo=True)
def test_accumulated_gradients_of_parameters_frozen_later():
    for step in STEPS:
        _, theirs = of_both(step, small, **UNUSED)
        for options in (UNUSED, {}, CAP, {"static_graph": True}):
            if "static_graph" in options and step.func is in_turns:
                continue
            torch.manual_seed(0)
            ours = step(syncengine.Parallel(small(), **options))
            assert [grad is None for grad in ours] == [grad is None for grad in theirs], (step, options)
            there = [[grad for grad in grads if grad is not None] for grads in (ours, theirs)]
            assert not different_bits(*there), (step, options)


def while_a_forward_is_pending(model: nn.Module) -> list[Any]:
    """As a GAN's discriminator, for another forward."""
    found: list[Any] = []
    for i in range(3):
        backward(model, 3 * i, False)
        loss = model(data(3 * i + 1)).square().mean()
        model.module[0].requires_grad_(False)
        other = model(data(3 * i + 2))
        model.module[0].requires_grad_(True)
        loss.backward()
        found += gradients(model)
        model.zero_grad()
        del other
    return found


@run_on_ranks(gloo=True)
def test_frozen_for_another_forward_alone():
    both(small, while_a_forward_is_pending)


def one_rank_alone(model: nn.Module) -> None:
    """It has used a branch that is frozen then; and one that is frozen has not been used by any."""
    backward(model, 0, False, syncengine.rank() == 0)
    model.module.left.requires_grad_(False)
    model.module.never.requires_grad_(False)
    backward(model, 1, True, False)
    assert model.module.left.weight.grad is not None
    assert model.module.never.weight.grad is None


@run_on_ranks(gloo=True)
def test_one_rank_may_have_accumulated_alone():
    both(Branches, one_rank_alone, **UNUSED)


@run_on_ranks()
def test_what_was_dropped_or_averaged_before_stays_as_it_is():
    model = syncengine.Parallel(small())
    frozen = model.module[0].weight
    backward(model, 0, False)
    model.module[0].requires_grad_(False)
    out = model(data(1))
    model.zero_grad()
    out.sum().backward()
    assert frozen.grad is None
    model.module[0].requires_grad_(True)
    backward(model, 2)
    average = frozen.grad.clone()
    model.module[0].requires_grad_(False)
    for i in range(3):
        backward(model, i)
        assert torch.equal(frozen.grad, average)
        assert model.sync_stats()["reduced_bytes"] == 4 * (24 * 24 + 24)  # of the other part alone


def frozen_and_every(model: syncengine.Parallel, weight: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient that a frozen parameter ends with, and what each rank had accumulated."""
    frozen = model.module[0].weight
    backward(model, 0, False)
    own = frozen.grad.clone()
    model.module[0].requires_grad_(False)
    if weight is not None:
        model.weight(weight)
    backward(model, 1)
    syncengine.all_gather(every := torch.empty(2, *own.shape), own)
    return frozen.grad, every


@run_on_ranks()
def test_weights_and_hooks_apply_to_them():
    average, (first, second) = frozen_and_every(syncengine.Parallel(small()), 1.0 + 2 * syncengine.rank())
    torch.testing.assert_close(average, (first + 3 * second) / 4)
    model = syncengine.Parallel(small())
    model.register_comm_hook(None, syncengine.hooks.bf16_compress)
    average, (first, second) = frozen_and_every(model)
    assert torch.equal(average, (first.bfloat16() / 2 + second.bfloat16() / 2).float())


@run_on_ranks()
def test_a_rank_without_a_batch_changes_nothing_of_its_own():
    model = syncengine.Parallel(small())
    frozen = model.module[0].weight
    backward(model, 0, False)
    own = frozen.grad.clone()
    with model.join():
        model.module[0].requires_grad_(False)
        if syncengine.rank() == 0:
            backward(model, 1)
            assert torch.equal(frozen.grad, own / 2)
    assert syncengine.rank() == 0 or torch.equal(frozen.grad, own)


def frozen_after_a_probe(model: nn.Module) -> list[Any]:
    """One rank alone has begun to accumulate, and no gradient came of it."""
    generator = type(model)(nn.Linear(24, 24))
    for i in range(4):
        backward(model, i)
    model.zero_grad()
    if syncengine.rank() == 0:
        with model.no_sync():
            model(data(5))
    model.requires_grad_(False)
    (model(generator(data(6))).sum() + model(data(6)).sum()).backward()
    return gradients(generator)


@run_on_ranks(world=2, gloo=True)
def test_a_probe_of_one_rank_plans_nothing() -> None:
    both(small, frozen_after_a_probe)
