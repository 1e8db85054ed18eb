"""When buckets are planned, how large they are, and what is in them; a forward that one rank makes alone is its own."""

import contextlib
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from parallel_models import CAP, Branches, Mlp, Opposite, assert_averaged, backwards, both, data, gradients, small
from pool import run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import Mismatch, SyncError, Timeout
from syncengine.parallel.buckets import BucketPlanner

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("options", "numerics", "hosts", "cap", "counts"),
    [
        ({}, "rank_order", "", MIB, [3] * 6),
        ({"bucket_cap_mb": 3}, "rank_order", "", 3 * MIB, [1] * 6),
        ({}, "ring", "", 25 * MIB, [1] + [2] * 5),  # as DDP: all in one, then 1 MiB first
        ({}, "rank_order", "ab", 680_807, []),  # a quarter of the model, which lies between MIB / 4 and MIB
    ],
    ids=["default", "given", "ring", "hosts"],
)
@run_on_ranks()
def test_the_size_of_buckets_is_fixed(options: dict[str, Any], numerics: str, hosts: str, cap: int, counts: list[int]):
    """The cap, in bytes, and the number of buckets in each step."""
    model = syncengine.Parallel(Mlp(), **options)
    for count in counts:
        backwards(model, 1)
        assert model.sync_stats()["buckets"] == count
    assert model._planning.planner.cap == cap


@pytest.mark.parametrize(
    ("mib", "between_hosts", "cap"),
    [(32, True, 1), (3, True, 0.75), (0.5, True, 0.25), (3, False, 1), (0.5, False, 1)],
)
def test_small_models_between_hosts_have_several_buckets(mib: float, between_hosts: bool, cap: float):
    """Or nothing would cross before backward is over."""
    parameters = [torch.empty(int(mib * MIB) // 4)]
    planner = BucketPlanner.create(parameters, [False], False, False, None, None, between_hosts=between_hosts)
    assert planner.cap == cap * MIB


@run_on_ranks(gloo=True)
def test_a_rank_may_keep_models_that_others_have_dropped():
    """Below a group of the backend only the models keep the Python object of the communicator."""
    group, rank, kept = dist.new_group(backend="syncengine"), dist.get_rank(), []
    for _ in range(3):
        model = syncengine.Parallel(nn.Linear(24, 2), process_group=group)
        backwards(model, 6)
        kept += [model] * (rank == 0)
        del model


@pytest.mark.thorough
@pytest.mark.parametrize("rank", mostly_nightly([0, 1], 1))
@run_on_ranks(gloo=True, settings={"timeout": 3.0})
def test_a_forward_of_one_rank_alone_that_plans_is_named(rank: int):
    """The second, where DDP's waits, too."""
    model = syncengine.Parallel(nn.Linear(24, 2))
    backwards(model, 1)
    if syncengine.rank() == rank:
        text = r"in planning the buckets of Parallel\(Linear\) in a forward with gradients enabled"
        with pytest.raises(Timeout, match=text):
            torch.autograd.grad(model(data(7)).sum(), model.module.weight)
    dist.barrier()  # Gloo's


@pytest.mark.thorough
@pytest.mark.parametrize("freezes", mostly_nightly(["nothing", "a part", "all"], 1))
@pytest.mark.parametrize("rank", mostly_nightly([0, 1], 1))
@run_on_ranks(gloo=True, settings={"timeout": 60.0})
def test_a_forward_of_one_rank_alone_is_its_own_where_ddps_is(rank: int, freezes: str):
    """In each place but after the first backward, where DDP's plans, and in all of them."""

    def step(model: nn.Module, at: list[int]) -> list[torch.Tensor]:
        frozen = {"nothing": nn.Identity(), "a part": model.module[0], "all": model.module}[freezes]
        found = []
        for i in range(7):
            if i in at and syncengine.rank() == rank:  # a map of saliency, say
                frozen.requires_grad_(False)
                inputs = data(7).requires_grad_()
                torch.autograd.grad(model(inputs).sum(), inputs)
                frozen.requires_grad_(True)
            syncengine.barrier()
            backwards(model, 1)
            found += gradients(model)
        return found

    alone = [i for i in range(7) if i != 1]
    for options in ({}, {"bucket_cap_mb": 0.001}, {"find_unused_parameters": True}):
        for at in [*([i] for i in alone), alone]:
            both(small, partial(step, at=at), **options)


@pytest.mark.parametrize("rank", [0, 1])
@run_on_ranks(gloo=True, settings={"timeout": 60.0})
def test_forwards_of_one_rank_alone_while_parameters_are_frozen(rank: int):
    def step(model: nn.Module) -> list[torch.Tensor | None]:
        first, last = model.module[0], model.module[2]
        found = []
        for i in range(10):
            first.requires_grad_(i % 4 != 3)
            if i != 1 and syncengine.rank() == rank:
                torch.autograd.grad(model(data(7)).sum(), list(last.parameters()))
                last.requires_grad_(False)  # for a look at another part alone
                model(data(8).requires_grad_())
                last.requires_grad_(True)
            syncengine.barrier()
            backwards(model, 1)
            found += gradients(model)
            model.zero_grad()
        return [grad for grad in found if grad is not None and grad.any()]

    both(small, step, find_unused_parameters=True)
    both(small, step, find_unused_parameters=True, bucket_cap_mb=0.001)


@run_on_ranks()
def test_gradients_stay_where_they_are():
    """What users of gradient_as_bucket_view rely on: no second copy, and addresses that last."""
    model = syncengine.Parallel(Mlp(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    addresses = []
    for i in range(4):
        optimizer.zero_grad(set_to_none=False)
        model(data(i)).square().mean().backward()
        optimizer.step()
        addresses.append([p.grad.data_ptr() for p in model.parameters()])
        copied = model.sync_stats()["copied_bytes"]
        assert copied.pop("small") <= sum(p.nbytes for p in model.parameters() if p.nbytes < 4096)
        assert not any(copied.values())
    assert addresses[0] == addresses[1] == addresses[2] == addresses[3]


@pytest.mark.thorough
@run_on_ranks(world=3, gloo=True, settings={"timeout": 60.0, "numerics": "ring"})
def test_gradients_of_before_are_scaled_as_by_ddp_with_views():
    """The program's own, which a model has before wrapping, or gets behind it."""

    def give(module: nn.Module) -> nn.Module:
        generator = torch.Generator().manual_seed(syncengine.rank())
        for parameter in module.parameters():
            parameter.grad = torch.rand(parameter.shape, generator=generator)
        return module

    def step(model: nn.Module, before: bool, zeroed: bool) -> list[torch.Tensor | None]:
        if not before:
            give(model)
        averages = []
        for i in range(3):
            model(data(i)).square().mean().backward()
            averages += gradients(model)
            if zeroed:
                model.zero_grad(set_to_none=False)
        return averages

    for before, zeroed in itertools.product((False, True), repeat=2):
        make = (lambda: give(Mlp())) if before else Mlp
        both(make, partial(step, before=before, zeroed=zeroed), gradient_as_bucket_view=True)


@run_on_ranks(world=3, gloo=True, settings={"timeout": 60.0, "numerics": "ring"})
def test_what_is_frozen_for_one_forward_is_scaled_as_by_ddp_with_views():
    """The plan changes twice, but DDP makes no new buckets, into which it would move what was accumulated."""

    def step(model: nn.Module) -> list[torch.Tensor | None]:
        with model.no_sync():
            model(data(0)).square().mean().backward()
        loss = model(data(1)).square().mean()
        first = next(model.parameters()).requires_grad_(False)
        model(data(2))
        first.requires_grad_(True)
        loss.backward()
        return gradients(model)

    both(Mlp, step, gradient_as_bucket_view=True)


@run_on_ranks(world=3, gloo=True, settings={"timeout": 60.0, "numerics": "ring"})
def test_what_is_accumulated_anew_is_scaled_as_by_ddp_with_views():
    """DDP makes its new buckets in the first forward behind the first step, before that has brought gradients."""

    def step(model: nn.Module) -> list[torch.Tensor | None]:
        backwards(model, 1)
        model.zero_grad()
        with model.no_sync():
            model(data(1)).square().mean().backward()
        model(data(2)).square().mean().backward()
        return gradients(model)

    both(Mlp, step, gradient_as_bucket_view=True)


def test_buckets_come_in_the_order_in_which_they_fill():
    """Those too that no cap has closed: torch's order of these depends on the device, and so on the rank."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.bfloat16]
    parameters = [torch.empty(10, dtype=dtype) for dtype in dtypes]
    planner = BucketPlanner.create(parameters, [False] * 5, True, False, None, None)
    assert planner.rebuilt(range(5)) == [[1], [0, 3], [2, 4]]


@run_on_ranks(gloo=True)
def test_unused_buckets_are_skipped():
    reduced = []
    for skip in (False, True):
        model = syncengine.Parallel(Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=skip, **CAP)
        model(data(), True).sum().backward()
        reduced.append(model.sync_stats()["reduced_bytes"])
        assert model.module.right.weight.grad is None
        assert_averaged(nn.ModuleList([model.module.stem, model.module.left]), model.module(data(), True).sum())
    assert reduced[0] - reduced[1] == 2 * 4 * (24 * 24 + 24)


@run_on_ranks()
def test_ranks_that_skip_different_buckets_hear_of_it():
    """DDP hangs."""
    model = syncengine.Parallel(Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=True, **CAP)
    with pytest.raises(SyncError, match="is used on some ranks and not on others"):
        model(data(), syncengine.rank() == 0).sum().backward()


@run_on_ranks(gloo=True)
def test_double_and_complex_gradients_of_gradients():
    """A penalty on the gradient: backward through a backward, then the average of the whole."""
    for dtype in (torch.float64, torch.complex128):
        model = syncengine.Parallel(nn.Linear(24, 3, dtype=dtype))

        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            x = x.to(dtype).requires_grad_()  # noqa: B023 (called at once)
            out = model(x).abs().square().sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            return out + slope.abs().square().sum()

        loss(model, data()).backward()
        assert_averaged(model.module, loss(model.module, data()))


@run_on_ranks()
def test_freezing_on_one_rank_only_is_an_error_on_all():
    model = syncengine.Parallel(Mlp())
    model(data()).sum().backward()
    if syncengine.rank() == 1:
        model.module.head.bias.requires_grad_(False)
    with pytest.raises(SyncError, match=r"head\.bias requires a gradient on rank 0, but not on rank 1"):
        model(data()).sum().backward()


@run_on_ranks(settings={"timeout": 60.0})
def test_freezing_on_one_rank_alone_when_all_is_planned_is_named():
    model = syncengine.Parallel(small())
    backwards(model, 5)
    if syncengine.rank() == 1:
        model.module[0].bias.requires_grad_(False)
    bucket = r"bucket 0 of Parallel\(Sequential\) \(2.bias, 2.weight, 0.(weight\)|bias, ...\))"
    with pytest.raises(Mismatch, match=f"called {bucket}"):  # by whoever sees it first
        backwards(model, 1)


@run_on_ranks(gloo=True)
def test_a_tied_parameter_of_which_one_name_is_ignored():
    def make(name: str) -> nn.Module:
        module = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24))
        module[2].weight = module[0].weight
        module._ddp_params_and_buffers_to_ignore = [name]
        return module

    for name in ("0.weight", "2.weight"):
        both(lambda name=name: make(name), backwards)
    model = syncengine.Parallel(make("0.weight"))
    assert model._model.names == ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


@run_on_ranks()
def test_buckets_follow_the_cap_and_the_order_of_readiness():
    layer = sum(p.nbytes for p in nn.Linear(24, 24).parameters()) / 2**20
    for options, before, buckets in (
        (CAP, 1, [[1], [0], [3], [2], [5], [4]]),
        ({"bucket_cap_mb": layer}, 1, [[1, 0], [3, 2], [5, 4]]),
        ({"bucket_cap_mb": 2 * layer}, 1, [[1, 0, 3, 2], [5, 4]]),
        # The order in which the first iteration of a static graph reduces says nothing.
        ({**CAP, "static_graph": True}, 2, [[1], [0], [3], [2], [5], [4]]),
    ):
        model = syncengine.Parallel(Opposite(3), **options)
        backwards(model, before)
        assert not model._has_rebuilt_buckets
        backwards(model, 1)
        assert model._has_rebuilt_buckets
        assert model._planning.plan == buckets  # in the order of rank 0, each layer's bias first
        assert model.sync_stats()["buckets"] == len(buckets)
        syncengine.all_gather(orders := torch.empty(2, 6, dtype=torch.int64), torch.tensor(model.reducer.ready_order()))
        assert orders.tolist() == [[1, 0, 3, 2, 5, 4], [5, 4, 3, 2, 1, 0]]


@pytest.mark.parametrize("place", ["forward", "backward"])
@run_on_ranks()
def test_a_step_that_is_refused_shows_no_order(place: str):
    model = syncengine.Parallel(Opposite(3), **CAP)
    register = model.module.register_forward_hook if place == "forward" else next(model.parameters()).register_hook
    failure = register(lambda *_: 1 / 0)
    with pytest.raises((ZeroDivisionError, SyncError), match="division by zero"):
        backwards(model, 1)
    failure.remove()
    model.zero_grad()
    for is_known in (False, True):
        backwards(model, 1)
        assert model._has_rebuilt_buckets == is_known
    assert model._planning.plan == [[1], [0], [3], [2], [5], [4]]


@run_on_ranks()
def test_a_backward_of_frozen_parameters_shows_no_order():
    model = syncengine.Parallel(Opposite(3), static_graph=True, **CAP)
    backwards(model, 1)
    model.requires_grad_(False)
    x = data().requires_grad_()
    if syncengine.rank() == 1:
        x.register_hook(lambda _: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model(x).sum().backward()
    model.requires_grad_(True)
    backwards(model, 2)
    assert model._planning.plan == [[1], [0], [3], [2], [5], [4]]


@run_on_ranks()
def test_buckets_are_rebuilt_with_unused_parameters_too():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    for _ in range(2):
        model(data(), True).sum().backward()
    assert model._has_rebuilt_buckets
