"""Optimizers and hooks that run in backward: when they step, and on which gradients, beside DDP."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import flat_at_night
from parallel_models import Branches, Mlp, averages, data, different_bits
from pool import run_on_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim.sgd import SGD

import syncengine
from syncengine.errors import InvalidUsage

RATE = 0.1


def steps_by_hook(module: nn.Module, model: nn.Module) -> None:
    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-RATE)
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def steps_fused(module: nn.Module, model: nn.Module) -> None:
    model._register_fused_optim(SGD, RATE)


def steps_applied(module: nn.Module, model: nn.Module) -> None:
    _apply_optimizer_in_backward(SGD, module.parameters(), {"lr": RATE})


def train_as_ddp(
    *arrangements: Callable[..., None], branch: Callable[[int], bool], accumulates: bool = False, **options: Any
) -> None:
    """After some steps the weights are those that DDP and an ordinary optimizer make."""

    def trained(arrange: Callable[..., None] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Branches()
        model = (syncengine.Parallel if arrange else DistributedDataParallel)(module, **options)
        optimizer = SGD(module.parameters(), RATE)
        if arrange:
            arrange(module, model)
        for i in range(3):
            if accumulates:
                with model.no_sync():
                    model(data(10 + i), branch(i)).square().mean().backward()  # no step
            model(data(i), branch(i)).square().mean().backward()
            if not arrange:
                optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in module.parameters()]

    expected = trained(None)
    for arrange in arrangements:
        assert not different_bits(trained(arrange), expected), arrange.__name__


@run_on_ranks(gloo=True)
def test_optimizers_in_backward_step_parameters_that_only_others_have_used():
    arrangements = (steps_by_hook, steps_fused, steps_applied)
    train_as_ddp(*arrangements, branch=lambda i: syncengine.rank() == i % 2, find_unused_parameters=True)
    train_as_ddp(*arrangements, branch=lambda i: syncengine.rank() == 0, static_graph=True)


@pytest.mark.usefixtures("kinds_of_buckets")
@run_on_ranks(gloo=True)
def test_optimizers_in_backward_make_no_step_under_no_sync():
    train_as_ddp(steps_fused, steps_applied, branch=lambda i: True, accumulates=True, find_unused_parameters=True)


@run_on_ranks()
def test_hooks_of_parameters_that_nobody_has_used_do_not_run():
    module = Branches()
    model = syncengine.Parallel(module, find_unused_parameters=True)
    names = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: names.append(name))
    model(data(), False).sum().backward()
    assert sorted(names) == sorted(n for n, p in module.named_parameters() if p.grad is not None)
    assert len(names) < len(list(module.parameters()))


@pytest.mark.parametrize("last", ["second", "first"])
@run_on_ranks()
def test_hooks_wait_for_the_wrapper_that_averages(last: str):
    module = nn.Linear(2, 1, bias=False)
    first = syncengine.Parallel(module)
    seen: list = []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    x = torch.full((1, 2), float(syncengine.rank()))
    first(x).sum().backward()
    second = syncengine.Parallel(module)
    module.zero_grad()
    (second if last == "second" else first)(x).sum().backward()
    assert seen == [[[0.5, 0.5]]] * 2
    dropped = first(x)
    module.zero_grad()
    second(x).sum().backward()  # which is none of the first's, though that has a forward open
    assert seen == [[[0.5, 0.5]]] * 3
    assert module.weight.grad.tolist() == [[0.5, 0.5]]
    del dropped, second
    module.zero_grad()
    first(x).sum().backward()
    assert seen == [[[0.5, 0.5]]] * 4


@run_on_ranks(gloo=True)
def test_each_of_two_wrappers_takes_the_optimizers_that_are_applied_later():
    for part in (lambda module: module, lambda module: module[0]):
        module = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
        wrappers = [syncengine.Parallel(module), syncengine.Parallel(part(module))]
        for model in wrappers:
            with torch.no_grad():
                model(data())
        _apply_optimizer_in_backward(SGD, module.parameters(), {"lr": RATE})
        for i, model in enumerate(wrappers * 2):
            parameters = list(model.parameters())
            slopes = averages(model.module, model.module(data(i)).square().mean())
            expected = [p.detach() - RATE * slope for p, slope in zip(parameters, slopes, strict=True)]
            model(data(i)).square().mean().backward()
            torch.testing.assert_close([p.detach() for p in parameters], expected)
            assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("evaluates", [False, True])
@run_on_ranks(gloo=True)
def test_optimizers_applied_after_forwards_have_run(evaluates: bool):
    def applied_later(module: nn.Module, model: nn.Module) -> None:
        with torch.no_grad() if evaluates else model.no_sync():
            model(data(), True)
        steps_applied(module, model)

    train_as_ddp(applied_later, branch=lambda i: True, find_unused_parameters=True)


@run_on_ranks()
def test_a_hook_or_an_optimizer_that_comes_between_forward_and_backward_is_an_error():
    def listens(module: nn.Module, model: nn.Module) -> None:
        module.weight.register_post_accumulate_grad_hook(lambda parameter: None)

    for arrange in (listens, steps_applied):
        module = nn.Linear(24, 2)
        model = syncengine.Parallel(module)
        before = [p.detach().clone() for p in module.parameters()]
        out = model(data())
        arrange(module, model)
        with pytest.raises(InvalidUsage, match=r"parameter (weight|bias) of Parallel\(Linear\).*before the forward"):
            out.sum().backward()
        syncengine.barrier()
        assert all(map(torch.equal, module.parameters(), before))


def with_hooks(arrange: Callable[..., Any], hooks: Callable[..., None] | None) -> tuple[list, list, Callable]:
    """Parameters, how often a hook on each has run, and the forward."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    forward, parameters, counts = arrange(module), list(module.parameters()), [0] * 4
    if hooks:
        for i, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: counts.__setitem__(i, counts[i] + 1))
        hooks(module, None)
    return parameters, counts, forward


@run_on_ranks(gloo=True)
def test_hooks_run_once_where_one_of_two_wrappers_averages():
    """The weights are those that an optimizer behind the backward makes."""

    def one_of_two_is_local(module: nn.Sequential) -> Callable[[], torch.Tensor]:
        whole, part = syncengine.Parallel(module), syncengine.Parallel(module[0])

        def forward() -> torch.Tensor:
            outputs = whole(data())
            with part.no_sync():
                part(data())
            return outputs

        return forward

    def trained(hooks: Callable[..., None] | None) -> list[torch.Tensor]:
        parameters, counts, forward = with_hooks(one_of_two_is_local, hooks)
        optimizer = SGD(parameters, RATE)
        for step in range(1, 4):
            forward().square().mean().backward()
            assert counts == [step if hooks else 0] * len(parameters), counts
            if not hooks:
                optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in parameters]

    for hooks in (steps_by_hook, steps_applied):
        assert not different_bits(trained(hooks), trained(None)), hooks.__name__


@run_on_ranks(gloo=True)
def test_hooks_of_a_parameter_that_two_wrappers_average_are_refused():
    def part_of_a_whole(module: nn.Sequential) -> Callable[[], torch.Tensor]:
        whole = syncengine.Parallel(nn.Sequential(syncengine.Parallel(module[0]), module[1]))
        return lambda: whole(data())

    def sum_over_two(module: nn.Sequential) -> Callable[[], torch.Tensor]:
        one, other = syncengine.Parallel(module), syncengine.Parallel(nn.Sequential(nn.Linear(24, 24), module[0]))
        return lambda: one(data()) + other(data())

    def part_that_is_not_used(module: nn.Sequential) -> Callable[[], torch.Tensor]:
        whole = syncengine.Parallel(module)
        other = syncengine.Parallel(nn.ModuleList([module[0], nn.Linear(24, 24)]), find_unused_parameters=True)
        other.module.forward = lambda x: other.module[1](x)
        return lambda: whole(data()) + other(data())

    for arrange in (part_of_a_whole, sum_over_two, part_that_is_not_used):
        for hooks in (steps_by_hook, steps_applied):
            _, counts, forward = with_hooks(arrange, hooks)
            for _ in range(2):
                loss = forward().square().mean()
                with pytest.raises(InvalidUsage, match="has a hook.*belongs to two wrappers.*put both parts into one"):
                    loss.backward()
            assert not any(counts)
            syncengine.barrier()  # it costs a step


@run_on_ranks(world=1)
def test_on_one_rank_too_the_forward_decides_whether_its_backward_steps():
    module = nn.Linear(2, 1, bias=False)
    model = syncengine.Parallel(module)
    model._register_fused_optim(SGD, RATE)
    start = module.weight.detach().clone()
    with model.no_sync():
        loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    assert torch.equal(module.weight, start)
    loss = model(torch.ones(1, 2)).sum()
    with model.no_sync():
        loss.backward()
    assert torch.equal(module.weight, start - 2 * RATE)
    with model.no_sync():
        loss = model(torch.ones(1, 2)).sum()
    model.reducer.prepare_for_backward([])  # as accelerate's trigger_sync_in_backward
    loss.backward()
    torch.testing.assert_close(module.weight.detach(), start - (2 + 3) * RATE)  # gradients have accumulated


@pytest.mark.usefixtures("kinds_of_buckets")
@flat_at_night
@run_on_ranks()
def test_a_fused_optimizer_without_torch_distributed():
    for optimizer in (torch.optim.SGD, torch.optim.NAdam):  # of the second torch has no functional form
        torch.manual_seed(0)
        model, plain_model = syncengine.Parallel(Mlp()), syncengine.Parallel(Mlp())
        plain_model.load_state_dict(model.state_dict())
        model._register_fused_optim(optimizer, 0.01, optim_params=list(model.module.head.parameters()))
        reference = optimizer(plain_model.module.head.parameters(), 0.01)
        for i in range(3):
            with model.no_sync():
                model(data(i)).square().mean().backward()  # no step
            for m in (model, plain_model):
                m.zero_grad()
                m(data(i)).square().mean().backward()
            reference.step()
        torch.testing.assert_close(list(model.parameters()), list(plain_model.parameters()))
