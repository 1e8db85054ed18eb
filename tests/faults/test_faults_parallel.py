"""Faults in the middle of training: in forward, in backward, and at each state of a gradient bucket."""

import signal
from pathlib import Path

import pytest
import torch
from faults import Outcome, check_killed, my_rank, needs_hooks, others, set_fault, suffer, wait_for_file
from faults_model import Model, model_and_step
from marks import mostly_nightly
from pool import run_on_ranks

import syncengine

BUCKET_POINTS = ["announced", "opened", "staged", "reducing", "reduced", "pulled", "finished"]


def expected_gradients(world):
    """Of one step, averaged in rank order, computed by one process."""
    torch.manual_seed(0)
    model = Model()
    total = [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(world):
        model.zero_grad()
        torch.manual_seed(rank)
        model(torch.randn(8, 128)).square().sum().backward()
        for sum, p in zip(total, model.parameters(), strict=True):
            sum.add_(p.grad)
    return [sum.mul_(1 / world) for sum in total]


def no_mixture(model, world) -> bool:
    """Every gradient is the average, bit for bit, or None."""
    pairs = zip(model.parameters(), expected_gradients(world), strict=True)
    return all(p.grad is None or torch.equal(p.grad, whole) for p, whole in pairs)


def die_in_training(victim, fault) -> Outcome:
    set_fault(victim, fault)

    def body(step):
        model, train = model_and_step()
        world = syncengine.world_size()
        try:
            for _ in range(50):
                step()
                train()
        except syncengine.errors.SyncError:
            assert no_mixture(model, world)
            raise

    return suffer(body, timeout=100.0)


@needs_hooks
@pytest.mark.parametrize(
    ("world", "victim", "point"),
    [
        *mostly_nightly((2, 0, point) for point in BUCKET_POINTS),
        *((3, 1, point) for point in BUCKET_POINTS),
        (3, 0, "scheduled"),
        *mostly_nightly([(8, 4, "reducing")]),
    ],
)
def test_killed_in_backward(pool, world, victim, point):
    # Past the broadcasts of construction, in the middle of the second step.
    number = 8 if point in ("announced", "scheduled") else 40
    with pool.spawn_ranks(die_in_training, victim, f"{point}:{number}:kill", world=world, settings=None) as ranks:
        check_killed(ranks, victim)


def boom():
    raise ValueError("boom")


@run_on_ranks(world=3, settings=None)
def test_texts_name_ranks_of_the_job():
    def body(step):
        world = syncengine.default_communicator()
        group = world.split([0] if my_rank() == 0 else [1, 2])
        if my_rank() == 0:
            return "not asked"
        torch.manual_seed(0)
        model = Model()
        parallel = syncengine.Parallel(model, process_group=group)
        if my_rank() == 2:
            model.at_forward = boom
        try:
            parallel(torch.randn(8, 128)).sum().backward()
        except ValueError:
            return "raised"

    told = suffer(body, timeout=100.0).text
    assert told == ("rank 2 raised in forward: ValueError: boom" if my_rank() == 1 else "")


def stop_in_training(fault, woken) -> Outcome:
    set_fault(1, fault)

    def body(step):
        model, train = model_and_step()
        world = syncengine.world_size()
        try:
            for _ in range(50):
                step()
                train()
        finally:
            if my_rank() != 1:
                assert no_mixture(model, world)
                before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                Path(f"{woken}.{my_rank()}").touch()
                wait_for_file(woken)
                for p, grad in zip(model.parameters(), before, strict=True):
                    assert (p.grad is None) == (grad is None) and (grad is None or torch.equal(p.grad, grad))

    return suffer(body, timeout=2.0)


@pytest.mark.thorough
@needs_hooks
@pytest.mark.parametrize("world", mostly_nightly([2, 3], 1))
def test_stopped_in_backward_and_woken(pool, tmp_path, world):
    woken = tmp_path / "woken"
    with pool.spawn_ranks(stop_in_training, "reducing:40:stop", str(woken), world=world, settings=None) as ranks:
        for number in range(0, world, 2):
            wait_for_file(f"{woken}.{number}")
        ranks[1].signal(signal.SIGCONT)
        ranks[1].result().check("Timeout")
        woken.touch()
        for rank in others(ranks, 1):
            rank.result().check("Timeout", "waits for rank 1 since", "bucket", "layers.")


@pytest.mark.parametrize("world", mostly_nightly([2, 3, 8], 1))
@run_on_ranks(settings=None)
def test_collective_where_others_run_backward(world):
    def body(step):
        _, train = model_and_step()
        train()
        step()
        if my_rank() == world - 1:
            syncengine.all_reduce(torch.ones(100))
        else:
            train()

    outcome = suffer(body, timeout=100.0)
    outcome.check("Mismatch", f"rank {world - 1}", soon=True)
    assert "all_reduce(sum, float32, 100 elements)" in outcome.text or "its collective call number" in outcome.text
