"""Hooks: the user's own on gradients, and the engine's, which go with the model and its copies."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from parallel_models import Mlp, data, different_bits, gradients
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import syncengine


@run_on_ranks()
def test_post_accumulate_hooks_see_the_average():
    """So an optimizer in backward steps on averages, and may drop the gradient."""
    model = syncengine.Parallel(nn.Linear(2, 1, bias=False))
    weight = model.module.weight
    start, seen = weight.detach().clone(), []

    def step(parameter: torch.Tensor) -> None:
        seen.append(parameter.grad.tolist())
        with torch.no_grad():
            parameter -= parameter.grad
        parameter.grad = None

    handle = weight.register_post_accumulate_grad_hook(step)
    x = torch.full((1, 2), float(syncengine.rank()))
    model(x).sum().backward()
    assert seen == [[[0.5, 0.5]]]
    assert weight.grad is None
    assert torch.equal(weight, start - 0.5)
    with model.no_sync():
        model(x).sum().backward()
    assert seen[1] == x.tolist()
    handle.remove()
    model(x).sum().backward()
    assert len(seen) == 2
    assert weight.grad.tolist() == [[0.5, 0.5]]


@run_on_ranks()
def test_hooks_go_with_the_model():
    module = Mlp()
    model = syncengine.Parallel(module)
    model(data()).sum().backward()
    del model
    own = list(torch.autograd.grad(module(data()).sum(), list(module.parameters())))
    module.zero_grad()
    module(data()).sum().backward()  # no reducer to complain about a consumed forward
    assert not different_bits(gradients(module), own)
    again = syncengine.Parallel(module)
    again._remove_autograd_hooks()
    module.zero_grad()
    module(data()).sum().backward()
    assert not different_bits(gradients(module), own)


@run_on_ranks()
def test_a_copy_has_no_communication_hook_and_says_so():
    torch.manual_seed(1)
    model = syncengine.Parallel(Mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = copy.deepcopy(model)
    model.register_comm_hook(None, syncengine.hooks.bf16_compress)
    with pytest.warns(UserWarning, match="has no communication hook: register it again"):
        other = pickle.loads(pickle.dumps(model))
    for m in (model, other, exact):
        m.zero_grad()
        m(data()).square().sum().backward()
    assert not different_bits(gradients(other), gradients(exact))
    assert different_bits(gradients(other), gradients(model))


@run_on_ranks()
def test_a_copy_in_mixed_precision_sends_small_gradients_too():
    torch.manual_seed(1)
    model = syncengine.Parallel(Mlp(), mixed_precision=_MixedPrecision(torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = copy.deepcopy(model)
    for m in (model, other):
        m(data()).square().sum().backward()
    assert not different_bits(gradients(other), gradients(model))
    assert all(torch.equal(grad, grad.bfloat16().float()) for grad in gradients(other))


@pytest.mark.thorough
@run_on_ranks()
def test_a_copy_takes_neither_a_weight_nor_a_step_along():
    """What is on its way to one backward of the original."""
    model = syncengine.Parallel(Mlp(), bucket_cap_mb=0.1)
    model._register_fused_optim(torch.optim.SGD, lr=0.1)
    model.weight(1 + syncengine.rank())
    other = pickle.loads(pickle.dumps(model))
    assert other.bucket_bytes_cap == model.bucket_bytes_cap
    before = [p.detach().clone() for p in other.parameters()]
    other(data()).square().sum().backward()
    assert not different_bits([p.detach() for p in other.parameters()], before)
    local = copy.deepcopy(model.module)
    local.zero_grad()
    local(data()).square().sum().backward()
    for p, grad in zip(local.parameters(), gradients(other), strict=True):
        syncengine.all_reduce(p.grad, "avg")  # not the weighted mean
        assert torch.equal(p.grad, grad)
