"""Errors in the middle of training: every rank gets one with a name, soon, and no gradient is half averaged."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults import WITHIN, wait_for_failure, wait_for_file, wait_until
from parallel_models import CAP, Mlp, data
from pool import RankPool, run_on_ranks
from raising_model import InBackward
from torch import nn

import syncengine
from syncengine.errors import Aborted, InvalidUsage, Mismatch, PeerLost, SyncError, Timeout

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


def exact_average(module: nn.Module) -> list[torch.Tensor]:
    means = [torch.zeros_like(p) for p in module.parameters()]
    for r in range(syncengine.world_size()):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(r))
        loss = module.last(module.first(x)).square().sum()
        for mean, grad in zip(means, torch.autograd.grad(loss, list(module.parameters())), strict=True):
            mean += grad / syncengine.world_size()
    return means


def raises_in_backward(act: Callable[[], None]) -> tuple[str, float]:
    torch.manual_seed(0)
    module = Acting(act)
    expected = exact_average(module)
    model = syncengine.Parallel(module, **CAP)
    loss = model(data()).square().sum()
    begin = time.monotonic()
    with pytest.raises(KeyError if syncengine.rank() == 1 else Aborted) as error:
        loss.backward()
    took = time.monotonic() - begin
    assert all(p.grad is None for p in module.parameters())
    module.act = lambda: None
    model(data()).square().sum().backward()
    for p, mean in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, mean)
    return str(error.value), took


@pytest.mark.parametrize("world", [2, 3])
def test_an_error_in_backward_reaches_all_ranks(pool: RankPool, world: int):
    answers = pool.run(raises_in_backward, fail, world=world)
    for rank, (text, took) in enumerate(answers):
        assert took < WITHIN
        assert ("the batch is bad" if rank == 1 else "rank 1: backward aborted") in text


@run_on_ranks()
def test_an_error_before_the_first_gradient_reaches_all_ranks():
    """In the model, but before any gradient of a parameter is ready."""
    module = Mlp()
    model = syncengine.Parallel(module)
    if syncengine.rank() == 1:
        module.head.register_forward_hook(lambda head, inputs, output: InBackward.apply(output, fail))
    with pytest.raises(KeyError if syncengine.rank() == 1 else Aborted, match=r"bad|rank 1: backward aborted"):
        model(data()).sum().backward()


def raises_in_forward() -> tuple[str, float]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no such token: {x.shape}")

    model = syncengine.Parallel(Mlp())
    if syncengine.rank() == 1:
        model.module.forward = forward
        with torch.no_grad(), pytest.raises(ValueError, match="no such token"):
            model(data())  # evaluation concerns nobody else
    syncengine.barrier()
    begin = time.monotonic()
    if syncengine.rank() == 1:
        time.sleep(LATER)
    with pytest.raises(ValueError if syncengine.rank() == 1 else Aborted) as error:
        model(data()).sum().backward()
    return str(error.value), time.monotonic() - begin


def test_an_error_in_forward_reaches_all_ranks(pool: RankPool):
    own = pool.run(raises_in_forward, world=3)
    assert own[1][0] == "no such token: torch.Size([5, 24])"
    for text, took in (own[0], own[2]):
        assert "rank 1 raised in forward: ValueError: no such token: torch.Size([5, 24])" in text
        assert took < WITHIN


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.always, self.sometimes = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.always(self.frozen(x))
        return self.sometimes(x) if both else x


@pytest.mark.parametrize("on_ranks", [[0], [0, 1]])
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
    text = f"{type(error.value).__name__}: {error.value}"
    rank = syncengine.rank()
    assert "Expected to have finished reduction in the prior iteration before starting a new one" in text
    assert ("InvalidUsage: " if rank in on_ranks else "Aborted: ") in text[:14]
    culprit = rank if rank in on_ranks else 0
    assert f"Parameter indices which did not receive grad for rank {culprit}: 2 3" in text
    assert f"Parameters which did not receive grad for rank {culprit}: sometimes.weight, sometimes.bias" in text


def lacks_peer() -> str:
    model = syncengine.Parallel(Mlp())
    loss = model(data()).sum()
    if syncengine.rank() == 1:
        wait_for_failure()
        return ""
    with pytest.raises(Timeout) as error:
        loss.backward()
    return str(error.value)


def test_a_missing_backward_names_bucket_and_parameters(pool: RankPool):
    text, _ = pool.run(lacks_peer, settings={"timeout": 2.0})
    assert "rank 1" in text
    assert "bucket 0 of Parallel(Mlp) (head.bias, head.weight, layers.5.bias, ...)" in text


@run_on_ranks(timeout=20.0)
def test_different_buckets_are_a_mismatch():
    model = syncengine.Parallel(Mlp(), init_sync=False, bucket_cap_mb=[100.0, 0.1][syncengine.rank()])
    with pytest.raises(Mismatch, match=r"bucket 0 of Parallel\(Mlp\)"):
        model(data()).sum().backward()


@run_on_ranks()
def test_a_sparse_gradient_is_refused_by_name():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(x, self.table, sparse=True)

    with pytest.raises(SyncError, match="parameter table got a Sparse one"):  # the other's may come at any time
        model = syncengine.Parallel(Functional())
        model(torch.tensor([1, 2])).sum().backward()


# --- Ranks of their own: they die


def die() -> None:
    time.sleep(LATER)
    os.kill(os.getpid(), signal.SIGKILL)


def survives(act: Callable[[], None]) -> str:
    model = syncengine.Parallel(Acting(act), **CAP)
    loss = model(data()).sum()
    with pytest.raises(PeerLost) as error:
        loss.backward()
    assert model.module.first.weight.grad is None
    return str(error.value)


def test_a_rank_killed_in_backward_is_named(pool: RankPool):
    with pool.spawn_ranks(survives, die, world=3) as ranks:
        for rank in (0, 2):
            assert "rank 1" in ranks[rank].result(timeout=15.0)


def waits_for_ever(folder: Path) -> float:
    model = syncengine.Parallel(Mlp())
    loss = model(data()).sum()
    if syncengine.rank() == 1:
        wait_for_file(folder / "over")
        return 0.0
    (folder / "waits").touch()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    return time.monotonic()


def test_ctrl_c_ends_the_wait_in_backward(pool: RankPool, tmp_path: Path):
    with pool.spawn_ranks(waits_for_ever, tmp_path) as ranks:
        wait_for_file(tmp_path / "waits")
        wait_until("S", ranks[0].pid)
        pressed = time.monotonic()
        ranks[0].signal(signal.SIGINT)
        assert ranks[0].result() - pressed < WITHIN
        (tmp_path / "over").touch()


def test_invalid_usage_is_what_frameworks_catch():
    assert issubclass(InvalidUsage, RuntimeError)
    assert issubclass(InvalidUsage, ValueError)
