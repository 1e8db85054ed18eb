"""Texts of errors that are no text, and a stderr that nobody reads: the others hear all the same, and nobody waits."""

import fcntl
import logging
import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from faults import Outcome, ended, my_rank, suffer
from parallel_models import data
from pool import RankPool, run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import Aborted, Mismatch, error_text
from syncengine.lines import print_line

NO_TEXT = os.fsdecode(b"caf\xe9")


class Bad(Exception):
    """An error of a library whose ``__str__`` has a flaw."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS: dict[str, tuple[Callable[[], Exception], str]] = {
    "surrogate": (lambda: ValueError(NO_TEXT), "ValueError: caf\\udce9"),
    "no str": (Bad, "Bad: (its text can't be had: RuntimeError)"),
}


class Raising(nn.Linear):
    error: Exception | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("how", ERRORS)
def test_the_text_of_any_error(how: str):
    make, text = ERRORS[how]
    assert error_text(make()) == text
    assert error_text(make(), named=False) == text.partition(": ")[2]


@pytest.mark.parametrize("how", ERRORS)
@run_on_ranks()
def test_a_forward_that_raises_it_costs_one_step(how: str):
    make, text = ERRORS[how]
    model = syncengine.Parallel(Raising(24, 4))
    model.module.error = make() if syncengine.rank() == 1 else None
    with pytest.raises(type(make()) if syncengine.rank() == 1 else Aborted) as raised:
        model(data()).sum().backward()
    assert syncengine.rank() == 1 or text in str(raised.value)
    model.module.error = None
    model(data()).sum().backward()
    assert model.module.weight.grad is not None


def fail(where: str, how: str) -> Outcome | None:
    """Rank 1 raises, which ends the communicator there, unlike in forward."""
    make, _ = ERRORS[how]
    fails = my_rank() == 1

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if fails:
            raise make()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def train(_: Callable[[], None]) -> None:
        model = syncengine.Parallel(Raising(24, 4))
        if where == "hook":
            model.register_comm_hook(None, hook)
            model(data()).sum().backward()
        elif where == "join":
            with model.join():
                model.module.error = make() if fails else None
                model(data()).sum().backward()
        elif fails:
            raise make()
        syncengine.all_reduce(torch.ones(4))
        syncengine.barrier()

    if not fails:
        return suffer(train)
    syncengine.init()
    train(lambda: None)
    return None


@pytest.mark.parametrize("how", ERRORS)
@pytest.mark.parametrize("where", ["hook", "join", "top"])
def test_the_others_are_told_it(pool: RankPool, where: str, how: str):
    with pool.spawn_ranks(fail, where, how, settings=None) as ranks:
        outcome = ranks[0].result()
        assert ERRORS[how][1] in outcome.text, outcome
        assert outcome.error == "Aborted"


@run_on_ranks()
def test_a_parameter_whose_name_is_no_text():
    """It is averaged, and named where ranks differ."""
    module = nn.Module()
    module.register_parameter(NO_TEXT, nn.Parameter(torch.ones(3)))
    module.forward = lambda x: (getattr(module, NO_TEXT) * x).sum()  # type: ignore[method-assign]
    model = syncengine.Parallel(module)
    model(torch.full((3,), 1.0 + syncengine.rank())).backward()
    assert torch.equal(getattr(module, NO_TEXT).grad, torch.full((3,), 1.5))
    other = nn.Module()
    other.register_parameter(NO_TEXT, nn.Parameter(torch.ones(3 + syncengine.rank())))
    with pytest.raises(Mismatch, match=r"caf\\udce9"):
        syncengine.Parallel(other)


def fill_stderr() -> None:
    """This process's stderr becomes a pipe that is full, and that nobody reads."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    os.dup2(write, 2)
    os.set_inheritable(read, False)


def wait_with_a_full_stderr() -> None:
    if my_rank() == 0:
        fill_stderr()
    syncengine.init(log_after=0.05)
    model = syncengine.Parallel(nn.Linear(24, 4))
    if my_rank() == 1:
        time.sleep(1)  # rank 0 says so
    model(data()).sum().backward()
    for _ in range(100):
        logging.getLogger("syncengine").warning("something")
        print_line("something")


def test_a_stderr_that_nobody_reads_makes_no_rank_wait(pool: RankPool):
    """Neither in training nor at its end."""
    ended(pool, wait_with_a_full_stderr, settings=None, environ={"SYNCENGINE_SUMMARY": "1"})
