"""The warning for models that are trained past their wrapper, and programs that do what they mean."""

import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_models import backwards, data, small, warned_of
from pool import run_on_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.func import functional_call
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine import Parallel
from syncengine.parallel.past_wrapper import Step, is_past_wrapper

TEXT = "twice without a forward of the Parallel in between"


def descent(module: nn.Module) -> Optimizer:
    return SGD([p for p in module.parameters() if p.requires_grad], 0.01, momentum=0.9)


def wrapped(module: nn.Module | None = None, **options: Any) -> tuple[Parallel, Optimizer]:
    """A model, of `small` unless another is given, and its optimizer."""
    model = Parallel(small() if module is None else module, **options)
    return model, descent(model)


def train(model: Callable, optimizer: Optimizer, steps: int = 3, to_none: bool = True) -> None:
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        model(data(step)).square().mean().backward()
        optimizer.step()


# --- Programs that train through the wrapper. Each gets a model and its optimizer, by `wrapped`.

Program = Callable[[Parallel, Optimizer], Any]


def gan(generator: Parallel, ours: Optimizer) -> None:
    critic, theirs = wrapped()
    for step in range(3):
        fake = generator(data(step))
        theirs.zero_grad()
        (critic(fake.detach()).mean() + critic(data(step)).mean()).backward()
        theirs.step()
        ours.zero_grad()
        critic.module(fake).mean().backward()  # past the critic, whose gradients nobody uses
        ours.step()


def evaluation(model: Parallel, optimizer: Optimizer) -> None:
    for _ in range(3):
        train(model, optimizer, steps=1)
        with torch.no_grad():
            model.module.eval()(data())
        model.train()


def adversarial(model: Parallel, optimizer: Optimizer) -> None:
    for step in range(2):
        attack = data(step).requires_grad_()
        train(lambda _, attack=attack: model.module(attack), SGD([attack], 0.1, maximize=True))
        train(lambda _, attack=attack: model(attack.detach()), optimizer, steps=1)


def meta_learning(model: Parallel, optimizer: Optimizer) -> None:
    """Inner steps on copies of the weights, past the wrapper."""
    for _ in range(2):
        fast = {name: p.detach().clone().requires_grad_() for name, p in model.module.named_parameters()}
        train(lambda x, fast=fast: functional_call(model.module, fast, (x,)), SGD(fast.values(), 0.1))
        train(model, optimizer, steps=1)


def local_steps_by_no_sync(model: Parallel, optimizer: Optimizer) -> None:
    with model.no_sync():
        train(model, optimizer)


def newton(model: Parallel, _: Optimizer) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for _ in range(3):
        optimizer.step(lambda: backwards(model, 1)[0])


def sharpness_aware(model: Parallel, optimizer: Optimizer) -> None:
    for _ in range(3):
        backwards(model, 1)
        with torch.no_grad():
            moves = [0.05 * p.grad.sign() for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        backwards(model, 1)
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()


def pipeline(first: Parallel, call: Callable[[Parallel, torch.Tensor], torch.Tensor]) -> None:
    """One optimizer trains two models."""
    second = Parallel(small())
    train(lambda x: call(second, x), descent(nn.ModuleList([first, second])))


def two_optimizers(model: Parallel, _: Optimizer) -> None:
    halves = [SGD(layer.parameters(), 0.01) for layer in (model.module[0], model.module[2])]
    for _ in range(3):
        backwards(model, 1)
        for optimizer in halves:
            optimizer.step()


def steps_before_training(model: Parallel, optimizer: Optimizer) -> None:
    for _ in range(3):
        optimizer.step()
    train(model, optimizer)


def the_same_gradients_twice(model: Parallel, optimizer: Optimizer) -> None:
    train(model, optimizer, steps=1)
    optimizer.step()
    optimizer.step()


def scaled_and_clipped(model: Parallel, optimizer: Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(data(step)).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def part_of_two_models(*_: Any) -> None:
    part = small()
    first, second = (Parallel(nn.Sequential(part, small())) for _ in range(2))
    optimizer = descent(nn.ModuleList([first, second]))
    for model in (first, first, second, second, second, first):
        train(model, optimizer, steps=1)


def in_backward(model: Parallel, _: Optimizer) -> None:
    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.01})
    backwards(model)


def in_micro_batches(model: Parallel, optimizer: Optimizer) -> None:
    batches = syncengine.micro_batches(model, torch.utils.data.DataLoader(torch.ones(16, 24), batch_size=2), total=4)
    for _ in range(2):
        for _, x in batches:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ignored_parameters(*_: Any) -> None:
    module = small()
    module._ddp_params_and_buffers_to_ignore = ["2.weight", "2.bias"]
    Parallel(module)
    train(module, SGD(module[2].parameters(), 0.01))


NAMED = [
    *(gan, evaluation, adversarial, meta_learning, local_steps_by_no_sync, newton, sharpness_aware),
    *(two_optimizers, steps_before_training, the_same_gradients_twice, scaled_and_clipped, part_of_two_models),
    *(in_backward, in_micro_batches, ignored_parameters),
]
MEANT: dict[str, Program] = {program.__name__: program for program in NAMED} | {
    "plain": train,
    "gradients_are_zeroed": lambda model, optimizer: train(model, optimizer, to_none=False),
    "functional": lambda model, optimizer: train(
        lambda x: functional_call(model, dict(model.named_parameters()), (x,)), optimizer
    ),
    "pipeline": lambda first, _: pipeline(first, lambda second, x: second(first(x))),
    "wrapped_part": lambda inner, _: train(*wrapped(nn.Sequential(inner, small()))),
    "adapters": lambda *_: train(*wrapped(nn.Sequential(small().requires_grad_(False), small()))),
    "checkpointed": lambda model, optimizer: train(lambda x: checkpoint(model, x, use_reentrant=False), optimizer),
    "unused": lambda *_: train(*wrapped(find_unused_parameters=True)),
    "static": lambda *_: train(*wrapped(static_graph=True)),
    "weighted": lambda model, optimizer: train(lambda x: model.weight(2) or model(x), optimizer),
    "sharded": lambda model, _: train(model, syncengine.ShardedOptimizer(model.parameters(), SGD, lr=0.01)),
    "another_model": lambda *_: train(other := small(), descent(other)),
    "one_rank": lambda model, optimizer: train(model.module, optimizer, steps=6),  # has nobody to average with
}


@pytest.mark.parametrize(("name", "world"), [(name, 1 if name == "one_rank" else 2) for name in MEANT])
@run_on_ranks()
def test_what_is_meant_is_not_warned_of(name: str, world: int):
    return warned_of(TEXT, lambda: MEANT[name](*wrapped()))


# --- Programs that train past it


def by_module(model: Parallel, optimizer: Optimizer) -> None:
    train(model.module, optimizer, steps=6)


def every_second(model: Parallel, optimizer: Optimizer) -> None:
    for _ in range(3):
        train(model, optimizer, steps=1)
        train(model.module, optimizer, steps=1)


def adapters_aside(*_: Any) -> None:
    """The wrapped module holds the adapters alone, whose forward nobody calls."""
    base = nn.Linear(24, 24).requires_grad_(False)
    model, optimizer = wrapped(nn.ParameterDict({"a": torch.ones(2, 24), "b": torch.ones(24, 2)}))
    train(lambda x: base(x) + x @ model.module["a"].T @ model.module["b"].T, optimizer)


PAST: dict[str, tuple[Program, int]] = {  # and how many wrappers are warned of
    "all": (by_module, 1),
    "every second": (every_second, 1),
    "adapters aside": (adapters_aside, 1),
    "one of two": (lambda first, _: pipeline(first, lambda second, x: second.module(first(x))), 1),
    "both": (lambda first, _: pipeline(first, lambda second, x: second.module(first.module(x))), 2),
    "compiled": (lambda model, optimizer: train(torch.compile(model.module, backend="eager"), optimizer), 1),
    "audited": (lambda *_: by_module(*wrapped(audit=1)), 1),
}


@pytest.mark.parametrize("name", PAST)
@run_on_ranks()
def test_training_past_the_wrapper_is_warned_of(name: str):
    program, expected = PAST[name]
    found = warned_of(TEXT, lambda: program(*wrapped()))
    assert len(found) == expected, found
    assert all("SGD has stepped parameter " in text and "neither model.module(x)" in text for text in found)


@run_on_ranks()
def test_the_rank_that_does_it_is_warned_alone():
    model, optimizer = wrapped()
    found = warned_of(TEXT, lambda: train(model.module, optimizer, steps=3 * syncengine.rank()))
    assert len(found) == syncengine.rank()
    assert all("parameter 0.weight of Parallel(Sequential)" in text for text in found)


@run_on_ranks()
def test_a_filter_that_raises_does_not_raise_here():
    model, optimizer = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model.module, optimizer)


def test_the_decision():
    gradients = [torch.ones(1) for _ in range(2)]
    steps = [Step(*facts) for facts in itertools.product((3, 4), map(weakref.ref, gradients), (0, 1))]
    for before, now in itertools.product(steps, steps):
        same = before.gradient() is now.gradient() and before.version == now.version
        assert is_past_wrapper(before, now) == (before.forwards == now.forwards and not same)
    assert not is_past_wrapper(None, steps[0])
    of_graphs = [Step(float("nan"), steps[0].gradient, version) for version in (0, 1)]
    assert not is_past_wrapper(*of_graphs)
