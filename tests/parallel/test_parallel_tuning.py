"""The size of buckets is chosen from measurements; bits never depend on it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from parallel_models import Mlp, backwards, both, gradients, small
from pool import RankPool, run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import SyncError, Timeout
from syncengine.parallel import planning, tuning
from syncengine.parallel.tuning import CAPS, MIB, Link, choose_cap, end_of_backward

FAST = Link((1024, MIB, 16 * MIB), (1e-6, 1e-4, 1.6e-3))  # 10 GB/s, and nothing to start
SLOW_START = Link((1024, MIB, 16 * MIB), (1e-2, 1.01e-2, 1.16e-2))  # the same, and 10 ms to start


def plan_of(sizes: list[int]) -> Any:
    def plan(cap: int) -> list[list[int]]:
        buckets: list[list[int]] = [[]]
        for i in range(len(sizes)):
            buckets[-1].append(i)
            if sum(sizes[j] for j in buckets[-1]) >= cap:
                buckets.append([])
        return [bucket for bucket in buckets if bucket]

    return plan


SIZES = [256 * 1024] * 128  # 32 MiB
EVENLY = {i: i * 1e-4 for i in range(128)}  # seconds: 12.8 ms in all


def choose(link: Link, ready: dict[int, float], overlaps: bool) -> int:
    return choose_cap(MIB, plan_of(SIZES), ready, SIZES, link, overlaps)


def test_what_costs_to_start_is_started_seldom():
    assert choose(SLOW_START, EVENLY, overlaps=True) > 8 * MIB
    assert choose(SLOW_START, EVENLY, overlaps=False) == 32 * MIB


def test_what_costs_nothing_to_start_is_started_early():
    assert choose(FAST, EVENLY, overlaps=True) <= MIB
    slower = Link(FAST.sizes, [4 * s for s in FAST.seconds])  # the link is what backward waits for
    assert choose(slower, EVENLY, overlaps=True) <= MIB


def test_the_usual_cap_stays_unless_another_is_clearly_better():
    at_once = dict.fromkeys(EVENLY, 0.0)
    for overlaps in (True, False):
        assert choose(FAST, at_once, overlaps) == MIB


def test_all_reduces_between_hosts_need_no_processor():
    assert tuning.can_overlap(10**6, between_hosts=True)
    assert not tuning.can_overlap(10**6, between_hosts=False)
    assert tuning.can_overlap(0, between_hosts=False)


def test_costs_between_and_beyond_what_was_measured():
    assert FAST.cost(1) == 1e-6
    assert FAST.cost(MIB) == 1e-4
    assert FAST.cost(32 * MIB) == pytest.approx(3.2e-3)
    assert 1e-4 < FAST.cost(2 * MIB) < 1.6e-3


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 64 * MIB)), min_size=1, max_size=20))
def test_overlapping_is_never_slower(buckets: list[tuple[float, int]]):
    ready, sizes = zip(*buckets, strict=True)
    with_, without = (end_of_backward(ready, sizes, FAST, overlaps) for overlaps in (True, False))
    assert max(ready) <= with_ <= without + 1e-12


def data(step: int) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + syncengine.rank()))


def train(steps: int, **options: Any) -> tuple[syncengine.Parallel, list[torch.Tensor], list[int]]:
    torch.manual_seed(0)
    model = syncengine.Parallel(Mlp(), **options)
    seen = []
    for i in range(steps):
        model.zero_grad()
        model(data(i)).square().mean().backward()
        seen.append(model.sync_stats()["buckets"])
    return model, [p.grad.clone() for p in model.parameters()], seen


def chosen_by_rank_0() -> tuple[int, list[int]]:
    """Ranks that measure differently; rank 0's choice is everybody's."""
    other = 8 * MIB if syncengine.rank() == 0 else 256 * 1024
    asked = []

    def choose(*args: Any) -> int:
        asked.append(args)
        return other

    real, planning.choose_cap = planning.choose_cap, choose
    try:
        model, tuned, seen = train(8)
    finally:
        planning.choose_cap = real
    assert len(asked) == 1
    usual, plan_of, ready, sizes, link, overlaps = asked[0]
    assert usual == MIB
    assert set(ready) == set(range(len(sizes)))
    assert all(0 <= at < 60 for at in ready.values())
    assert list(link.seconds) == sorted(link.seconds) or min(link.seconds) > 0
    assert real(usual, plan_of, ready, sizes, link, overlaps) in CAPS
    for cap in (0.1, None):
        _, pinned, _ = train(8, bucket_cap_mb=cap)
        assert all(torch.equal(a, b) for a, b in zip(tuned, pinned, strict=True))
    return model._planning.planner.cap, seen


def test_all_ranks_take_rank_0s_choice(pool: RankPool):
    for cap, seen in pool.run(chosen_by_rank_0, world=3):
        assert cap == 8 * MIB
        assert seen == [3, 3, 3, 1, 1, 1, 1, 1]


def never_measured(**options: Any) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("measured")

    real, planning.measure_link = planning.measure_link, fail
    try:
        model, _, _ = train(6, **options)
    finally:
        planning.measure_link = real
    assert model._planning.planner.cap == (25 * MIB if not options else 3 * MIB)


def pinned() -> None:
    never_measured(bucket_cap_mb=3)


def test_bucket_cap_mb_pins_the_plan(pool: RankPool):
    pool.run(pinned)


def test_ring_follows_ddp(pool: RankPool):
    pool.run(never_measured, settings={"numerics": "ring"})


def freezes_while_timing() -> None:
    model = syncengine.Parallel(Mlp())
    for i in range(8):
        model.module.head.requires_grad_(i not in (2, 5))
        model.zero_grad()
        model(data(i)).square().mean().backward()
        assert (model.module.head.weight.grad is None) == (i in (2, 5))


def test_parameters_may_be_frozen_while_backwards_are_timed(pool: RankPool):
    pool.run(freezes_while_timing)


@run_on_ranks(gloo=True)
def test_a_rank_may_keep_models_that_others_have_dropped():
    """Below a group of the backend only the models keep the Python object of the communicator."""
    group, rank, kept = dist.new_group(backend="syncengine"), dist.get_rank(), []
    for _ in range(3):
        model = syncengine.Parallel(nn.Linear(24, 2), process_group=group)
        backwards(model, 6)
        kept += [model] * (rank == 0)
        del model


def forward_alone(rank: int, after: int) -> str:
    model = syncengine.Parallel(nn.Linear(24, 2))
    backwards(model, after)
    text = ""
    if syncengine.rank() == rank:
        with pytest.raises(Timeout) as error:
            torch.autograd.grad(model(data(7)).sum(), model.module.weight)
        text = str(error.value)
    dist.barrier()  # Gloo's
    return text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("after", [1, 3])
def test_a_forward_of_one_rank_alone_that_plans_is_named(pool: RankPool, rank: int, after: int):
    """The second is where DDP's waits, too; the fourth chooses the size."""
    texts = pool.run(forward_alone, rank, after, gloo=True, settings={"timeout": 3.0})
    assert "in planning the buckets of Parallel(Linear) in a forward with gradients enabled" in texts[rank]


def forwards_alone(rank: int, planning: list[int], options: dict[str, Any]) -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        found = []
        for i in range(6):
            if i not in planning and syncengine.rank() == rank:
                torch.autograd.grad(model(data(7)).sum(), list(model.parameters()))
            syncengine.barrier()
            backwards(model, 1)
            found += gradients(model)
        return found

    both(small, step, **options)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("planning", "options"), [([1, 3], {}), ([1], {"bucket_cap_mb": 1.0})], ids=["tuned", "cap"])
def test_other_forwards_of_one_rank_alone_are_its_own(
    pool: RankPool, rank: int, planning: list[int], options: dict[str, Any]
):
    """As a map of saliency; ``planning``: how many backwards are before a forward that is collective."""
    pool.run(forwards_alone, rank, planning, options, gloo=True, timeout=30.0)


def alone_with_parts_frozen(rank: int) -> None:
    def step(model: nn.Module) -> list[torch.Tensor | None]:
        first, last = model.module[0], model.module[2]
        found = []
        for i in range(10):
            first.requires_grad_(i % 4 != 3)
            if i not in (1, 3) and syncengine.rank() == rank:
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


@pytest.mark.parametrize("rank", [0, 1])
def test_forwards_of_one_rank_alone_while_parameters_are_frozen(pool: RankPool, rank: int):
    pool.run(alone_with_parts_frozen, rank, gloo=True, settings={"timeout": 10.0})


def frozen_on_one_rank_later() -> str:
    model = syncengine.Parallel(small())
    backwards(model, 5)
    if syncengine.rank() == 1:
        model.module[0].bias.requires_grad_(False)
    with pytest.raises(SyncError) as error:
        backwards(model, 1)
    return f"{type(error.value).__name__}: {error.value}"


def test_freezing_on_one_rank_alone_when_all_is_planned_is_named(pool: RankPool):
    for text in pool.run(frozen_on_one_rank_later, settings={"timeout": 10.0}):
        assert text.startswith("Mismatch: ")  # by whoever sees it first
        bucket = r"bucket 0 of Parallel\(Sequential\) \(2.bias, 2.weight, 0.(weight\)|bias, ...\))"
        assert re.search(f"called {bucket}", text)
