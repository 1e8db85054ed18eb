"""The warning for models that are trained past their wrapper, and programs that do what they mean."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from pool import run_on_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.parallel.past_wrapper import Step, is_past_wrapper

TEXT = "twice without a forward of the Parallel in between"


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def batch(step: int = 0) -> torch.Tensor:
    return torch.full((2, 4), 1.0 + step + syncengine.rank())


def descent(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.01, momentum=0.9)


def train(model: Callable, optimizer: torch.optim.Optimizer, steps: int = 3, to_none: bool = True) -> None:
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


# --- Programs that train through the wrapper


def plain() -> None:
    train(model := syncengine.Parallel(layers()), descent(model))


def gradients_are_zeroed() -> None:
    train(model := syncengine.Parallel(layers()), descent(model), to_none=False)


def gan() -> None:
    generator, critic = syncengine.Parallel(layers()), syncengine.Parallel(layers())
    ours, theirs = descent(generator), descent(critic)
    for step in range(3):
        fake = generator(batch(step))
        theirs.zero_grad()
        (critic(fake.detach()).mean() + critic(batch(step)).mean()).backward()
        theirs.step()
        ours.zero_grad()
        critic.module(fake).mean().backward()  # past the critic, whose gradients nobody uses
        ours.step()


def gan_with_many_steps_of_the_critic() -> None:
    generator, critic = syncengine.Parallel(layers()), syncengine.Parallel(layers())
    ours, theirs = descent(generator), descent(critic)
    for _ in range(2):
        train(lambda x: critic(generator(x).detach()), theirs)
        train(lambda x: critic(generator(x)), ours, steps=1)


def gan_in_one_wrapper() -> None:
    model = syncengine.Parallel(nn.ModuleDict({"g": layers(), "d": layers()}))
    model.module.forward = lambda x: model.module["d"](model.module["g"](x))
    for optimizer in (descent(model.module["g"]), descent(model.module["d"])) * 2:
        train(model, optimizer, steps=2)


def evaluation() -> None:
    model = syncengine.Parallel(layers())
    optimizer = descent(model)
    for _ in range(3):
        train(model, optimizer, steps=1)
        with torch.no_grad():
            model.module.eval()(batch())
        model.train()


def adversarial() -> None:
    model = syncengine.Parallel(layers())
    optimizer = descent(model)
    for step in range(2):
        attack = batch(step).requires_grad_()
        inputs = torch.optim.SGD([attack], 0.1)
        for _ in range(3):
            inputs.zero_grad()
            (-model.module(attack).square().mean()).backward()
            inputs.step()
        optimizer.zero_grad()
        model(attack.detach()).square().mean().backward()
        optimizer.step()


def averaged_model() -> None:
    model = syncengine.Parallel(layers())
    average, optimizer = AveragedModel(model.module), descent(model)
    for _ in range(3):
        train(model, optimizer, steps=1)
        average.update_parameters(model.module)
        average(batch())


def gradient_penalty() -> None:
    model = syncengine.Parallel(layers())

    def loss(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().sum()

    train(loss, descent(model))


def functional() -> None:
    model = syncengine.Parallel(layers())
    parameters = dict(model.named_parameters())
    train(lambda x: functional_call(model, parameters, (x,)), descent(model))


def meta_learning() -> None:
    """Inner steps on copies of the weights, past the wrapper."""
    model = syncengine.Parallel(layers())
    optimizer = descent(model)
    for _ in range(2):
        fast = {name: p.detach().clone().requires_grad_() for name, p in model.module.named_parameters()}
        inner = torch.optim.SGD(fast.values(), 0.1)
        train(lambda x, fast=fast: functional_call(model.module, fast, (x,)), inner)
        train(model, optimizer, steps=1)


def accumulated() -> None:
    model = syncengine.Parallel(layers())
    optimizer = descent(model)
    for step in range(3):
        with model.no_sync():
            model(batch(step)).square().mean().backward()
        train(model, optimizer, steps=1)


def local_steps_by_no_sync() -> None:
    model = syncengine.Parallel(layers())
    with model.no_sync():
        train(model, descent(model))


def newton() -> None:
    model = syncengine.Parallel(layers())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def sharpness_aware() -> None:
    model = syncengine.Parallel(layers())
    optimizer = descent(model)
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


def pipeline() -> None:
    first, second = syncengine.Parallel(layers()), syncengine.Parallel(layers())
    train(lambda x: second(first(x)), descent(nn.ModuleList([first, second])))


def two_optimizers() -> None:
    model = syncengine.Parallel(layers())
    halves = [torch.optim.SGD(layer.parameters(), 0.01) for layer in (model.module[0], model.module[2])]
    for step in range(3):
        model(batch(step)).square().mean().backward()
        for optimizer in halves:
            optimizer.step()
            optimizer.zero_grad()


def steps_before_training() -> None:
    optimizer = descent(model := syncengine.Parallel(layers()))
    for _ in range(3):
        optimizer.step()
    train(model, optimizer)


def the_same_gradients_twice() -> None:
    optimizer = descent(model := syncengine.Parallel(layers()))
    train(model, optimizer, steps=1)
    optimizer.step()
    optimizer.step()


def scaled_and_clipped() -> None:
    optimizer, scaler = descent(model := syncengine.Parallel(layers())), torch.amp.GradScaler("cpu")
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def part_of_two_models() -> None:
    part = layers()
    first, second = (syncengine.Parallel(nn.Sequential(part, layers())) for _ in range(2))
    optimizer = descent(nn.ModuleList([first, second]))
    for model in (first, first, second, second, second, first):
        train(model, optimizer, steps=1)


def wrapped_part() -> None:
    inner = syncengine.Parallel(layers())
    outer = syncengine.Parallel(nn.Sequential(inner, layers()))
    train(outer, descent(outer))


def adapters() -> None:
    module = nn.Sequential(layers().requires_grad_(False), layers())
    train(model := syncengine.Parallel(module), descent(model))


def distilled() -> None:
    teacher, student = layers().requires_grad_(False), syncengine.Parallel(layers())
    train(lambda x: student(x) - teacher(x), descent(student))


def in_backward() -> None:
    model = syncengine.Parallel(layers())
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.01})
    for step in range(3):
        model(batch(step)).square().mean().backward()


def checkpointed() -> None:
    model = syncengine.Parallel(layers())
    train(lambda x: checkpoint(model, x, use_reentrant=False), descent(model))


def in_micro_batches() -> None:
    optimizer = descent(model := syncengine.Parallel(layers()))
    loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
    batches = syncengine.micro_batches(model, loader, total=4)
    for _ in range(2):
        for _, x in batches:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def uneven() -> None:
    model = syncengine.Parallel(layers())
    with model.join():
        train(model, descent(model), steps=2 + syncengine.rank())


def unused() -> None:
    train(model := syncengine.Parallel(layers(), find_unused_parameters=True), descent(model))


def static() -> None:
    train(model := syncengine.Parallel(layers(), static_graph=True), descent(model))


def weighted() -> None:
    model = syncengine.Parallel(layers())
    train(lambda x: model.weight(2) or model(x), descent(model))


def sharded() -> None:
    model = syncengine.Parallel(layers())
    train(model, syncengine.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.01))


def another_model() -> None:
    syncengine.Parallel(layers())
    train(other := layers(), descent(other))


def ignored_parameters() -> None:
    module = layers()
    module._ddp_params_and_buffers_to_ignore = ["2.weight", "2.bias"]
    syncengine.Parallel(module)
    train(module, torch.optim.SGD(module[2].parameters(), 0.01))


MEANT = [
    *(plain, gradients_are_zeroed, gan, gan_with_many_steps_of_the_critic, gan_in_one_wrapper, evaluation, adversarial),
    *(averaged_model, gradient_penalty, functional, meta_learning, accumulated, local_steps_by_no_sync, newton),
    *(sharpness_aware, pipeline, two_optimizers, steps_before_training, the_same_gradients_twice, scaled_and_clipped),
    *(part_of_two_models, wrapped_part, adapters, distilled, in_backward, checkpointed, in_micro_batches, uneven),
    *(unused, static, weighted, sharded, another_model, ignored_parameters),
]


@pytest.mark.parametrize("program", MEANT)
@run_on_ranks()
def test_what_is_meant_is_not_warned_of(program: Callable[[], None]):
    with warned() as found:
        program()
    return found


# --- Programs that train past it


def all_past() -> int:
    model = syncengine.Parallel(layers())
    train(model.module, descent(model), steps=6)
    return 1


def every_second() -> int:
    optimizer = descent(model := syncengine.Parallel(layers()))
    for _ in range(3):
        train(model, optimizer, steps=1)
        train(model.module, optimizer, steps=1)
    return 1


def adapters_aside() -> int:
    """The wrapped module holds the adapters alone, whose forward nobody calls."""
    base = nn.Linear(4, 4).requires_grad_(False)
    model = syncengine.Parallel(nn.ParameterDict({"a": torch.ones(2, 4), "b": torch.ones(4, 2)}))
    train(lambda x: base(x) + x @ model.module["a"].T @ model.module["b"].T, descent(model))
    return 1


def one_of_two() -> int:
    first, second = syncengine.Parallel(layers()), syncengine.Parallel(layers())
    train(lambda x: second.module(first(x)), descent(nn.ModuleList([first, second])))
    return 1


def both() -> int:
    first, second = syncengine.Parallel(layers()), syncengine.Parallel(layers())
    train(lambda x: second.module(first.module(x)), descent(nn.ModuleList([first, second])))
    return 2


def compiled_past() -> int:
    model = syncengine.Parallel(layers())
    train(torch.compile(model.module, backend="eager"), descent(model))
    return 1


def audited() -> int:
    model = syncengine.Parallel(layers(), audit=1)
    train(model.module, descent(model))
    return 1


@pytest.mark.parametrize("program", [all_past, every_second, adapters_aside, one_of_two, both, compiled_past, audited])
@run_on_ranks()
def test_training_past_the_wrapper_is_warned_of(program: Callable[[], int]):
    with warned() as found:
        expected = program()
    assert len(found) == expected, found
    assert all("SGD has stepped parameter " in text and "neither model.module(x)" in text for text in found)


@run_on_ranks()
def test_the_rank_that_does_it_is_warned_alone():
    model = syncengine.Parallel(layers())
    with warned() as found:
        if syncengine.rank() == 1:
            train(model.module, descent(model))
    assert len(found) == syncengine.rank()
    assert all("parameter 0.weight of Parallel(Sequential)" in text for text in found)


@run_on_ranks()
def test_a_filter_that_raises_does_not_raise_here():
    model = syncengine.Parallel(layers())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model.module, descent(model))


@run_on_ranks(world=1)
def test_one_rank_has_nobody_to_average_with():
    with warned() as found:
        all_past()
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
