"""micro_batches(): what is refused, with which words; and samplers that are followed."""

import contextlib
import os
import re
import zlib
from collections.abc import Callable
from functools import partial
from itertools import chain, islice, product
from typing import Any

import pytest
import torch
from pool import RankPool
from test_micro_batches import Augmented, loader, make
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

import syncengine
from syncengine.errors import InvalidUsage, Mismatch
from syncengine.parallel.micro_batches import _Places


def batches_of(net: nn.Module | None = None, given: DataLoader | None = None, total: int = 4) -> Any:
    model = syncengine.Parallel(net or make("language"))
    return model, syncengine.micro_batches(model, loader() if given is None else given, total=total)


def of_loader(data: Dataset | None = None, batch_size: int = 3, **options: Any) -> Any:
    return batches_of(given=DataLoader(data or Augmented(), batch_size=batch_size, **options))


class Turning(list):
    def __iter__(self):
        self.append(self.pop(0))
        return super().__iter__()


class Iterable(IterableDataset):
    def __iter__(self):
        return iter(Augmented())


def under(setting: Callable[[Any], Any], value: Any, usual: Any) -> None:
    setting(value)
    try:
        batches_of()
    finally:
        setting(usual)


def ring() -> None:
    syncengine.shutdown()
    syncengine.init(numerics="ring")
    batches_of()


def optimizer_in_backward() -> None:
    model = syncengine.Parallel(make("language"))
    model._register_fused_optim(torch.optim.SGD, lr=0.1)
    syncengine.micro_batches(model, loader(), total=4)


def begins(enter: Callable[[Any], Any]) -> None:
    """A step begins after what `enter` does to the model, and in the context that it may return."""
    model, batches = batches_of()
    with enter(model) or contextlib.nullcontext():
        next(iter(batches))


CUT_BY_RANK = DistributedSampler(Augmented(), 2, 0)
MISUSES: dict[str, tuple[str, Callable[[], Any]]] = {
    "too_few": ("total=1 micro-batches are too few for 2 ranks", partial(batches_of, total=1)),
    "too_few_on_one_rank": (
        "the loader has 50 batches, fewer than the total=60",
        lambda: batches_of(total=60 if syncengine.rank() else 4),
    ),
    "unlike_sizes": ("different sizes, 2 to 4 samples", partial(of_loader, batch_size=4)),
    "own_generator": ("has a generator of its own", partial(of_loader, shuffle=True, generator=torch.Generator())),
    "distributed_sampler": ("DistributedSampler, which cuts the data by rank", partial(of_loader, sampler=CUT_BY_RANK)),
    "sampler_with_a_state": ("gives another order each time", partial(of_loader, sampler=Turning(range(150)))),
    "iterable": ("Iterable is an IterableDataset, whose samples have no numbers", partial(of_loader, Iterable())),
    "threads": (r"threads=.*rank 1 has \[threads=2\]", lambda: under(torch.set_num_threads, 1 + syncengine.rank(), 1)),
    "flushed": ("set_flush_denormal", partial(under, torch.set_flush_denormal, True, False)),
    "sync_batch_norm": (
        "module 0 is a SyncBatchNorm.*use BatchNorm",
        partial(batches_of, nn.Sequential(nn.SyncBatchNorm(8))),
    ),
    "ring": ("without numerics='ring'", ring),
    "optimizer_in_backward": ("by no optimizer in backward", optimizer_in_backward),
    "comm_hook": (
        "nor with a communication hook",
        partial(begins, lambda model: model.register_comm_hook(None, syncengine.hooks.bf16_compress)),
    ),
    "in_join": ("works neither in join", partial(begins, lambda model: model.join())),
    "weighted": ("nor with a communication hook or weight", partial(begins, lambda model: model.weight(2))),
    "all_under_no_sync": ("not to be under no_sync", partial(begins, lambda model: model.no_sync())),
}


def misuse(text: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    """One more, which is done with a model and its micro-batches."""

    def decorate(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        MISUSES[function.__name__] = text, lambda: function(*batches_of())
        return function

    return decorate


@misuse("weight\\(\\) has no meaning within micro_batches")
def weighted_within(model: Any, batches: Any) -> None:
    for i, batch in batches:
        if i % 2:  # the last of a rank
            model.weight(2)
        model(*batch).backward()


@misuse("are not to be under no_sync")
def accumulated_under_no_sync(model: Any, batches: Any) -> None:
    """As plain scripts and Accelerate accumulate."""
    for _, batch in batches:
        with model.no_sync() if here() else contextlib.nullcontext():
            model(*batch).backward()


@misuse("an earlier backward has already synchronized")
def two_backwards(model: Any, batches: Any) -> None:
    for _, batch in batches:
        losses = [model(*batch) for _ in range(2)]
        losses[0].backward()
        if here():
            losses[1].backward()


@misuse("a forward of Parallel.Language. behind the backward of micro-batch [02].*under torch.no_grad")
def a_forward_behind_the_backward(model: Any, batches: Any) -> None:
    for _, batch in batches:
        for _ in range(2 if here() else 1):
            model(*batch).backward()


@misuse("in step 0 of micro_batches.*in step 1 of micro_batches")
def another_step_on_one_rank(model: Any, batches: Any) -> None:
    batches.step = syncengine.rank()
    for _, batch in batches:
        model(*batch).backward()


@misuse("call optimizer.zero_grad")
def no_zero_grad(model: Any, batches: Any) -> None:
    for _, batch in chain(batches, batches):
        model(*batch).backward()


@misuse("step after the whole loop")
def step_within(model: Any, batches: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, batch in batches:
        model(*batch).backward()
        if here():
            optimizer.step()


@misuse("has brought no gradient")
def no_backward(model: Any, batches: Any) -> None:
    for _, batch in batches:
        loss = model(*batch)
        if not here():
            loss.backward()


@misuse("the checkpoint's micro-batches have total=8, these have total=4")
def another_total(model: Any, batches: Any) -> None:
    batches.load_state_dict({**batches.state_dict(), "total": 8})


WITHIN_A_STEP = [accumulated_under_no_sync, two_backwards, a_forward_behind_the_backward, step_within, no_backward]


def here() -> bool:
    """Whether this rank misuses it."""
    return not os.environ.get("ALONE") or syncengine.rank() == 1


def error_of(name: str) -> str:
    with pytest.raises((InvalidUsage, Mismatch)) as error:
        MISUSES[name][1]()
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "alone"), [*product(MISUSES, [False]), *product([each.__name__ for each in WITHIN_A_STEP], [True])]
)
def test_bad_use_is_an_error(pool: RankPool, name: str, alone: bool):
    """All ranks raise, whoever has misused the step."""
    told = pool.run(error_of, name, environ={"ALONE": "1"} if alone else None)
    assert re.search(f"(?s){MISUSES[name][0]}", "\n".join(told))


WEIGHTS = [1.0 + i % 3 for i in range(150)]


def weighted_order() -> list[list[int]]:
    _, batches = of_loader(sampler=WeightedRandomSampler(WEIGHTS, 150))
    orders = []
    next(iter(batches))
    for step in (0, 1, len(batches)):  # two of an epoch, and the next epoch's first
        batches.step = step
        orders += [list(place[1:]) for place in islice(_Places(batches), 2)]
    return orders


def test_samplers_that_draw_from_torch_are_followed(pool: RankPool):
    """An epoch's order is drawn by the seed that docs/numerics.md names, on all ranks."""
    expected: list[list[list[int]]] = [[], []]
    for epoch, steps in ((0, (0, 1)), (1, (0,))):
        generator = torch.Generator().manual_seed(zlib.crc32(f"0 epoch {epoch}".encode()))
        drawn = torch.multinomial(torch.tensor(WEIGHTS, dtype=torch.float64), 150, True, generator=generator).tolist()
        for step, rank in product(steps, (0, 1)):
            first = 4 * step + 2 * rank  # the first of this rank's two micro-batches, each of three samples
            expected[rank] += [drawn[3 * i : 3 * i + 3] for i in (first, first + 1)]
    assert pool.run(weighted_order) == expected
