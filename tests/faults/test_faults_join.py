"""A rank that raises inside join(): the others hear of it where they next wait for it, and all can go on."""

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


ERRORS = {"data": "Spoiled", "misuse": "InvalidUsage", "loss": "Spoiled", "backward": "ZeroDivisionError"}


@pytest.mark.parametrize(
    ("where", "counts", "failing"),
    [
        *(("data", counts, [1]) for counts in ([4, 2, 4], [1, 2, 6], [3, 0, 3], [2, 2, 2])),
        ("data", [2, 2, 5, 2], [1, 3]),
        ("misuse", [2, 5], [0]),
        ("loss", [4, 2, 4], [1]),
        ("backward", [4, 2, 4], [1]),
    ],
)
def test_an_error_in_join(pool: RankPool, where: str, counts: list[int], failing: list[int]) -> None:
    """In the middle of a step the others wait for its gradients: that ends their communicator, and all open another."""
    outcomes = pool.run(fail_in_join, where, counts, failing, world=len(counts))
    first, between_steps = failing[0], where in ("data", "misuse")
    told = f"rank {first} raised in join() of Parallel(Mlp): {ERRORS[where]}: {outcomes[first][1]}"
    for rank, (kind, text, seconds, same) in enumerate(outcomes):
        assert kind == (ERRORS[where] if rank in failing else "Aborted")
        assert seconds < WITHIN
        assert same or not between_steps
        if rank not in failing:
            assert (text == told) if between_steps else ("rank 1" in text)
        elif where == "data":
            assert text == f"a bad file on rank {rank}"
