"""Averages on their way, or there, when a backward fails: what becomes of them, and who hears of it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import CAP, Branches, data, different_bits, gradients
from pool import RankPool, run_on_ranks
from raising_model import Bad, Raising
from torch import nn

import syncengine
from syncengine.errors import Aborted, SyncError


def own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    average = bucket.buffer().clone()
    syncengine.all_reduce(average, "avg")
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(average)
    return future


@pytest.mark.parametrize("with_hook", [False, True])
@run_on_ranks()
def test_averages_that_one_rank_has_dropped_are_noticed(with_hook: bool):
    """A hook on a parameter raises on rank 1 when all averages are there, and the error is caught."""
    module = nn.Linear(24, 2)
    model = syncengine.Parallel(module)
    if with_hook:
        model.register_comm_hook(None, own_hook)
    bad = {"now": False}

    def listen(parameter: torch.Tensor) -> None:
        if bad["now"]:
            raise Bad("in a hook")

    module.weight.register_post_accumulate_grad_hook(listen)
    model(data()).sum().backward()
    bad["now"] = syncengine.rank() == 1
    with pytest.raises(SyncError) as error:
        for _ in range(2):
            try:
                model(data()).sum().backward()
            except Bad:
                bad["now"] = False
    text = str(error.value)
    assert "rank 1: backward of Parallel(Linear) raised after its averages were complete" in text


@pytest.mark.parametrize("late_in_backward", [[], [0], [0, 1]], ids=str)
@run_on_ranks()
def test_averages_that_all_ranks_have_dropped_cost_a_step(late_in_backward: list[int]):
    """All ranks fail, some in backward, before the averages are there, and some in a hook, behind them."""
    module = Raising()
    model = syncengine.Parallel(module)
    bad = {"now": False}

    def listen(parameter: torch.Tensor) -> None:
        if bad["now"]:
            raise Bad("in a hook")

    module.first.weight.register_post_accumulate_grad_hook(listen)
    for i in range(6):
        fails = i in (1, 2, 4)
        in_backward = syncengine.rank() in late_in_backward
        module.where = "late" if fails and in_backward else ""
        bad["now"] = fails and not in_backward
        module.zero_grad()
        raised = Bad if in_backward or not late_in_backward else Aborted  # hooks run behind averages
        with pytest.raises(raised) if fails else contextlib.nullcontext():
            model(data(i)).sum().backward()
        assert all((p.grad is None) == fails for p in module.parameters())
    syncengine.barrier()


def raises_behind_a_dropped_step(in_hook: list[int], steps: int) -> str:
    """All ranks lose some steps together; in the next one rank 1 alone raises."""
    module = Raising()
    model = syncengine.Parallel(module)
    bad = {"now": False}

    def listen(parameter: torch.Tensor) -> None:
        if bad["now"]:
            raise Bad("in a hook")

    module.first.weight.register_post_accumulate_grad_hook(listen)
    rank = syncengine.rank()
    for i in range(steps):
        bad["now"] = rank in in_hook
        module.where = "" if bad["now"] else "late"
        with pytest.raises((Bad, Aborted)):
            model(data(i)).sum().backward()
    bad["now"] = False
    module.where = "forward" if rank == 1 else ""
    with pytest.raises(Bad if rank == 1 else Aborted) as error:
        model(data()).sum().backward()
    module.where = ""
    model(data()).sum().backward()
    return str(error.value)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("in_hook", [[], [0], [0, 1]], ids=str)
def test_who_raises_behind_a_step_that_all_have_dropped_is_named(pool: RankPool, in_hook: list[int], steps: int):
    text, _ = pool.run(raises_behind_a_dropped_step, in_hook, steps, settings={"timeout": 20.0})
    assert text == "rank 1 raised in forward: Bad: the batch is bad: forward"


@run_on_ranks()
def test_a_model_is_wrapped_behind_a_step_that_all_have_lost():
    """A model that is wrapped behind a step that all have lost: nothing has failed."""
    model = syncengine.Parallel(Raising())
    for i, where in enumerate(["", "late", "", "early", "forward", "late"]):
        model.module.where = where
        model.zero_grad()
        with pytest.raises(Bad) if where else contextlib.nullcontext():
            model(data(i)).sum().backward()
        other = syncengine.Parallel(nn.Linear(24, 2))
        assert other.communicator is model.communicator
        other(data(i)).sum().backward()
    model.module.where = ""
    model(data()).sum().backward()


@run_on_ranks()
def test_a_step_that_all_lose_hides_none_that_one_has_lost():
    """Rank 0 has lost a step that the others have made; the next one all lose."""
    model = syncengine.Parallel(nn.Linear(24, 2))
    bad = {"now": False}

    def listen(parameter: torch.Tensor) -> None:
        if bad["now"]:
            raise Bad("in a hook")

    model.module.weight.register_post_accumulate_grad_hook(listen)
    with pytest.raises(SyncError) as error:
        for i in range(4):
            bad["now"] = i == 2 or (i == 1 and syncengine.rank() == 0)
            with contextlib.suppress(Bad):
                model(data(i)).sum().backward()
    text = str(error.value)
    assert "rank 0: backward of Parallel(Linear) raised after its averages were complete" in text


def late_and_early(world: int) -> str:
    """Rank 0 fails when nearly all its buckets are on their way, rank 1 before; a third rank does not fail."""
    model = syncengine.Parallel(Raising(), **CAP)
    model(data()).sum().backward()
    rank = syncengine.rank()
    model.module.where = ("late", "middle", "")[rank]
    with pytest.raises(Bad if rank < 2 else Aborted) as error:
        model(data()).sum().backward()
    model.module.where = ""
    if rank == 0:
        del model  # it waits for nobody, and nobody for it
        syncengine.barrier()
    else:
        model.reducer.begin_forward(True)  # when the step has ended
        syncengine.barrier()
    return str(error.value)


@pytest.mark.parametrize("world", [2, 3])
def test_who_refuses_with_all_but_one_bucket_on_their_way_keeps_nobody_waiting(pool: RankPool, world: int):
    texts = pool.run(late_and_early, world, world=world)
    assert all("backward aborted" in text for text in texts[2:])


@run_on_ranks()
def test_gradients_outlive_an_error_in_forward_with_a_communication_hook():
    module = Raising()
    model = syncengine.Parallel(module)
    model.register_comm_hook(None, own_hook)
    model(data()).sum().backward()
    before = gradients(module)
    module.where = "forward"
    with pytest.raises((Bad, SyncError)):  # or the other's
        model(data())
    assert not different_bits(gradients(module), before)


def grad_of_inference() -> str:
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    left = syncengine.rank() == 0
    model(data(0), left).sum().backward()
    if left:
        with torch.inference_mode():
            model.module.right.weight.grad = torch.zeros(24, 24)  # nothing can be written to it any more
    with pytest.raises(RuntimeError) as error:  # here, or in the next step
        for i in range(2):
            model(data(i), left).sum().backward()
    assert model.module.right.weight.grad is None or not left
    with pytest.raises(SyncError):
        model(data(2), left)
    return str(error.value)


def test_an_average_that_can_not_be_delivered_is_told(pool: RankPool):
    first, other = pool.run(grad_of_inference)
    assert "inference tensor" in first
    assert "rank 0: backward aborted" in other
