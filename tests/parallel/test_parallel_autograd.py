"""Autograd in its corners, each with the bits of DDP."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import Mlp, averages, backwards, both, data, small
from pool import run_on_ranks
from torch import nn
from torch.utils._pytree import tree_leaves

import syncengine


@run_on_ranks(gloo=True)
def test_a_hessian_times_a_vector():
    def product(model: nn.Module) -> tuple[torch.Tensor, ...]:
        loss = model(data()).square().sum()
        parameters = list(model.parameters())
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(slopes, parameters, [torch.ones_like(s) for s in slopes])

    both(small, product)


@pytest.mark.parametrize("synchronizes", [False, True])
@run_on_ranks(world=3, gloo=True)
def test_gradients_keep_their_graph_on_this_rank(synchronizes: bool):
    """With create_graph=True the average has this rank's own graph: DDP fails in such a backward."""
    torch.manual_seed(0)
    model = syncengine.Parallel(small())
    plain, parameters = model.module, list(model.parameters())
    # The slopes of a sum do not depend on the outputs, through which no second backward may go.
    own = torch.autograd.grad(plain(data()).sum(), parameters, create_graph=True)
    values = averages(plain, plain(data()).sum()) if synchronizes else [slope.detach().clone() for slope in own]
    with_graph = [(slope, 2 * value) for slope, value in zip(own, values, strict=True) if slope.requires_grad]
    losses, weights = zip((plain(data(1)).sum(), torch.ones(())), *with_graph, strict=True)
    expected = [grad.clone() for grad in torch.autograd.grad(losses, parameters, weights)]
    for grad in expected:
        dist.all_reduce(grad)
    with warnings.catch_warnings(), contextlib.nullcontext() if synchronizes else model.no_sync():
        warnings.simplefilter("ignore")  # torch's about reference cycles
        model(data()).sum().backward(create_graph=True)
    slopes = [p.grad for p in parameters]
    assert [slope.requires_grad for slope in slopes] == [slope.requires_grad for slope in own]
    for slope, value in zip(slopes, values, strict=True):
        torch.testing.assert_close(slope.detach(), value)
    model.zero_grad()
    (model(data(1)).sum() + sum(slope.square().sum() for slope in slopes)).backward()
    for p, grad in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.grad, grad / 3)


@run_on_ranks(gloo=True)
def test_hooks_on_modules_and_tensors():
    def step(model: nn.Module) -> list[torch.Tensor]:
        seen = []
        model.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model.register_forward_hook(lambda module, args, out: out * 2)
        head = model.module.head
        head.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
        head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0].clone()))
        head.weight.register_hook(lambda grad: grad * 3)
        return [*backwards(model), *seen]

    assert len(both(Mlp, step)) == 3 + 2 * 3
    both(Mlp, step, find_unused_parameters=True)


@run_on_ranks(gloo=True)
def test_function_transforms():
    def function_transforms(model: nn.Module) -> Any:
        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().sum()

        parameters = {name: p.detach() for name, p in model.named_parameters()}
        results = [torch.func.grad(loss)(parameters, data())]
        with torch.no_grad():
            results += [torch.func.vmap(model)(data()), torch.func.jacrev(model)(data())]
        backwards(model)
        return results

    both(small, function_transforms)
    planning = syncengine.Parallel(small())
    backwards(planning, 1)  # where buckets are rebuilt then, DDP fails
    results = function_transforms(planning)
    assert all(map(torch.equal, tree_leaves(results), tree_leaves(function_transforms(planning))))


def fast_weights(model: nn.Module, inner_steps: int) -> list[torch.Tensor]:
    """Leaves of this rank's own, trained by backward() between the model's steps (first-order MAML, Reptile)."""
    found = []
    for i in range(3):
        fast = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        for j in range(inner_steps):
            torch.func.functional_call(model, fast, (data(3 * i + j),)).square().mean().backward()
            with torch.no_grad():
                for value in fast.values():
                    value -= 0.1 * value.grad
                    value.grad = None
        model.zero_grad()
        model(data(i)).square().mean().backward()
        found += [*fast.values(), *(p.grad.clone() for p in model.parameters())]
    return found


@run_on_ranks(gloo=True)
def test_functional_calls_with_leaves_of_their_own():
    for inner_steps in (1, 3):
        both(small, partial(fast_weights, inner_steps=inner_steps))
