"""A rank that raises inside join(): the others hear of it where they next wait for it, and all can go on."""

from __future__ import annotations

import time

import pytest
import torch
from faults import WITHIN
from parallel_models import Mlp
from pool import RankPool

import syncengine
from syncengine.errors import Aborted, InvalidUsage


class Spoiled(Exception):
    """What the test's data set raises."""


def batches(count: int):
    for i in range(count):
        yield torch.full((2, 24), float(i + syncengine.rank()))


def step(model: torch.nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.01 * parameter.grad)


def fail_in_join(where: str, counts: list[int], failing: list[int]) -> tuple[str, str, float, bool]:
    """The ranks in `failing` raise at the end of their batches. Then all wrap the module anew, and train."""
    torch.manual_seed(0)
    communicator, rank = syncengine.default_communicator(), syncengine.rank()
    module = Mlp()
    model = syncengine.Parallel(module)
    kind = text = ""
    started = time.monotonic()
    try:
        with model.join():
            for batch in batches(counts[rank]):
                step(model, batch)
            if rank in failing:
                if where == "data":
                    raise Spoiled(f"a bad file on rank {rank}")
                if where == "misuse":
                    syncengine.all_reduce(torch.ones(3, dtype=torch.int32), "avg")
                loss = model(torch.ones(2, 24)).sum()
                if where == "loss":
                    raise Spoiled(f"a bad file on rank {rank}")
                loss.register_hook(lambda _: 1 / 0)
                loss.backward()
    except (Spoiled, Aborted, InvalidUsage, ZeroDivisionError) as error:
        kind, text = type(error).__name__, str(error)
    seconds = time.monotonic() - started
    model = syncengine.Parallel(module)
    with model.join():
        for batch in batches(2 + rank):
            step(model, batch)
    step(model, torch.ones(2, 24))
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = torch.empty(syncengine.world_size() * values.numel())
    syncengine.all_gather(everyone, values)
    assert all(torch.equal(part, values) for part in everyone.chunk(syncengine.world_size()))
    return kind, text, seconds, syncengine.default_communicator() is communicator


@pytest.mark.parametrize("counts", [[4, 2, 4], [1, 2, 6], [3, 0, 3], [2, 2, 2]])
def test_an_error_between_two_steps(pool: RankPool, counts: list[int]) -> None:
    for rank, outcome in enumerate(pool.run(fail_in_join, "data", counts, [1], world=3)):
        kind, text, seconds, same = outcome
        assert same and seconds < WITHIN
        assert text.endswith("a bad file on rank 1")
        assert kind == ("Spoiled" if rank == 1 else "Aborted")
        assert rank == 1 or text == "rank 1 raised in join() of Parallel(Mlp): Spoiled: a bad file on rank 1"


def test_a_call_that_this_rank_alone_refuses(pool: RankPool) -> None:
    mine, other = pool.run(fail_in_join, "misuse", [2, 5], [0])
    assert mine[0] == "InvalidUsage" and mine[3] and other[3]
    assert other[:2] == ("Aborted", f"rank 0 raised in join() of Parallel(Mlp): InvalidUsage: {mine[1]}")


def test_several_ranks_at_once(pool: RankPool) -> None:
    for rank, (kind, text, _, same) in enumerate(pool.run(fail_in_join, "data", [2, 2, 5, 2], [1, 3], world=4)):
        assert same
        assert (kind, text) == (
            ("Spoiled", f"a bad file on rank {rank}")
            if rank in (1, 3)
            else ("Aborted", "rank 1 raised in join() of Parallel(Mlp): Spoiled: a bad file on rank 1")
        )


@pytest.mark.parametrize("where", ["loss", "backward"])
def test_an_error_in_the_middle_of_a_step(pool: RankPool, where: str) -> None:
    """The others wait for its gradients: that ends their communicator, and all open another one."""
    for rank, (kind, text, seconds, _) in enumerate(pool.run(fail_in_join, where, [4, 2, 4], [1], world=3)):
        assert seconds < WITHIN
        assert kind == ("Aborted" if rank != 1 else "Spoiled" if where == "loss" else "ZeroDivisionError")
        assert "rank 1" in text or rank == 1
