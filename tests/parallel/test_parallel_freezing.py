"""Parameters that are frozen while gradients are accumulated: what they have got by then is averaged, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import CAP, Branches, both, data, different_bits, gradients, of_both, small
from pool import RankPool, run_on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import syncengine
from syncengine.errors import InvalidUsage, SyncError

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")

UNUSED = {"find_unused_parameters": True}  # else DDP does not follow


def backward(model: nn.Module, number: int, synchronized: bool = True, *arguments: Any) -> None:
    with contextlib.nullcontext() if synchronized else model.no_sync():
        model(data(number), *arguments).square().mean().backward()


def in_turns(model: nn.Module, first_plain: int = 0) -> list[Any]:
    """One part in the micro-batch that does not synchronize, the other in the one that does."""
    found: list[Any] = []
    for i in range(first_plain):
        backward(model, i)
        found += gradients(model)
        model.zero_grad()
    for i in range(4):
        model.module[0].requires_grad_(True)
        model.module[2].requires_grad_(False)
        backward(model, 2 * i, False)
        model.module[0].requires_grad_(False)
        model.module[2].requires_grad_(True)
        backward(model, 2 * i + 1)
        found += gradients(model)
        model.zero_grad()
    return found


def once(model: nn.Module, after: int) -> list[Any]:
    """Frozen for good in the middle of a step; then trained on without it."""
    found: list[Any] = []
    for i in range(5):
        backward(model, 3 * i, False)
        if i == after:
            model.module[0].requires_grad_(False)
        backward(model, 3 * i + 1, False)
        backward(model, 3 * i + 2)
        found += gradients(model)
        model.zero_grad()
    assert [grad is None for grad in found[-4:]] == [True, True, False, False]
    return found


STEPS: list[Callable[[nn.Module], list[Any]]] = [
    partial(in_turns),
    partial(in_turns, first_plain=3),
    partial(once, after=0),
    partial(once, after=3),
]


@run_on_ranks(gloo=True)
def test_accumulated_gradients_of_parameters_frozen_later():
    for step in STEPS:
        _, theirs = of_both(step, small, **UNUSED)
        for options in (UNUSED, {}, CAP, {"static_graph": True}):
            if "static_graph" in options and step.func is in_turns:
                continue
            torch.manual_seed(0)
            ours = step(syncengine.Parallel(small(), **options))
            assert [grad is None for grad in ours] == [grad is None for grad in theirs], (step, options)
            there = [[grad for grad in grads if grad is not None] for grads in (ours, theirs)]
            assert not different_bits(*there), (step, options)


def while_a_forward_is_pending(model: nn.Module) -> list[Any]:
    """As a GAN's discriminator, for another forward."""
    found: list[Any] = []
    for i in range(3):
        backward(model, 3 * i, False)
        loss = model(data(3 * i + 1)).square().mean()
        model.module[0].requires_grad_(False)
        other = model(data(3 * i + 2))
        model.module[0].requires_grad_(True)
        loss.backward()
        found += gradients(model)
        model.zero_grad()
        del other
    return found


@run_on_ranks(gloo=True)
def test_frozen_for_another_forward_alone():
    both(small, while_a_forward_is_pending)


def one_rank_alone(model: nn.Module) -> None:
    """It has used a branch that is frozen then; and one that is frozen has not been used by any."""
    backward(model, 0, False, syncengine.rank() == 0)
    model.module.left.requires_grad_(False)
    model.module.never.requires_grad_(False)
    backward(model, 1, True, False)
    assert model.module.left.weight.grad is not None
    assert model.module.never.weight.grad is None


@run_on_ranks(gloo=True)
def test_one_rank_may_have_accumulated_alone():
    both(Branches, one_rank_alone, **UNUSED)


@run_on_ranks()
def test_what_was_dropped_or_averaged_before_stays_as_it_is():
    model = syncengine.Parallel(small())
    frozen = model.module[0].weight
    backward(model, 0, False)
    model.module[0].requires_grad_(False)
    out = model(data(1))
    model.zero_grad()
    out.sum().backward()
    assert frozen.grad is None
    model.module[0].requires_grad_(True)
    backward(model, 2)
    average = frozen.grad.clone()
    model.module[0].requires_grad_(False)
    for i in range(3):
        backward(model, i)
        assert torch.equal(frozen.grad, average)
        assert model.sync_stats()["reduced_bytes"] == 4 * (24 * 24 + 24)  # of the other part alone


def frozen_and_every(model: syncengine.Parallel, weight: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient that a frozen parameter ends with, and what each rank had accumulated."""
    frozen = model.module[0].weight
    backward(model, 0, False)
    own = frozen.grad.clone()
    model.module[0].requires_grad_(False)
    if weight is not None:
        model.weight(weight)
    backward(model, 1)
    syncengine.all_gather(every := torch.empty(2, *own.shape), own)
    return frozen.grad, every


@run_on_ranks()
def test_weights_and_hooks_apply_to_them():
    average, (first, second) = frozen_and_every(syncengine.Parallel(small()), 1.0 + 2 * syncengine.rank())
    torch.testing.assert_close(average, (first + 3 * second) / 4)
    model = syncengine.Parallel(small())
    model.register_comm_hook(None, syncengine.hooks.bf16_compress)
    average, (first, second) = frozen_and_every(model)
    assert torch.equal(average, (first.bfloat16() / 2 + second.bfloat16() / 2).float())


@run_on_ranks()
def test_a_rank_without_a_batch_changes_nothing_of_its_own():
    model = syncengine.Parallel(small())
    frozen = model.module[0].weight
    backward(model, 0, False)
    own = frozen.grad.clone()
    with model.join():
        model.module[0].requires_grad_(False)
        if syncengine.rank() == 0:
            backward(model, 1)
            assert torch.equal(frozen.grad, own / 2)
    assert syncengine.rank() == 0 or torch.equal(frozen.grad, own)


def frozen_after_a_probe(model: nn.Module) -> list[Any]:
    """One rank alone has begun to accumulate, and no gradient came of it."""
    generator = type(model)(nn.Linear(24, 24))
    for i in range(4):
        backward(model, i)
    model.zero_grad()
    if syncengine.rank() == 0:
        with model.no_sync():
            model(data(5))
    model.requires_grad_(False)
    (model(generator(data(6))).sum() + model(data(6)).sum()).backward()
    return gradients(generator)


@run_on_ranks(world=2, gloo=True)
def test_a_probe_of_one_rank_plans_nothing() -> None:
    both(small, frozen_after_a_probe)


def under_no_sync_alone(model: nn.Module, frozen_alike: int = 5) -> list[Any]:
    """One part is frozen in each forward that synchronizes; some ranks have had more micro-batches than others."""
    first, last = model.module[0], model.module[2]
    found: list[Any] = []
    for i in range(8):
        first.requires_grad_(True)
        last.requires_grad_(False)
        for k in range({2: 1 - syncengine.rank(), 3: 2 * syncengine.rank(), frozen_alike: 1}.get(i, 0)):
            backward(model, 10 * i + k, False)
        first.requires_grad_(False)
        last.requires_grad_(True)
        backward(model, 10 * i + 5)
        found += gradients(model)
        model.zero_grad()
    return found


@run_on_ranks(gloo=True)
def test_what_only_one_rank_has_trained_and_each_synchronized_forward_freezes():
    """It is not in the plan, and the other rank does not know."""
    ours, theirs = of_both(under_no_sync_alone, small, **UNUSED)
    averaged = [grads[0] is not None for grads in zip(*[iter(ours)] * 4, strict=True)]
    assert averaged == [i in (2, 3, 5) for i in range(8)], averaged
    for options in (UNUSED, {}, CAP, {"static_graph": True}, {"skip_all_reduce_unused_params": True}):
        torch.manual_seed(0)
        ours = under_no_sync_alone(syncengine.Parallel(small(), **options))
        assert [grad is None for grad in ours] == [grad is None for grad in theirs], options
        there = [[grad for grad in grads if grad is not None] for grads in (ours, theirs)]
        assert not different_bits(*there), options


def operations_of_steps(model: syncengine.Parallel) -> list[int]:
    """Without and with such gradients: how many collectives."""
    found = []
    model.module[0].requires_grad_(False)
    for i in range(8):
        if i in (5, 7) and syncengine.rank() == 0:
            model.module[0].requires_grad_(True)
            backward(model, i, False)
            model.module[0].requires_grad_(False)
        before = model.communicator.counters()["operations"]
        backward(model, i)
        found.append(model.communicator.counters()["operations"] - before)
    return found[4:]


@run_on_ranks()
def test_ranks_ask_each_other_once():
    """Where there are such gradients, which get a bucket for each of two parameters, or in each backward."""
    found = operations_of_steps(syncengine.Parallel(small(), skip_all_reduce_unused_params=True))
    assert found == [2, 4, 2, 4], found


def table_trained_alone(model: nn.Module) -> list[Any]:
    table, head = model.module
    found: list[Any] = []
    for i in range(4):
        if i == 2 and syncengine.rank() == 0:
            with model.no_sync():
                model(torch.tensor([[1, 2]])).sum().backward()
        table.requires_grad_(False)
        model(torch.tensor([[3, 4 + syncengine.rank()]])).square().sum().backward()
        found += [head.weight.grad.clone(), head.bias.grad.clone()]
        found += [] if table.weight.grad is None else [table.weight.grad.to_dense()]
        table.requires_grad_(True)
        model.zero_grad()
    return found


@run_on_ranks(gloo=True)
def test_a_sparse_table_that_one_rank_has_trained_alone():
    """DDP expects a gradient of it for ever; so the means are compared."""
    torch.manual_seed(0)
    model = syncengine.Parallel(nn.Sequential(nn.EmbeddingBag(9, 24, sparse=True), nn.Linear(24, 3)))
    found = table_trained_alone(model)
    assert len(found) == 9
    expected = torch.zeros(9, 24)
    expected[1:3] = model.module[1].weight.detach().sum(0) / 4  # the mean of two rows, and of two ranks
    torch.testing.assert_close(found[6], expected)


@run_on_ranks(gloo=True)
def test_a_communication_hook_gets_them_too():
    def step(model: nn.Module) -> list[Any]:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        return under_no_sync_alone(model)

    both(small, step, **UNUSED)


def hook_with_state(found: dict[int, int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Keeps something for each bucket, as PowerSGD what it has left out."""
    assert found.setdefault(bucket.index(), bucket.buffer().numel()) == bucket.buffer().numel(), bucket.index()
    found[-1] = found.get(-1, 0) + bucket.is_last()
    return default_hooks.allreduce_hook(None, bucket)


@run_on_ranks(gloo=True)
def test_a_communication_hook_may_keep_state_by_the_numbers_of_buckets():
    model = syncengine.Parallel(nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 24)))
    model.module[0].requires_grad_(False)
    found: dict[int, int] = {}
    model.register_comm_hook(found, hook_with_state)
    under_no_sync_alone(model)
    assert found.pop(-1) == 8 + 3  # the last one of each step, and of what came behind in three
    assert sorted(found.values()) == [20, 24 * 20, 24 * 20 + 24]


def frozen_when_wrapped() -> None:
    module = small()
    module[0].requires_grad_(False)
    model = syncengine.Parallel(module)
    for i in range(3):
        backward(model, i)
        model.zero_grad()
    syncengine.barrier()  # rank 0 is to end nothing but the next backward
    module[0].requires_grad_(True)
    if syncengine.rank() == 0:
        backward(model, 3, False)
    module[0].requires_grad_(False)
    if isinstance(model.reducer, syncengine._C.Reducer) and type(model) is syncengine.parallel.Parallel:
        backward(model, 4)
        assert module[0].weight.grad is not None
    else:
        error = InvalidUsage if syncengine.rank() == 0 else SyncError
        with pytest.raises(error, match=r"parameter 0\.weight of Parallel\(Sequential\) got a gradient under no_sync"):
            backward(model, 4)


def test_one_that_was_frozen_when_it_was_wrapped(pool: RankPool):
    """Averaged as well, but where ranks would have to ask each other in every backward."""
    pool.run(frozen_when_wrapped)


class Discriminator(nn.Module):
    """Registered in another order than it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(300, 1), nn.Linear(24, 300)
        self.middle = nn.Linear(300, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.middle(torch.relu(self.body(x)))))


def adversaries(wrap: Callable[[nn.Module], nn.Module]) -> list[Any]:
    torch.manual_seed(0)
    critic, generator = wrap(Discriminator()), wrap(nn.Linear(24, 24))
    found: list[Any] = []
    for i in range(4):
        critic.requires_grad_(True)
        critic.zero_grad()
        critic(data(2 * i)).mean().backward()
        found += gradients(critic)
        critic.requires_grad_(False)
        generator.zero_grad()
        judge = critic.module if wrap is DistributedDataParallel else critic  # DDP would wait for what is frozen
        judge(generator(data(2 * i + 1))).mean().backward()
        found += gradients(generator)
    return found


@run_on_ranks(world=3, gloo=True, settings={"numerics": "ring"})
def test_a_model_that_is_wholly_frozen_in_its_second_forward_has_the_order_of_ddp():
    assert not different_bits(adversaries(syncengine.Parallel), adversaries(DistributedDataParallel))
