"""State ends with what it belongs to: a forward that was dropped, a second wrapper, a node that torch has replaced."""

import itertools
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from parallel_models import Branches, Mlp, assert_averages, averages, both, data, flat_gradients, gradients, small
from pool import run_on_ranks
from random_layers import Layer
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import InvalidUsage


@run_on_ranks(gloo=True)
def test_a_dtype_that_changes_and_comes_back():
    ways = (nn.Module.bfloat16, nn.Module.double, lambda m: m.requires_grad_(False).bfloat16().float().requires_grad_())
    for change in ways:
        torch.manual_seed(0)
        model = syncengine.Parallel(Mlp())
        for i in range(3):
            assert_averages(model, model.module(data(i)).var(), torch.var, data(i))
            change(model.module)
            with torch.no_grad():
                model.module(data(i).to(next(model.parameters()).dtype))
            model.module.float()


class Mark:
    """On a node, and gone with it."""


def mark_nodes(module: nn.Module, marks: weakref.WeakSet[Mark]) -> None:
    for parameter in module.parameters():
        mark = parameter.view_as(parameter).grad_fn.next_functions[0][0].metadata["mark"] = Mark()
        marks.add(mark)


@run_on_ranks()
def test_nodes_that_torch_has_replaced_are_let_go_of():
    for wrappers, pending in itertools.product((1, 2), (False, True)):
        module = small()
        models = [syncengine.Parallel(module) for _ in range(wrappers)]
        marks: weakref.WeakSet[Mark] = weakref.WeakSet()
        for i in range(6):
            for model in models:
                module.zero_grad()
                model(data(i)).sum().backward()
            mark_nodes(module, marks)
            kept = models[0](data(i)) if pending else None
            module.bfloat16().float()
            for model in models:
                model(data(i))
            del kept
        for model in models:
            model(data())
        assert not marks, (wrappers, pending, len(marks))


def resize(module: nn.Module, rows: int) -> None:
    for parameter in module.parameters():
        parameter.data = torch.ones(rows, *parameter.shape[1:])


@run_on_ranks(gloo=True)
def test_parameters_of_another_size():
    """`.data` of another shape: DDP has to be made anew, ours looks before each forward."""
    for wrappers, pending in itertools.product((1, 2), (False, True)):
        module = nn.Sequential(nn.Linear(24, 3))
        models = [syncengine.Parallel(module) for _ in range(wrappers)]
        for rows in (3, 900, 30, 900):
            kept = [model(data(i)) for i, model in enumerate(models) if pending]
            resize(module, rows)
            for model in models:
                for i in range(2):
                    module.zero_grad()
                    model(data(i)).square().sum().backward()
                expected = averages(module, module(data(1)).square().sum())
                assert all(map(torch.equal, gradients(module), expected)), (wrappers, pending, rows)
            del kept


@run_on_ranks(gloo=True)
def test_a_gradient_of_a_size_from_before_is_an_error():
    for another_node, (before, after) in itertools.product((False, True), ((3, 900), (900, 3), (30, 31))):
        module = nn.Sequential(nn.Linear(24, 3))
        model = syncengine.Parallel(module)
        resize(module, before)
        model(data()).sum().backward()
        module.zero_grad()
        pending = model(data())
        if another_node:
            module.bfloat16().float()
        resize(module, after)
        out = model(data())
        with pytest.raises(InvalidUsage, match=r"parameter 0\.(weight|bias) of Parallel\(Sequential\).*size"):
            pending.sum().backward()
        del pending, out
        syncengine.barrier()
        assert_averages(model, module(data()).sum(), torch.sum, data())


@run_on_ranks()
def test_a_weight_goes_with_its_forward():
    """A forward that is dropped, or raises, takes its weight along; a backward through several forwards has one."""
    model = syncengine.Parallel(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), 1.0 + syncengine.rank())

    def weighted(weight: float = 3, x: torch.Tensor = x) -> torch.Tensor:
        model.weight(weight if syncengine.rank() == 0 else 1)
        return model(x)

    def gradient(out: torch.Tensor) -> float:
        model.zero_grad()
        out.sum().backward()
        return model.module.weight.grad[0, 0].item()

    assert gradient(model(x)) == 1.5
    weighted()  # the loss was no number: next batch
    assert gradient(model(x)) == 1.5
    assert gradient(weighted()) == 1.25
    kept = weighted()  # though something still holds it
    assert gradient(model(x)) == 1.5
    del kept
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        weighted(x=torch.ones(1, 3))
    assert gradient(model(x)) == 1.5
    assert gradient(weighted() + model(x)) == 2.5  # one weight for both
    with pytest.raises(InvalidUsage, match="several forwards of Parallel\\(Linear\\) before which weight"):
        gradient(weighted(3) + weighted(2))
    syncengine.barrier()


@run_on_ranks(gloo=True)
def test_a_dropped_forward_and_then_another_branch():
    def step(model: nn.Module) -> list:
        found, kept = [], []
        for i in range(4):
            model.zero_grad()
            if i % 2:
                kept.append(model(data(i), True))  # DDP goes by the last forward, kept or not
            model(data(i), False).square().mean().backward()
            found += gradients(model)
        return found

    both(Branches, step, find_unused_parameters=True)


def two_heads(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    self.auxiliary = self.never(x)
    return self.first(x), self.second(x)


@run_on_ranks()
def test_a_loss_that_is_no_output_is_found():
    torch.manual_seed(0)
    module = Layer(two_heads, first=nn.Linear(24, 3), second=nn.Linear(24, 3), never=nn.Linear(24, 3))
    model = syncengine.Parallel(module, find_unused_parameters=True)
    x = torch.full((1, 24), 1.0 + syncengine.rank())
    first, _second = model(x)
    (first.sum() + module.auxiliary.sum()).backward()
    assert module.first.weight.grad.unique().tolist() == module.never.weight.grad.unique().tolist() == [1.5]
    assert module.second.weight.grad is None


@pytest.mark.thorough
@run_on_ranks(gloo=True)
def test_hooks_on_the_node_see_this_ranks_gradient():
    """And a `.grad` that was there before stays where it is: one of a flat optimizer's, say."""
    for late, preset, static_graph in itertools.product((False, True), repeat=3):
        both(Mlp, partial(seen_at_nodes, late=late, preset=preset), static_graph=static_graph)


def seen_at_nodes(model: nn.Module, late: bool, preset: bool) -> list:
    seen, nodes = {}, []
    flat = [flat_gradients(model.module)] if preset else []

    def listen() -> None:
        for name, parameter in model.module.named_parameters():
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            nodes.append(node)
            node.register_hook(lambda *_, name=name, p=parameter: seen.__setitem__(name, p.grad.clone()))

    if not late:
        listen()
    for i in range(3):
        model.zero_grad(set_to_none=not preset)
        out = model(data(i))
        if late and i == 0:
            listen()
        out.square().mean().backward()
    return [seen[name] for name in sorted(seen)] + flat


def auxiliary(self: Any, x: torch.Tensor, how: str) -> torch.Tensor:
    self.loss = checkpoint(self.layer, x, use_reentrant=True) if how == "reentrant" else self.layer(x)
    return self.loss * 2


@run_on_ranks()
def test_a_second_wrapper_averages_whatever_its_backward_starts_from():
    for how in ("reentrant", "auxiliary", "inputs"):
        module = Layer(auxiliary, layer=nn.Linear(8, 8))
        first, second = syncengine.Parallel(module), syncengine.Parallel(module)
        x = torch.full((1, 8), 1.0 + syncengine.rank(), requires_grad=True)
        first(x, how).sum().backward()
        module.zero_grad()
        out = second(x, how)
        loss = module.loss if how == "auxiliary" else out
        loss.sum().backward(inputs=list(module.parameters()) if how == "inputs" else None)
        assert module.layer.weight.grad.unique().tolist() == [1.5 if how == "auxiliary" else 3.0], how
        del first, second
