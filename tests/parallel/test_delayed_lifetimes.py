"""Delayed parameters keep nothing longer than it lives: memory, a forward's weights, whether its backward averages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from delayed_models import TwoParts, both_ways, delaying
from parallel_models import data, different_bits, gradients, outcome
from pool import RankPool, run_on_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import InvalidUsage

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")


def there_and_back(module: nn.Module) -> None:
    module.bfloat16()
    with torch.no_grad():
        module(data().bfloat16())
    module.float()


def for_good(module: nn.Module) -> None:
    module.double()


def clipped(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)


def transposed(module: nn.Module) -> None:
    gradient = module.table.weight.grad
    gradient.data = gradient.data.t().contiguous().t()


@pytest.mark.parametrize("change", [there_and_back, for_good, clipped, transposed])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_whose_memory_is_swapped(pool: RankPool, change: Callable[..., None], set_to_none: bool):
    """The same tensor lies elsewhere from then on. Under DDP it stays this rank's own."""
    pool.run(both_ways, partial(with_change, change=change, set_to_none=set_to_none))


def with_change(model: nn.Module, change: Callable[[nn.Module], None], set_to_none: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(data(i).to(model.module.first.dtype)).square().mean().backward()
        optimizer.step()
        if i < 2:
            change(model.module)


class Cast(TwoParts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.linear(x * self.first, self.table.weight, self.table.bias.float()))


def with_two_dtypes() -> None:
    module = Cast()
    model = syncengine.Parallel(module, **delaying(module))
    module.table.bias.data = module.table.bias.data.double()
    model(data()).square().mean().backward()


def raised_first(pool: RankPool, function: Callable[..., None], *arguments: Any) -> str:
    """By a rank that was not told to by the other."""
    outcomes = pool.run(outcome, partial(function, *arguments))
    assert {kind for kind, _ in outcomes} <= {"InvalidUsage", "Aborted"}
    return next(text for kind, text in outcomes if kind == "InvalidUsage")


def test_dtypes_that_differ_later_are_named(pool: RankPool):
    text = raised_first(pool, with_two_dtypes)
    assert "must be of one dtype: table.weight is torch.float32, table.bias is torch.float64" in text


def validated(model: nn.Module) -> None:
    """A metric, a teacher's output."""
    with torch.no_grad(), model.no_sync():
        model(data(7))


def with_validation(model: nn.Module) -> None:
    for i in range(3):
        model.zero_grad()
        output = model(data(i))
        validated(model)
        output.square().mean().backward()


def with_weights(model: nn.Module) -> None:
    for i in range(2):
        model.zero_grad()
        model.weight(3 if syncengine.rank() == 0 else 1)
        output = model(data(i))
        with torch.no_grad():
            model(data(7))
        output.square().mean().backward()


def of_two_forwards(model: nn.Module) -> None:
    model.weight(3 if syncengine.rank() == 0 else 1)
    (model(data(1)) + model(data(2))).square().mean().backward()


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """For its gradient: the tensor hooks of parameters run in autograd.grad, too."""
    output = model(x)
    slopes = torch.autograd.grad(output.sum(), list(model.parameters()), create_graph=True)
    return output.square().mean() + sum(slope.square().mean() for slope in slopes)


def with_penalty(model: nn.Module) -> None:
    model.weight(3 if syncengine.rank() == 0 else 1)
    penalized(model, data()).backward()


def with_fewer_batches(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for i in range(1 + syncengine.rank()):
            optimizer.zero_grad()
            penalized(model, data(i)).backward()
            optimizer.step()
    model.zero_grad()
    model(data()).square().mean().backward()


def with_inputs(model: nn.Module) -> None:
    """A backward all the same, unlike torch.autograd.grad."""
    model.weight(3 if syncengine.rank() == 0 else 1)
    model(data()).square().mean().backward(inputs=list(model.parameters()))


def in_the_bare_module(model: nn.Module) -> None:
    """Its backward is none of the wrapper's."""
    model(data()).square().mean().backward()
    model.zero_grad()
    model.module(data(1)).square().mean().backward()
    with model.no_sync():
        model(data(2)).square().mean().backward()


WAYS = [
    with_validation,
    with_weights,
    of_two_forwards,
    with_penalty,
    with_fewer_batches,
    with_inputs,
    in_the_bare_module,
]


@pytest.mark.parametrize("way", WAYS)
def test_what_a_backward_does_its_own_forward_says(pool: RankPool, way: Callable[[nn.Module], None]):
    pool.run(both_ways, way, world=3)


@run_on_ranks(gloo=True)
def test_other_forwards_are_as_under_ddp():
    results = []
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        torch.manual_seed(0)
        module = TwoParts()
        model = wrap(module, **delaying(module))
        for i in range(3):
            model.zero_grad()
            output = model(data(i))
            validated(model)
            output.square().mean().backward()
            dist.barrier()  # DDP does not wait for what it delays
        results.append(gradients(model))
    assert not different_bits(*results)


class WithLoss(TwoParts):
    """Returns nothing that has a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.loss = super().forward(x).square().mean()
        return self.loss.detach()


def by_its_loss(model: nn.Module) -> None:
    for i in range(10):
        model.zero_grad()
        model(data(i))
        model.module.loss.backward()


@pytest.mark.parametrize("parts", [["table"], ["table", "head"]])
def test_a_loss_that_is_no_output(pool: RankPool, parts: list[str]):
    pool.run(both_ways, by_its_loss, WithLoss, parts)


class Outside(TwoParts):
    """DDP does not know the trigger, and has nothing else to average."""

    _ddp_params_and_buffers_to_ignore = ("first",)


def with_all_delayed(model: nn.Module) -> None:
    for i in range(10):
        model.zero_grad()
        model.weight(1 + syncengine.rank())
        model(data(i)).square().mean().backward()
    model.module.first.grad.zero_()  # this rank's own


class OutsideWithLoss(WithLoss):
    """Neither is the trigger a parameter of the reducer's, nor does an output say that its backward begins."""

    _ddp_params_and_buffers_to_ignore = ("first",)


def with_all_delayed_by_its_loss(model: nn.Module) -> None:
    by_its_loss(model)
    model.module.first.grad.zero_()


@pytest.mark.parametrize(
    ("train", "kind"), [(with_all_delayed, Outside), (with_all_delayed_by_its_loss, OutsideWithLoss)]
)
def test_all_may_be_delayed(pool: RankPool, train: Callable[[nn.Module], None], kind: type[nn.Module]):
    pool.run(both_ways, train, kind, ["table", "head"])


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(11, 4, sparse=True), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first * 1.0  # comes last
        return self.table(x) * first


def of_rows(model: nn.Module) -> None:
    for i in range(3):
        model.zero_grad(set_to_none=i == 1)
        model(torch.tensor([i, 5 + syncengine.rank()])).square().sum().backward()
    model.module.table.weight.grad = model.module.table.weight.grad.to_dense()


def test_a_sparse_gradient_becomes_dense(pool: RankPool):
    pool.run(both_ways, of_rows, Sparse)


class Recomputed(TwoParts):
    """The trigger gets its gradient twice, in graph tasks of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(lambda x: self.table(x * self.first)[:, :1] * x, x, use_reentrant=True)
        return self.head(x[:, :16])


def recomputed(model: nn.Module) -> None:
    for i in range(4):
        model.zero_grad()
        model.weight(1 + syncengine.rank())
        model(data(i).requires_grad_()).square().mean().backward()


def test_a_trigger_that_comes_twice_in_a_static_graph(pool: RankPool):
    pool.run(partial(both_ways, recomputed, Recomputed, static_graph=True))


@run_on_ranks()
def test_a_backward_through_two_wrappers():
    module = TwoParts()
    wrappers = [syncengine.Parallel(module, **delaying(module)) for _ in range(2)]
    for i in range(3):
        loss = lambda models, i=i: sum(model(data(i)).square().mean() for model in models)  # noqa: E731
        expected = torch.autograd.grad(loss([module, module]), list(module.parameters()))
        module.zero_grad(set_to_none=i < 2)
        loss(wrappers).backward()
        for gradient, parameter in zip(expected, module.parameters(), strict=True):
            syncengine.all_reduce(gradient, "avg")
            torch.testing.assert_close(parameter.grad, gradient)


REGISTER: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
    lambda p: _apply_optimizer_in_backward(torch.optim.SGD, [p], {"lr": 0.1}),
]


@run_on_ranks()
def test_hooks_that_come_later_are_refused_too():
    for register in REGISTER:
        module = TwoParts()
        model = syncengine.Parallel(module, **delaying(module))
        with torch.no_grad():
            model(data())
        register(module.table.bias)
        with torch.no_grad():
            model(data())
        with pytest.raises(InvalidUsage, match=r"parameter table.bias is delayed.*do not delay it"):
            model(data())


@pytest.mark.parametrize("index", range(len(REGISTER)))
def test_hooks_that_come_after_the_forward_are_refused_too(pool: RankPool, index: int):
    text = raised_first(pool, with_hook_after_forward, index)
    assert "parameter table.bias is delayed" in text


def with_hook_after_forward(index: int) -> None:
    module = TwoParts()
    model = syncengine.Parallel(module, **delaying(module))
    loss = model(data()).square().mean()
    REGISTER[index](module.table.bias)
    loss.backward()
