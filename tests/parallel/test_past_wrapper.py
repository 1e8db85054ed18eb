"""The warning for models that are trained past their wrapper, and programs that do what they mean."""

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
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


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def batch(step: int = 0) -> torch.Tensor:
    return torch.full((2, 4), 1.0 + step + syncengine.rank())


def descent(module: nn.Module) -> Optimizer:
    return SGD([p for p in module.parameters() if p.requires_grad], 0.01, momentum=0.9)


def wrapped(module: nn.Module | None = None, **options: Any) -> tuple[Parallel, Optimizer]:
    """A model, of `layers` unless another is given, and its optimizer."""
    model = Parallel(layers() if module is None else module, **options)
    return model, descent(model)


def train(model: Callable, optimizer: Optimizer, steps: int = 3, to_none: bool = True) -> None:
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        model(batch(step)).square().mean().backward()
        optimizer.step()


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """What is warned of in the block, of being trained past a wrapper."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(one.message) for one in caught if TEXT in str(one.message)]


# --- Programs that train through the wrapper. Each gets a model and its optimizer, by `wrapped`.

Program = Callable[[Parallel, Optimizer], Any]


def gan(generator: Parallel, ours: Optimizer) -> None:
    critic, theirs = wrapped()
    for step in range(3):
        fake = generator(batch(step))
        theirs.zero_grad()
        (critic(fake.detach()).mean() + critic(batch(step)).mean()).backward()
        theirs.step()
        ours.zero_grad()
        critic.module(fake).mean().backward()  # past the critic, whose gradients nobody uses
        ours.step()


def evaluation(model: Parallel, optimizer: Optimizer) -> None:
    for _ in range(3):
        train(model, optimizer, steps=1)
        with torch.no_grad():
            model.module.eval()(batch())
        model.train()


def adversarial(model: Parallel, optimizer: Optimizer) -> None:
    for step in range(2):
        attack = batch(step).requires_grad_()
        inputs = SGD([attack], 0.1)
        for _ in range(3):
            inputs.zero_grad()
            (-model.module(attack).square().mean()).backward()
            inputs.step()
        train(lambda _, attack=attack: model(attack.detach()), optimizer, steps=1)


def functional(model: Parallel, optimizer: Optimizer) -> None:
    parameters = dict(model.named_parameters())
    train(lambda x: functional_call(model, parameters, (x,)), optimizer)


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
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def sharpness_aware(model: Parallel, optimizer: Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        with torch.no_grad():
            moves = [0.05 * p.grad.sign() for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()


def pipeline(call: Callable[[Parallel, Parallel, torch.Tensor], torch.Tensor]) -> Program:
    """One optimizer trains two models."""

    def program(first: Parallel, _: Optimizer) -> None:
        second = Parallel(layers())
        train(lambda x: call(first, second, x), descent(nn.ModuleList([first, second])))

    return program


def two_optimizers(model: Parallel, _: Optimizer) -> None:
    halves = [SGD(layer.parameters(), 0.01) for layer in (model.module[0], model.module[2])]
    for step in range(3):
        model(batch(step)).square().mean().backward()
        for optimizer in halves:
            optimizer.step()
            optimizer.zero_grad()


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
        scaler.scale(model(batch(step)).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def part_of_two_models(*_: Any) -> None:
    part = layers()
    first, second = (Parallel(nn.Sequential(part, layers())) for _ in range(2))
    optimizer = descent(nn.ModuleList([first, second]))
    for model in (first, first, second, second, second, first):
        train(model, optimizer, steps=1)


def in_backward(model: Parallel, _: Optimizer) -> None:
    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.01})
    for step in range(3):
        model(batch(step)).square().mean().backward()


def in_micro_batches(model: Parallel, optimizer: Optimizer) -> None:
    loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
    batches = syncengine.micro_batches(model, loader, total=4)
    for _ in range(2):
        for _, x in batches:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ignored_parameters(*_: Any) -> None:
    module = layers()
    module._ddp_params_and_buffers_to_ignore = ["2.weight", "2.bias"]
    Parallel(module)
    train(module, SGD(module[2].parameters(), 0.01))


NAMED = [
    *(gan, evaluation, adversarial, functional, meta_learning, local_steps_by_no_sync, newton, sharpness_aware),
    *(two_optimizers, steps_before_training, the_same_gradients_twice, scaled_and_clipped, part_of_two_models),
    *(in_backward, in_micro_batches, ignored_parameters),
]
MEANT: dict[str, Program] = {program.__name__: program for program in NAMED} | {
    "plain": train,
    "gradients_are_zeroed": lambda model, optimizer: train(model, optimizer, to_none=False),
    "pipeline": pipeline(lambda first, second, x: second(first(x))),
    "wrapped_part": lambda inner, _: train(*wrapped(nn.Sequential(inner, layers()))),
    "adapters": lambda *_: train(*wrapped(nn.Sequential(layers().requires_grad_(False), layers()))),
    "checkpointed": lambda model, optimizer: train(lambda x: checkpoint(model, x, use_reentrant=False), optimizer),
    "unused": lambda *_: train(*wrapped(find_unused_parameters=True)),
    "static": lambda *_: train(*wrapped(static_graph=True)),
    "weighted": lambda model, optimizer: train(lambda x: model.weight(2) or model(x), optimizer),
    "sharded": lambda model, _: train(model, syncengine.ShardedOptimizer(model.parameters(), SGD, lr=0.01)),
    "another_model": lambda *_: train(other := layers(), descent(other)),
}


@pytest.mark.parametrize("name", MEANT)
@run_on_ranks()
def test_what_is_meant_is_not_warned_of(name: str):
    with warned() as found:
        MEANT[name](*wrapped())
    return found


# --- Programs that train past it


def every_second(model: Parallel, optimizer: Optimizer) -> None:
    for _ in range(3):
        train(model, optimizer, steps=1)
        train(model.module, optimizer, steps=1)


def adapters_aside(*_: Any) -> None:
    """The wrapped module holds the adapters alone, whose forward nobody calls."""
    base = nn.Linear(4, 4).requires_grad_(False)
    model, optimizer = wrapped(nn.ParameterDict({"a": torch.ones(2, 4), "b": torch.ones(4, 2)}))
    train(lambda x: base(x) + x @ model.module["a"].T @ model.module["b"].T, optimizer)


def audited(*_: Any) -> None:
    model, optimizer = wrapped(audit=1)
    train(model.module, optimizer)


PAST: dict[str, tuple[Program, int]] = {  # and how many wrappers are warned of
    "all": (lambda model, optimizer: train(model.module, optimizer, steps=6), 1),
    "every second": (every_second, 1),
    "adapters aside": (adapters_aside, 1),
    "one of two": (pipeline(lambda first, second, x: second.module(first(x))), 1),
    "both": (pipeline(lambda first, second, x: second.module(first.module(x))), 2),
    "compiled": (lambda model, optimizer: train(torch.compile(model.module, backend="eager"), optimizer), 1),
    "audited": (audited, 1),
}


@pytest.mark.parametrize("name", PAST)
@run_on_ranks()
def test_training_past_the_wrapper_is_warned_of(name: str):
    program, expected = PAST[name]
    with warned() as found:
        program(*wrapped())
    assert len(found) == expected, found
    assert all("SGD has stepped parameter " in text and "neither model.module(x)" in text for text in found)


@run_on_ranks()
def test_the_rank_that_does_it_is_warned_alone():
    model, optimizer = wrapped()
    with warned() as found:
        if syncengine.rank() == 1:
            train(model.module, optimizer)
    assert len(found) == syncengine.rank()
    assert all("parameter 0.weight of Parallel(Sequential)" in text for text in found)


@run_on_ranks()
def test_a_filter_that_raises_does_not_raise_here():
    model, optimizer = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model.module, optimizer)


@run_on_ranks(world=1)
def test_one_rank_has_nobody_to_average_with():
    model, optimizer = wrapped()
    with warned() as found:
        train(model.module, optimizer, steps=6)
    return found


def test_the_decision():
    gradients = [torch.ones(1) for _ in range(2)]
    steps = [
        Step(forwards, weakref.ref(gradient), version)
        for forwards, gradient, version in itertools.product((3, 4), gradients, (0, 1))
    ]
    for before, now in itertools.product(steps, steps):
        same = before.gradient() is now.gradient() and before.version == now.version
        assert is_past_wrapper(before, now) == (before.forwards == now.forwards and not same)
    assert not is_past_wrapper(None, steps[0])
    of_graphs = Step(float("nan"), steps[0].gradient, 0)
    assert not is_past_wrapper(of_graphs, Step(float("nan"), steps[0].gradient, 1))
