"""Averages on their way, or there, when a backward fails: what becomes of them, and who hears of it."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from parallel_models import CAP, Branches, assert_averaged, average, data, different_bits, gradients
from pool import run_on_ranks
from raising_model import Bad, Raising
from test_lost_steps import lose_step
from torch import nn

import syncengine
from syncengine.errors import Aborted, SyncError

AFTER = r"backward of Parallel\(Raising\) raised after its averages were complete"


def raising_behind() -> Raising:
    """A model that raises "behind" its averages, too: in a hook on a parameter."""
    module = Raising()
    module.first.weight.register_post_accumulate_grad_hook(lambda _: module.raise_at("behind"))
    return module


# `later`: the ranks that raise in each further step.
@pytest.mark.parametrize(("who", "with_hook", "later"), [(1, False, [[]]), (1, True, [[]]), (0, False, [[0, 1], []])])
@run_on_ranks()
def test_averages_that_one_rank_has_dropped_are_noticed(who: int, with_hook: bool, later: list[list[int]]):
    """A rank raises when all averages are there, and its error is caught; no later step that all lose hides that."""
    model = syncengine.Parallel(raising_behind())
    if with_hook:
        model.register_comm_hook(None, average)
    with pytest.raises(SyncError, match=rf"rank {who}: {AFTER}"):
        for i, raising in enumerate([[], [who], *later]):
            model.module.where = "behind" if syncengine.rank() in raising else ""
            with contextlib.suppress(Bad):
                model(data(i)).sum().backward()


@pytest.mark.parametrize("late_in_backward", [[], [0], [0, 1]], ids=str)
@run_on_ranks()
def test_averages_that_all_ranks_have_dropped_cost_a_step(late_in_backward: list[int]):
    """All ranks fail, some in backward, before the averages are there, and some in a hook, behind them."""
    model = syncengine.Parallel(raising_behind())
    where = "late" if syncengine.rank() in late_in_backward else "behind"
    raised = Bad if where == "late" or not late_in_backward else Aborted  # hooks run behind averages
    for i in range(6):
        fails = i in (1, 2, 4)
        model.zero_grad()
        with model.module.raising(where if fails else "", raised):
            model(data(i)).sum().backward()
        assert all((p.grad is None) == fails for p in model.parameters())
    syncengine.barrier()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("in_hook", [[], [0], [0, 1]], ids=str)
@run_on_ranks(settings={"timeout": 20.0})
def test_who_raises_behind_a_step_that_all_have_dropped_is_named(in_hook: list[int], steps: int):
    model = syncengine.Parallel(raising_behind())
    rank = syncengine.rank()
    for i in range(steps):
        with model.module.raising("behind" if rank in in_hook else "late", (Bad, Aborted)):
            model(data(i)).sum().backward()
    text = lose_step(model, "forward" if rank == 1 else "")
    assert text == ("" if rank == 1 else "rank 1 raised in forward: Bad: ") + "the batch is bad: forward"
    model(data()).sum().backward()


@run_on_ranks()
def test_a_model_is_wrapped_behind_a_step_that_all_have_lost():
    model = syncengine.Parallel(Raising())
    for i, where in enumerate(["", "late", "", "early", "forward", "late"]):
        model.zero_grad()
        with model.module.raising(where):
            model(data(i)).sum().backward()
        other = syncengine.Parallel(nn.Linear(24, 2))
        assert other.communicator is model.communicator
        other(data(i)).sum().backward()
    model(data()).sum().backward()


@pytest.mark.parametrize("world", [2, 3])
@run_on_ranks()
def test_who_refuses_with_all_but_one_bucket_on_their_way_keeps_nobody_waiting(world: int):
    """Rank 0 fails when nearly all its buckets are on their way, rank 1 before; a third rank does not fail."""
    model = syncengine.Parallel(Raising(), **CAP)
    model(data()).sum().backward()
    rank = syncengine.rank()
    text = lose_step(model, ("late", "middle", "")[rank])
    assert "the batch is bad" in text or "backward aborted" in text
    if rank == 0:
        del model  # it waits for nobody, and nobody for it
    else:
        model.reducer.begin_forward(True)  # when the step has ended
    syncengine.barrier()


@run_on_ranks()
def test_gradients_outlive_an_error_in_forward_with_a_communication_hook():
    model = syncengine.Parallel(Raising())
    model.register_comm_hook(None, average)
    model(data()).sum().backward()
    before = gradients(model)
    with model.module.raising("forward", (Bad, SyncError)):  # or the other's
        model(data())
    assert not different_bits(gradients(model), before)


@run_on_ranks()
def test_an_average_that_can_not_be_delivered_is_told():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    left = syncengine.rank() == 0
    model(data(0), left).sum().backward()
    if left:
        with torch.inference_mode():
            model.module.right.weight.grad = torch.zeros(24, 24)  # nothing can be written to it any more
    with pytest.raises(RuntimeError, match="inference tensor" if left else "rank 0: backward aborted"):
        for i in range(2):  # here, or in the next step
            model(data(i), left).sum().backward()
    assert model.module.right.weight.grad is None or not left
    with pytest.raises(SyncError):
        model(data(2), left)


@run_on_ranks(gloo=True)
def test_a_backward_that_fails_while_the_next_forward_waits_for_it_costs_its_own_step():
    """The backward runs on another thread of rank 1, and raises when the next forward has come."""
    model = syncengine.Parallel(Raising())
    total = model(data(0)).sum()
    if syncengine.rank() == 0:
        with pytest.raises(Aborted, match="rank 1: backward aborted"):
            total.backward()
    else:
        in_hook = threading.Event()

        def raise_late(grad: torch.Tensor) -> None:
            in_hook.set()
            time.sleep(0.2)  # the forward comes meanwhile; were it later, it would have nothing to wait for
            raise Bad("in a hook")

        hook = model.module.first.weight.register_hook(raise_late)
        thread = ThreadPoolExecutor(1)
        backward = thread.submit(total.backward)
        in_hook.wait()
        hook.remove()
    outputs = model(data(1))  # of rank 1 while its backward still runs
    if syncengine.rank() == 1:
        with pytest.raises(Bad, match="in a hook"), thread:
            backward.result()
    outputs.sum().backward()
    assert_averaged(model.module, model.module(data(1)).sum())
