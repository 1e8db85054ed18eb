"""Errors in the middle of training: every rank gets one with a name, soon, and no gradient is half averaged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults import wait_for_failure
from marks import mostly_nightly
from parallel_models import CAP, Mlp, averages, data
from pool import run_on_ranks
from raising_model import InBackward
from torch import nn

import syncengine
from syncengine.errors import Aborted, InvalidUsage, Mismatch, SyncError, Timeout

LATER = 1.0  # seconds until all ranks have come as far


class Acting(nn.Module):
    """Runs `act` on rank 1 between the gradients of its last and of its first layers."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(24, 300), nn.Linear(300, 300), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if syncengine.rank() == 1:
            x = InBackward.apply(x, self.act)
        return self.last(x)


def fail() -> None:
    time.sleep(LATER)
    raise KeyError("the batch is bad")


def fails_on_rank_1(kind: type[Exception], own: str, others: str) -> contextlib.AbstractContextManager[Any]:
    """Rank 1 gets its own error, and the others are told of it, before they would run into a timeout."""
    return pytest.raises(kind, match=own) if syncengine.rank() == 1 else pytest.raises(Aborted, match=others)


@pytest.mark.thorough
@pytest.mark.parametrize("world", mostly_nightly([2, 3, 8], 1))
@run_on_ranks(gloo=True)
def test_an_error_in_backward_reaches_all_ranks(world: int):
    torch.manual_seed(0)
    module = Acting(fail)
    model = syncengine.Parallel(module, **CAP)
    loss = model(data()).square().sum()
    with fails_on_rank_1(KeyError, "the batch is bad", "rank 1: backward aborted"):
        loss.backward()
    assert all(p.grad is None for p in module.parameters())
    module.act = lambda: None
    expected = averages(module, module(data()).square().sum())
    model(data()).square().sum().backward()
    for p, mean in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, mean)


@pytest.mark.thorough
@run_on_ranks()
def test_an_error_before_the_first_gradient_reaches_all_ranks():
    """In the model, but before any gradient of a parameter is ready."""
    module = Mlp()
    model = syncengine.Parallel(module)
    if syncengine.rank() == 1:
        module.head.register_forward_hook(lambda head, inputs, output: InBackward.apply(output, fail))
    with fails_on_rank_1(KeyError, "the batch is bad", "rank 1: backward aborted"):
        model(data()).sum().backward()


@pytest.mark.thorough
@run_on_ranks(world=3)
def test_an_error_in_forward_reaches_all_ranks():
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no such token: {x.shape}")

    model = syncengine.Parallel(Mlp())
    if syncengine.rank() == 1:
        model.module.forward = forward
        with torch.no_grad(), pytest.raises(ValueError, match="no such token"):
            model(data())  # evaluation concerns nobody else
    syncengine.barrier()
    if syncengine.rank() == 1:
        time.sleep(LATER)
    text = r"no such token: torch.Size\(\[5, 24\]\)"
    with fails_on_rank_1(ValueError, f"^{text}", f"rank 1 raised in forward: ValueError: {text}"):
        model(data()).sum().backward()


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.always, self.sometimes = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.always(self.frozen(x))
        return self.sometimes(x) if both else x


@pytest.mark.thorough
@pytest.mark.parametrize("on_ranks", mostly_nightly([[0], [0, 1]], 0))
@run_on_ranks()
def test_unfinished_reduction_names_the_parameters(on_ranks: list[int]):
    model = syncengine.Parallel(Sometimes())
    forgets = syncengine.rank() in on_ranks
    loss = model(data(), not forgets).sum()
    if forgets:
        loss.backward()
        time.sleep(LATER)
    with pytest.raises(SyncError) as error:
        model(data(), False) if forgets else loss.backward()
    (text,) = error.value.args
    assert "Expected to have finished reduction in the prior iteration before starting a new one" in text
    assert error.type is (InvalidUsage if forgets else Aborted)
    culprit = syncengine.rank() if forgets else 0
    assert f"Parameter indices which did not receive grad for rank {culprit}: 2 3\n" in text  # Lightning replaces it
    assert f"Parameters which did not receive grad for rank {culprit}: sometimes.weight, sometimes.bias" in text


@pytest.mark.thorough
@run_on_ranks(settings={"timeout": 2.0})
def test_a_missing_backward_names_bucket_and_parameters():
    model = syncengine.Parallel(Mlp())
    loss = model(data()).sum()
    if syncengine.rank() == 1:
        wait_for_failure()
        return
    with pytest.raises(Timeout, match="rank 1") as error:
        loss.backward()
    assert "bucket 0 of Parallel(Mlp) (head.bias, head.weight, layers.5.bias, ...)" in str(error.value)


@run_on_ranks()
def test_different_buckets_are_a_mismatch():
    model = syncengine.Parallel(Mlp(), init_sync=False, bucket_cap_mb=[100.0, 0.1][syncengine.rank()])
    with pytest.raises(Mismatch, match=r"bucket 0 of Parallel\(Mlp\)"):
        model(data()).sum().backward()


def test_invalid_usage_is_what_frameworks_catch():
    assert issubclass(InvalidUsage, RuntimeError)
    assert issubclass(InvalidUsage, ValueError)
