"""Steps that plain torch can make, in every bit and in what stays as it was: live graphs, scalers, None, compiling."""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import mostly_nightly
from pool import RankPool, run_on_ranks
from sharded_training import (
    backward,
    batch,
    differences,
    different_weights,
    error_of,
    make,
    make_odd,
    not_divided,
    plain,
    sharded,
    train,
    trained,
    unlike_plain,
)
from torch import nn

import syncengine


class Seldom(torch.optim.SGD):
    """Writes in every second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        if group["count"] % 2:
            super().step()


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        return 1.0

    assert optimizer.step(closure) == 1.0


def with_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model, 5)
    optimizer.step()


@pytest.mark.parametrize(
    ("idles", "kind", "options"),
    [
        (nothing, torch.optim.AdamW, {}),
        (nothing, torch.optim.AdamW, {"fused": True}),
        (a_closure, torch.optim.AdamW, {}),
        (with_gradients, Seldom, {"elements": True}),
    ],
)
@run_on_ranks(world=3)
def test_a_step_that_writes_nothing_leaves_graphs_alive(
    idles: Callable[..., None], kind: type, options: dict[str, Any]
):
    nets = [make(), make()]
    for net, make_one in zip(nets, (sharded, plain), strict=True):
        model, optimizer = make_one(net, kind, **options)
        train(model, optimizer, 1)
        optimizer.zero_grad()
        with model.no_sync():
            loss = model(batch(1)).square().mean()
        idles(model, optimizer)
        loss.backward()
        optimizer.zero_grad()
        train(model, optimizer, 2)
    return different_weights(*nets)


@run_on_ranks()
def test_the_graph_of_a_model_without_gradients_stays_alive():
    first, second = make(), make("odd")
    models = [syncengine.Parallel(first), syncengine.Parallel(second)]
    optimizer = syncengine.ShardedOptimizer([*first.parameters(), *second.parameters()], torch.optim.AdamW)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        if step == 2:
            losses.append(models[1](batch(step)).square().mean())
        for model in models[: 2 if step < 2 else 1]:
            backward(model, step)
        optimizer.step()
    return error_of(losses[0].backward) + error_of(optimizer.step)


class Fickle(torch.optim.SGD):
    """Keeps None, then a tensor, a number, another shape and None again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                step = state["step"] = state.get("step", -1) + 1
                state["kept"] = [None, p.grad.clone(), 3, p.grad.double(), p.grad.double(), None][step % 6]
                p.sub_(p.grad, alpha=0.01)


@pytest.mark.parametrize("elements", [True, False])
@run_on_ranks(world=3)
def test_state_may_become_of_another_kind(elements: bool):
    wrong, nets = [], [make_odd(), make_odd()]
    (model, optimizer), (reference, one) = sharded(nets[0], Fickle, elements=elements), plain(nets[1], Fickle)
    for step in range(8):
        train(model, optimizer, range(step, step + 1))
        train(reference, one, range(step, step + 1))
        wrong += differences(one.state_dict(), optimizer.state_dict())
    return wrong + different_weights(*nets) + not_divided(nets[0], optimizer)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@run_on_ranks(world=3)
def test_a_momentum_buffer_of_none_is_loaded(early: bool, fused: bool):
    options = {"momentum": 0.9, "fused": fused}
    nets, states = [make_odd(), make_odd()], []
    for net, make_one in zip(nets, (sharded, plain), strict=True):
        model, optimizer = make_one(net, torch.optim.SGD, **options)
        train(model, optimizer, 2)
        state = copy.deepcopy(optimizer.state_dict())
        for entries in state["state"].values() or [{}]:
            entries["momentum_buffer"] = None
        if early:
            model, optimizer = make_one(net, torch.optim.SGD, **options)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(2, 5))
        states.append(optimizer.state_dict())
    return different_weights(*nets) + differences(states[1], states[0])


def turn(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], number: int) -> None:
    optimizer.zero_grad()
    backward(model, number)
    step()


def call(step: Callable[[], Any]) -> None:
    step()


@pytest.mark.thorough
@pytest.mark.parametrize("form", mostly_nightly(["step", "within", "turn"], 0))
@run_on_ranks()
def test_a_compiled_step_is_an_ordinary_one(form: str):
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step, take_turn = optimizer.step, turn
        if isinstance(optimizer, syncengine.ShardedOptimizer):
            if form == "turn":
                take_turn = torch.compile(turn, backend="eager")
            else:
                step = torch.compile(step if form == "step" else partial(call, step), backend="eager")
        for number in range(3):
            take_turn(model, optimizer, step, number)

    return unlike_plain(steps, make_odd)


def calls_of_a_step(layers: int, fused: bool) -> tuple[int, int]:
    """How many Python functions of the package a step like most calls: itself, and by hooks on torch's optimizers."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(24, 24) for _ in range(layers)))
    _, model, optimizer = trained(3, net, fused=fused)
    backward(model, 3)
    package, calls = Path(syncengine.__file__).parent, []
    hooks: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and package in path.parents:
            # In a process in which another test has run micro_batches(), open_step.py has hooks, too.
            of_hooks = path.name in ("past_wrapper.py", "open_step.py")
            (hooks if of_hooks else calls).append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert "_confirm" in calls
    assert "_after_step" in hooks
    return len(calls), len(hooks) - hooks.count("_check_no_step")


@pytest.mark.parametrize("fused", mostly_nightly([False, True], 0))
def test_a_step_makes_few_python_calls(pool: RankPool, fused: bool):
    """Whatever the number of parameters is."""
    few, many = (pool.run(calls_of_a_step, layers, fused) for layers in (2, 40))
    assert few == many
    assert all(calls <= 41 and hooks <= 4 for calls, hooks in few), few  # one of the 41 calls is on a hook's way
