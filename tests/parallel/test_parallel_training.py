"""The ways people train and run backward, and autograd in its corners, with the bits of DDP; any order of readiness."""

import contextlib
import sys
import warnings
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from models.workload import same_bits
from parallel_models import CAP, Conv, Mlp, Opposite, averages, backwards, both, data, gradients, small, trained
from pool import run_on_ranks
from random_layers import Layer
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import SyncError


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


@pytest.mark.parametrize("alone", [False, True])
@run_on_ranks()
def test_a_parameter_in_two_reentrant_checkpoints_raises(alone: bool):
    """Alone, it is averaged when the first of them has run backward: within the outer backward."""

    def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True).tanh()
        return self.last(checkpoint(self.layer, x, use_reentrant=True).tanh())

    last, options = (nn.Identity(), {}) if alone else (nn.Linear(24, 24), CAP)
    with pytest.raises(SyncError, match="ready only once"):  # the other's may come at any time
        model = syncengine.Parallel(Layer(twice, layer=nn.Linear(24, 24), last=last), **options)
        model(data()).sum().backward()


@pytest.mark.usefixtures("kinds_of_buckets")
@run_on_ranks(gloo=True)
def test_ranks_may_be_ready_in_opposite_orders():
    """Buckets complete in any order, and are reduced in one: who waits for another's next bucket would hang."""
    for options in ({}, CAP):
        both(partial(Opposite, 7), backwards, **options)


@run_on_ranks()
def test_create_graph_gives_averages_too():
    """DDP can't: it writes its bucket in place where autograd forbids it."""
    results = []
    for create_graph in (False, True):
        torch.manual_seed(0)
        model = syncengine.Parallel(nn.Linear(24, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about reference cycles
            for i in range(2):
                model(data(i)).square().sum().backward(create_graph=create_graph)
        results.append(gradients(model))
    assert all(map(same_bits, *results))


@run_on_ranks(gloo=True)
def test_a_checkpoint_around_the_wrapper():
    def step(model: nn.Module, reentrant: bool) -> None:
        for i in range(3):
            model.zero_grad()
            checkpoint(model, data(i).requires_grad_(), use_reentrant=reentrant).square().sum().backward()

    for reentrant, options in ((True, {}), (False, {}), (False, {"find_unused_parameters": True})):
        both(Mlp, partial(step, reentrant=reentrant), **options)


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
    penalty = sum((2 * value * slope).sum() for slope, value in zip(own, values, strict=True))
    expected = averages(plain, plain(data(1)).sum() + penalty)
    with warnings.catch_warnings(), contextlib.nullcontext() if synchronizes else model.no_sync():
        warnings.simplefilter("ignore")  # torch's about reference cycles
        model(data()).sum().backward(create_graph=True)
    slopes = [p.grad for p in parameters]
    assert [slope.requires_grad for slope in slopes] == [slope.requires_grad for slope in own]
    torch.testing.assert_close([slope.detach() for slope in slopes], values)
    model.zero_grad()
    (model(data(1)).sum() + sum(slope.square().sum() for slope in slopes)).backward()
    torch.testing.assert_close([p.grad for p in parameters], expected)


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
    planning = trained(small(), 1)  # where buckets are rebuilt then, DDP fails
    results = function_transforms(planning)
    assert all(map(torch.equal, tree_leaves(results), tree_leaves(function_transforms(planning))))


@run_on_ranks(gloo=True)
def test_functional_calls_with_leaves_of_their_own():
    """Leaves of this rank's own, trained by backward() between the model's steps (first-order MAML, Reptile)."""

    def step(model: nn.Module, inner_steps: int) -> list[torch.Tensor]:
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
            found += [*fast.values(), *gradients(model)]
        return found

    for inner_steps in (1, 3):
        both(small, partial(step, inner_steps=inner_steps))


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
    module = trained(Mlp(), 1).module
    own = list(torch.autograd.grad(module(data()).sum(), list(module.parameters())))
    module.zero_grad()
    module(data()).sum().backward()  # no reducer to complain about a consumed forward
    assert all(map(same_bits, gradients(module), own))
    again = syncengine.Parallel(module)
    again._remove_autograd_hooks()
    module.zero_grad()
    module(data()).sum().backward()
    assert all(map(same_bits, gradients(module), own))


# --- The way of a forward through Python, which every step pays for: how many calls it makes

# Modules that a forward calls only where an earlier test of the same process has made a ShardedOptimizer, or has
# imported torch's optimizers in backward.
BY_EARLIER_TESTS = ("syncengine.sharded.", "syncengine.parallel.optimizers.")


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
@run_on_ranks()
def test_a_forward_makes_few_calls(options: dict[str, bool]):
    """Functions of syncengine that are called in a forward, in turn; torch's, and the module's own, are not counted."""
    model = trained(small(), 4, **options)
    calls, batch = [], data(5)

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and f"{name}.".startswith("syncengine.") and not f"{name}.".startswith(BY_EARLIER_TESTS):
            calls.append(f"{name}.{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        output = model(batch)
    finally:
        sys.setprofile(None)
    output.sum().backward()
    assert len(calls) <= 10, calls
    assert "syncengine.parallel.steps.forward" in calls
