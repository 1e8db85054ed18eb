"""``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce``."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import flat
import pytest
import torch
import torch.distributed as dist
from delayed_models import TwoParts, both_ways, delaying
from parallel_models import CAP, data, different_bits, gradients
from pool import RankPool, run_on_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import syncengine
from syncengine.errors import InvalidUsage, Mismatch

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")


def delayed_training(wrap: Any, names: list[str], optimizer_steps: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(syncengine.rank())
    module = TwoParts()
    delayed = [(n, p) for n, p in module.named_parameters() if n in names]
    model = wrap(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for i in range(optimizer_steps):
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        model(data(i)).square().mean().backward()
        if wrap is DistributedDataParallel:
            dist.barrier()  # DDP does not wait for what it delays
        history += gradients(model)
        optimizer.step()
    return history


@run_on_ranks(gloo=True)
def test_delayed_parameters():
    names = ["table.weight", "table.bias", "head.weight"]
    ours, theirs = (delayed_training(wrap, names) for wrap in (syncengine.Parallel, DistributedDataParallel))
    assert not different_bits(ours, theirs)


test_delayed_parameters_in_ring = run_on_ranks(world=3, gloo=True, settings={"timeout": 60.0, "numerics": "ring"})(
    test_delayed_parameters.on_ranks
)


@run_on_ranks(gloo=True)
def test_some_gradients_may_be_kept():
    def step(model: nn.Module) -> None:
        for i in range(3):
            model.module.table.bias.grad = None  # the others accumulate
            model(data(i)).square().mean().backward()
            dist.barrier()  # DDP does not wait for what it delays

    results = []
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        torch.manual_seed(0)
        module = TwoParts()
        delayed = [(f"table.{name}", p) for name, p in module.table.named_parameters()]
        model = wrap(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.first)
        step(model)
        results.append(gradients(model))
    assert not different_bits(*results)


@run_on_ranks()
def test_delayed_parameters_follow_no_sync_and_share_one_buffer():
    module = TwoParts()
    delayed = [("table.weight", module.table.weight), ("table.bias", module.table.bias)]
    model = syncengine.Parallel(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.first)
    with model.no_sync():
        model(data(1)).square().mean().backward()
    local = module.table.weight.grad.clone()
    everyone = torch.empty(2, 16, 24)
    syncengine.all_gather(everyone, local)
    assert not torch.equal(everyone[0], everyone[1])
    model(data(2)).square().mean().backward()
    syncengine.all_gather(everyone, module.table.weight.grad)
    assert torch.equal(everyone[0], everyone[1])
    assert module.table.weight.grad.untyped_storage().data_ptr() == module.table.bias.grad.untyped_storage().data_ptr()


@run_on_ranks()
def test_behind_flat_buckets_they_are_averaged_at_the_end():
    """On a device, between buckets, they could wait crosswise where each rank's gradients come in another order."""
    if syncengine.Parallel is not flat.Parallel:
        return
    module = TwoParts()
    delayed = [("head.weight", module.head.weight)]
    model = syncengine.Parallel(
        module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.head.bias, **CAP
    )
    seen = []
    module.first.register_hook(lambda gradient: seen.append(module.head.weight.grad.clone()))  # comes last
    model(data()).square().mean().backward()
    syncengine.all_reduce(seen[0], "avg")  # was still this rank's own
    assert torch.equal(seen[0], module.head.weight.grad)


@pytest.mark.parametrize("divide", [True, False])
def test_uneven_inputs(pool: RankPool, divide: bool):
    """DDP's ranks wait for each other in different collectives."""
    pool.run(both_ways, partial(with_uneven_inputs, divide=divide), world=3)


def with_uneven_inputs(model: nn.Module, divide: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=divide):
        for step in range(1 + syncengine.rank()):
            if step:
                optimizer.zero_grad()
            model(data(step)).square().mean().backward()
            optimizer.step()
    mine = torch.cat([p.detach().view(-1) for p in model.parameters()])
    everyone = torch.empty(3, len(mine))
    syncengine.all_gather(everyone, mine)
    assert torch.equal(everyone[0], everyone[1])
    assert torch.equal(everyone[0], everyone[2])


def test_weights(pool: RankPool):
    pool.run(both_ways, with_weights, world=3)


def with_weights(model: nn.Module) -> None:
    """One rank has no sample: what it has is NaN, and counts nothing."""
    rank = syncengine.rank()
    for step in range(2):
        model.zero_grad()
        model.weight(rank)
        model(data(step)[:rank]).square().mean().backward()


def test_evaluation_between_forward_and_backward(pool: RankPool):
    for of in ("it", "another"):
        pool.run(both_ways, partial(with_evaluation, of=of))


def with_evaluation(model: nn.Module, of: str) -> None:
    """By the same wrapper, under no_sync, or by another one with the same trigger."""
    module = model.module
    options: dict[str, Any] = {}
    if model._delay_all_reduce_params:
        options = {"delay_all_reduce_named_params": [("head.bias", module.head.bias)]}
        options["param_to_hook_all_reduce"] = module.first
    other = syncengine.Parallel(module, **options) if of == "another" else model
    for i in range(3):
        model.zero_grad()
        model.weight(1 + syncengine.rank())
        loss = model(data(i)).square().mean()
        with torch.no_grad(), other.no_sync():
            other(data(i + 1))
        loss.backward()


@run_on_ranks()
def test_hooks_that_would_see_local_gradients_are_refused():
    """DDP runs them: an optimizer in backward makes its ranks diverge."""
    for register in (
        lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
        lambda p: _apply_optimizer_in_backward(torch.optim.SGD, [p], {"lr": 0.1}),
    ):
        module = TwoParts()
        delayed = [(f"head.{name}", p) for name, p in module.head.named_parameters()]
        model = syncengine.Parallel(
            module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.first
        )
        register(module.head.bias)
        with pytest.raises(InvalidUsage, match=r"parameter head.bias is delayed.*do not delay it"):
            model(data())


@run_on_ranks(world=4, gloo=True)
def test_delayed_parameters_follow_the_group():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def step(model: nn.Module) -> None:
        for group in (None, pairs[dist.get_rank() // 2]):
            if group is not None:
                model._update_process_group(group)
            model.zero_grad()
            model(data()).square().mean().backward()
            dist.barrier(group)  # DDP does not wait for what it delays

    results = []
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        torch.manual_seed(0)
        module = TwoParts()
        delayed = [("head.weight", module.head.weight)]
        model = wrap(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.first)
        step(model)
        results.append(gradients(model))
    torch.testing.assert_close(*results)


def delayed_table(module: nn.Module) -> nn.Module:
    return syncengine.Parallel(module, **delaying(module), bucket_cap_mb=1)


def operations_of_a_step(model: nn.Module) -> int:
    for i in range(4):
        model.zero_grad()
        before = model.communicator.counters()["operations"]
        model(data(i)).square().mean().backward()
    return model.communicator.counters()["operations"] - before


@run_on_ranks()
def test_what_a_wrapper_has_hooked_goes_with_it():
    module = TwoParts()
    once = operations_of_a_step(delayed_table(module))
    for _ in range(3):
        assert operations_of_a_step(delayed_table(module)) == once
    model = delayed_table(module)
    model._remove_autograd_hooks()
    before = model.communicator.counters()["operations"]
    module(data()).square().mean().backward()
    del model
    module(data()).square().mean().backward()
    copy.deepcopy(module)(data()).square().mean().backward()
    pickle.loads(pickle.dumps(module))(data()).square().mean().backward()
    assert syncengine.default_communicator().counters()["operations"] == before


@run_on_ranks()
def test_of_two_wrappers_that_one_averages_whose_forward_ran():
    module = TwoParts()
    first, second = delayed_table(module), delayed_table(module)
    assert operations_of_a_step(first) == operations_of_a_step(second)
    module.zero_grad()
    with first.no_sync():
        first(data(1)).square().mean().backward()
    second(data(2)).square().mean().backward()
    averaged = gradients(module.table)
    module.zero_grad()
    for i in (1, 2):
        module(data(i)).square().mean().backward()
    for mine, ours in zip(gradients(module.table), averaged, strict=True):
        syncengine.all_reduce(mine, "avg")
        torch.testing.assert_close(mine, ours)


def test_gradients_that_have_left_the_buffer(pool: RankPool):
    """Under DDP they stay this rank's own."""
    pool.run(both_ways, with_gradients_replaced)
    pool.run(both_ways, with_graphs)


def with_gradients_replaced(model: nn.Module) -> None:
    for i in range(2):
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5
        model(data(i)).square().mean().backward()


def with_graphs(model: nn.Module) -> None:
    for i in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about reference cycles
            model(data(i)).square().mean().backward(create_graph=True)
        for p in model.parameters():
            p.grad = p.grad.detach()


@run_on_ranks()
def test_delayed_parameters_are_not_pickled():
    """The copy of a DDP does not average them, and says nothing."""
    module = TwoParts()
    delayed = [("head.bias", module.head.bias)]
    model = syncengine.Parallel(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.first)
    with pytest.raises(InvalidUsage, match="delay_all_reduce_named_params can't be pickled: save model.module"):
        pickle.dumps(model)


@run_on_ranks()
def test_delayed_parameters_are_checked():
    module = TwoParts()
    with pytest.raises(InvalidUsage, match="need to be set at the same time"):
        syncengine.Parallel(module, delay_all_reduce_named_params=[])
    with pytest.raises(InvalidUsage, match="first, which is delayed itself"):
        syncengine.Parallel(
            module, delay_all_reduce_named_params=[("first", module.first)], param_to_hook_all_reduce=module.first
        )
    mixed = [("a", module.first), ("b", nn.Parameter(torch.zeros(1, dtype=torch.float64)))]
    with pytest.raises(InvalidUsage, match="b is torch.float64"):
        syncengine.Parallel(module, delay_all_reduce_named_params=mixed, param_to_hook_all_reduce=module.head.bias)


@run_on_ranks()
def test_delayed_parameters_that_differ_between_ranks_are_named():
    module = TwoParts()
    if syncengine.rank() == 1:
        module.table.weight = nn.Parameter(torch.ones(24, 16))
    with pytest.raises(Mismatch, match=r"table.weight: float32 \(16, 24\).*table.weight: float32 \(24, 16\)"):
        syncengine.Parallel(
            module,
            delay_all_reduce_named_params=[("table.weight", module.table.weight)],
            param_to_hook_all_reduce=module.first,
        )


@run_on_ranks()
def test_a_tied_parameter_is_delayed_by_any_of_its_names():
    module = TwoParts()
    module.again = nn.Linear(24, 16)
    module.again.weight = module.table.weight
    delayed = [("table.weight", module.table.weight)]
    model = syncengine.Parallel(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.first)
    assert not {"table.weight", "again.weight"}.intersection(model._model.names)
