"""Parameters that are frozen while gradients are accumulated: averaged with `find_unused_parameters`, else an error."""

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from parallel_models import CAP, backwards, both, data, gradients, of_both, small, trained
from pool import run_on_ranks
from random_layers import Layer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import syncengine
from syncengine.errors import InvalidUsage, SyncError

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")

UNUSED = {"find_unused_parameters": True}
LEFT = r"parameter 0\.\w+ of Parallel\(Sequential\) got a gradient under no_sync.*pass find_unused_parameters"


def backward(model: nn.Module, number: int, synchronized: bool = True) -> None:
    with contextlib.nullcontext() if synchronized else model.no_sync():
        model(data(number)).square().mean().backward()


def in_turns(model: nn.Module, alike: Iterable[int] = (5,), hooked: bool = False) -> list[Any]:
    """One part in micro-batches that do not synchronize, the other in the one that does.

    Each rank has one of the former in the steps `alike`; else rank 0 alone has one in step 2, and rank 1 two in step 3.
    """
    if hooked:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    first, last = model.module[0], model.module[2]
    found: list[Any] = []
    for i in range(8):
        first.requires_grad_(True)
        last.requires_grad_(False)
        counts = {2: 1 - syncengine.rank(), 3: 2 * syncengine.rank(), **dict.fromkeys(alike, 1)}
        for k in range(counts.get(i, 0)):
            backward(model, 10 * i + k, False)
        first.requires_grad_(False)
        last.requires_grad_(True)
        backward(model, 10 * i + 5)
        found += gradients(model)
        model.zero_grad()
    return found


def once(model: nn.Module, after: int = 0) -> None:
    """Frozen for good in the middle of a step; then trained on without it."""
    for i in range(5):
        backward(model, 3 * i, False)
        if i == after:
            model.module[0].requires_grad_(False)
        backward(model, 3 * i + 1, False)
        backward(model, 3 * i + 2)
        model.zero_grad()


@pytest.mark.parametrize(
    ("step", "options"),
    [(partial(in_turns, alike=range(8)), {}), (once, CAP), (partial(once, after=3), {"static_graph": True})],
)
@run_on_ranks()
def test_without_looking_for_unused_parameters_they_are_an_error(step: Callable, options: dict[str, Any]):
    """DDP waits for their gradients, and says so in the next forward."""
    with pytest.raises(SyncError, match=LEFT):  # the other's, perhaps
        step(syncengine.Parallel(small(), **options))


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
    syncengine.all_gather(every := torch.empty(3, *own.shape), own)
    return frozen.grad, every


@run_on_ranks(world=3)
def test_weights_and_hooks_apply_to_them():
    model = syncengine.Parallel(small(), **UNUSED)
    average, (first, second, third) = frozen_and_every(model, 1.0 + 2 * syncengine.rank())
    torch.testing.assert_close(average, (first + 3 * second + 5 * third) / 9)
    model = syncengine.Parallel(small(), **UNUSED)
    model.register_comm_hook(None, syncengine.hooks.bf16_compress)
    average, every = frozen_and_every(model)
    first, second, third = ((own.bfloat16() / 3).float() for own in every)
    assert torch.equal(average, (first + second + third).bfloat16().float())


@run_on_ranks(world=3)
def test_a_rank_without_a_batch_changes_nothing_of_its_own():
    model = syncengine.Parallel(small(), **UNUSED)
    frozen = model.module[0].weight
    backward(model, 0, False)
    own = frozen.grad.clone()
    with model.join():
        model.module[0].requires_grad_(False)
        if syncengine.rank() == 0:
            backward(model, 1)
            assert torch.equal(frozen.grad, own * (1 / 3))
    assert syncengine.rank() == 0 or torch.equal(frozen.grad, own)


@run_on_ranks(gloo=True)
def test_a_probe_of_one_rank_plans_nothing() -> None:
    """It has begun to accumulate, alone, and no gradient came of it."""

    def step(model: nn.Module) -> list[Any]:
        generator = type(model)(nn.Linear(24, 24))
        backwards(model, 4)
        model.zero_grad()
        if syncengine.rank() == 0:
            with model.no_sync():
                model(data(5))
        model.requires_grad_(False)
        (model(generator(data(6))).sum() + model(data(6)).sum()).backward()
        return gradients(generator)

    both(small, step)


@run_on_ranks(gloo=True)
def test_what_only_one_rank_has_trained_and_each_synchronized_forward_freezes():
    ours, _ = of_both(in_turns, small, **UNUSED)
    averaged = [grads[0] is not None for grads in zip(*[iter(ours)] * 4, strict=True)]
    assert averaged == [i in (2, 3, 5) for i in range(8)], averaged
    for options in (UNUSED, {**UNUSED, **CAP}):
        both(small, in_turns, **options)
    both(small, partial(in_turns, hooked=True), **UNUSED)


@run_on_ranks()
def test_what_one_rank_alone_has_is_an_error_on_all():
    """Rank 0 has one in step 2, and refuses it."""
    with pytest.raises(InvalidUsage if syncengine.rank() == 0 else SyncError, match=LEFT):
        in_turns(syncengine.Parallel(small()))


@run_on_ranks()
def test_a_forward_under_no_sync_alone_is_no_gradient():
    """A probe, while .grad still holds an average."""
    model = syncengine.Parallel(small())
    backward(model, 0)
    with model.no_sync():
        model(data(1))
    model.module[0].requires_grad_(False)
    model.module[2].zero_grad()
    backward(model, 2)


@run_on_ranks(world=3)
def test_a_bucket_with_accumulated_gradients_is_not_skipped():
    """Under DDP it is: the gradients stay local."""
    for options in (CAP, {}):
        model = syncengine.Parallel(small(), skip_all_reduce_unused_params=True, **UNUSED, **options)
        average, (first, second, third) = frozen_and_every(model)
        assert torch.equal(average, (first + second + third) * (1 / 3))


@run_on_ranks(world=3)
def test_a_sparse_table_that_one_rank_has_trained_alone():
    model = syncengine.Parallel(nn.Sequential(nn.EmbeddingBag(9, 24, sparse=True), nn.Linear(24, 3)), **UNUSED)
    table, head = model.module
    found = []
    for i in range(4):
        if i == 2 and syncengine.rank() == 0:
            with model.no_sync():
                model(torch.tensor([[1, 2]])).sum().backward()
        table.requires_grad_(False)
        model(torch.tensor([[3, 4 + syncengine.rank()]])).square().sum().backward()
        found.append(None if table.weight.grad is None else table.weight.grad.to_dense())
        table.requires_grad_(True)
        model.zero_grad()
    expected = torch.zeros(9, 24)
    expected[1:3] = head.weight.detach().sum(0) / 6  # the mean of two rows, and of three ranks
    torch.testing.assert_close(found.pop(2), expected)
    assert found == [None] * 3


@pytest.mark.parametrize("options", [{}, UNUSED], ids=str)
@run_on_ranks()
def test_one_that_was_frozen_when_it_was_wrapped(options: dict[str, bool]):
    """The other rank does not know of it."""
    module = small()
    module[0].requires_grad_(False)
    model = trained(module, **options)
    model.zero_grad()
    syncengine.barrier()  # rank 0 is to end nothing but the next backward
    module[0].requires_grad_(True)
    if syncengine.rank() == 0:
        backward(model, 3, False)
    module[0].requires_grad_(False)
    with pytest.raises(InvalidUsage if syncengine.rank() == 0 else SyncError, match=LEFT):
        backward(model, 4)


def discriminator() -> nn.Module:
    """Layers that are registered in another order than they run in."""
    layers = {"head": nn.Linear(300, 1), "body": nn.Linear(24, 300), "middle": nn.Linear(300, 300)}
    return Layer(lambda self, x: self.head(torch.relu(self.middle(torch.relu(self.body(x))))), **layers)


def adversaries(critic: nn.Module) -> list[Any]:
    generator = type(critic)(nn.Linear(24, 24))
    # DDP waits for what is frozen, unless it looks for unused parameters.
    waits = isinstance(critic, DistributedDataParallel) and not critic.find_unused_parameters
    found: list[Any] = []
    for i in range(4):
        critic.requires_grad_(True)
        critic.zero_grad()
        critic(data(2 * i)).mean().backward()
        found += gradients(critic)
        critic.requires_grad_(False)
        generator.zero_grad()
        (critic.module if waits else critic)(generator(data(2 * i + 1))).mean().backward()
        found += gradients(generator)
    return found


@pytest.mark.parametrize(("world", "numerics", "options"), [(3, "ring", {}), (2, "rank_order", UNUSED)])
@run_on_ranks(gloo=True)
def test_a_model_that_is_wholly_frozen_in_its_second_forward(world: int, numerics: str, options: dict[str, bool]):
    """The bits of ring need the order that DDP gives its gradients."""
    both(discriminator, adversaries, **options)
