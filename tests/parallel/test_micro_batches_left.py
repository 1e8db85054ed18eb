"""Steps of micro_batches() that are left before their end: nothing but a call acts, wherever the collector runs."""

import contextlib
import itertools
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pool import RankPool, run_on_ranks
from sharded_training import without_gc
from test_micro_batches import Augmented, clip, digest, loader, make
from torch import nn
from torch.utils.data import DataLoader
from whims import Leaving, Whim

import syncengine

SEEDS = int(os.environ.get("SYNCENGINE_TEST_LEAVES", "3"))


def raise_in_forward(net: nn.Module, *_: Any) -> None:
    if net.raises:
        raise Leaving


def leave(how: str, model: Any, batches: Any, at: int, whim: Whim) -> None:
    """Begins a step and leaves it in its micro-batch ``at`` of this rank, which is not the last."""

    def through(batches: Any) -> Iterator[Any]:
        for place, batch in enumerate(batches):
            with contextlib.ExitStack() as stack:
                stack.callback(whim)
                yield place, batch

    pairs = {
        "zip": lambda: zip(range(at), batches, strict=False),
        "islice": lambda: enumerate(itertools.islice(batches, at)),
        "tee": lambda: enumerate(itertools.tee(batches)[0]),
        "generator": lambda: through(batches),
    }.get(how, lambda: enumerate(batches))()
    whim.kept.append(pairs)
    for place, (_, batch) in pairs:
        whim()
        if place == at and how not in ("forward", "backward"):
            if how in ("error", "generator"):
                raise Leaving
            break
        model.module.raises = place == at and how == "forward"
        loss = model(*batch)
        whim()
        if place == at:
            raise Leaving
        loss.backward()
        whim()


def train(seed: int | None) -> str:
    """Of ``seed``, steps are left at places drawn by it, others on each rank, and done again."""
    torch.set_num_threads(1)
    net = make("language")
    net.raises = False
    net.register_forward_hook(raise_in_forward)
    model = syncengine.Parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    several = [syncengine.micro_batches(model, loader(), total=8, seed=5) for _ in range(2)]
    together, whim = random.Random(seed), Whim((seed, syncengine.rank()))
    with without_gc():
        for step in range(6):
            while seed is not None and together.random() < 0.6:
                how = together.choice(["error", "break", "zip", "islice", "tee", "generator", "forward", "backward"])
                try:
                    at = 0 if how == "forward" else whim.random.randrange(2 if syncengine.world_size() > 1 else 7)
                    leave(how, model, several[together.random() < 0.5], at, whim)
                except Leaving as error:
                    whim.kept.append(error)
                net.raises = False
                whim()
            batches = several[together.random() < 0.5] if seed is not None else several[0]
            batches.step = step
            for _, batch in batches:
                whim()
                loss = model(*batch)
                whim()
                loss.backward()
                whim()
            clip(net)
            whim()
            optimizer.step()
            whim()
            optimizer.zero_grad()
    return digest(net, optimizer)


@pytest.mark.parametrize("world", [1, 3])
def test_the_collector_may_run_at_any_place(pool: RankPool, world: int):
    pool.refresh()  # else each collection goes through what earlier tests have left
    (expected,) = set(pool.run(train, None, world=world))
    for seed in range(SEEDS):
        assert set(pool.run(train, seed, world=world)) == {expected}


def small(module: nn.Module | None = None, total: int = 4, **options: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = syncengine.Parallel(module or nn.Linear(4, 1), **options)
    batches = syncengine.micro_batches(model, DataLoader(torch.randn(64, 4), 2, drop_last=True), total=total)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), batches


def train_on(model: Any, pairs: Any) -> None:
    for row in pairs:
        model(row[-1][-1] if isinstance(row[-1], tuple) else row[-1]).square().mean().backward()


class DataSGD(torch.optim.SGD):
    """Writes where torch's versions do not tell."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad if p.grad is not None else 0, alpha=-0.01)


WAYS: dict[str, Callable[[Any, int], Any]] = {
    "zip": lambda batches, own: zip(range(own), batches, strict=False),
    "islice": lambda batches, own: itertools.islice(batches, own),
    "chain": lambda batches, own: itertools.islice(itertools.chain(batches, batches), own),
    "tee": lambda batches, own: itertools.islice(itertools.tee(batches)[1], own),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "data": DataSGD,
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sharded": lambda p: syncengine.ShardedOptimizer(p, torch.optim.SGD, lr=0.01),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@run_on_ranks()
def test_no_optimizer_steps_within_a_step(optimizer: str, world: int):
    for way in WAYS.values():
        model, _, batches = small()
        stepping = OPTIMIZERS[optimizer](model.parameters())
        train_on(model, way(batches, 4 // world))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(syncengine.errors.InvalidUsage, match=r"step after the whole loop.*zip\(\)"):
            stepping.step()
        assert all(map(torch.equal, before, model.parameters()))


@run_on_ranks()
def test_a_closure_may_hold_the_whole_loop_and_no_less():
    weights = []
    for communicator in (syncengine.init(), syncengine.init().split([[0], [1]][syncengine.rank()])):
        model, _, batches = small(process_group=communicator)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure(model: Any = model, optimizer: Any = optimizer, batches: Any = batches) -> float:
            optimizer.zero_grad()
            train_on(model, batches)
            return 1.0

        for _ in range(3):
            optimizer.step(closure)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))
    model, optimizer, batches = small()
    with pytest.raises(syncengine.errors.InvalidUsage, match="step after the whole loop"):
        optimizer.step(lambda: train_on(model, itertools.islice(batches, 1)))


@run_on_ranks()
def test_who_alone_leaves_is_heard_of_by_all():
    """The others wait for its gradients."""
    model, optimizer, batches = small()
    with pytest.raises(syncengine.errors.InvalidUsage, match="step after the whole loop"):
        for _, x in batches:
            if syncengine.rank():
                break
            model(x).square().mean().backward()
        optimizer.step()


def plain_loop(model: Any, steps: int = 3, by_hand: bool = False) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(syncengine.rank())
    for _ in range(steps):
        model(torch.randn(2, 4)).square().mean().backward()
        if by_hand:
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.01)
        else:
            optimizer.step()
        model.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("world", "by_hand"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("at", [0, 1])
@run_on_ranks()
def test_a_plain_loop_behind_an_error_is_refused(at: int, world: int, by_hand: bool):
    """Also by hand, which no hook of torch's sees: at its second forward."""
    model, _, batches = small(total=2 * world)
    with contextlib.suppress(Leaving):
        for place, (_, x) in enumerate(batches):
            if place == at:
                raise Leaving
            model(x).square().mean().backward()
    with pytest.raises(syncengine.errors.InvalidUsage, match="left before its end"):
        plain_loop(model, 2, by_hand)


@pytest.mark.parametrize("how", ["drop", "another wrapper", "another model", "another step"])
@run_on_ranks()
def test_a_step_that_was_dropped_leaves_nothing(how: str):
    expected = plain_loop(small()[0])
    model, _, batches = small()
    iterator = iter(batches)
    train_on(model, itertools.islice(iterator, 1))
    if how == "drop":
        batches.drop()
    elif how == "another wrapper":
        model = syncengine.Parallel(model.module)
    elif how == "another model":
        plain_loop(small()[0])
    else:
        train_on(model, batches)
        model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, expected, plain_loop(model)))
    with pytest.raises(syncengine.errors.InvalidUsage, match="was dropped when it was left"):
        next(iterator)


@run_on_ranks()
def test_a_forward_before_the_step_has_no_part_in_it():
    """Its backward has not come, on one rank."""
    answers = []
    for looks in (False, True):
        model, optimizer, batches = small(total=8)
        for step in range(3):
            if looks and step and syncengine.rank():
                model(torch.ones(2, 4))
            train_on(model, batches)
            optimizer.step()
            optimizer.zero_grad()
        answers.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *answers))


@pytest.mark.parametrize("world", [1, 2])
@run_on_ranks()
def test_a_second_model_that_trains_is_refused(world: int):
    refused = pytest.raises(syncengine.errors.InvalidUsage, match="a forward of Parallel.Linear. within a step")
    null = contextlib.nullcontext()
    for context, trains, ends in ((null, False, null), (torch.no_grad(), True, null), (null, True, refused)):
        other = small()[0].requires_grad_(trains)
        model, optimizer, batches = small()
        with ends:
            for _, x in batches:
                with context:
                    noise = other(x)
                (model(x) + noise).square().mean().backward()
            optimizer.step()


class Failing(Augmented):
    def __getitem__(self, index: int) -> Any:
        if multiprocessing.parent_process() and index >= 24:
            raise Leaving
        return super().__getitem__(index)


@run_on_ranks(world=1)
def test_workers_go_with_the_step():
    kept = []
    for data in (Augmented(), Failing()):
        model = syncengine.Parallel(make("language"))
        data = DataLoader(data, batch_size=3, drop_last=True, num_workers=2)
        batches = syncengine.micro_batches(model, data, total=16)
        with pytest.raises(Leaving) as error:
            for _, batch in batches:
                model(*batch).backward()
                if not isinstance(data.dataset, Failing):
                    raise Leaving
        kept.append(error)
        assert len(multiprocessing.active_children()) == 2
        batches.drop()
        assert not multiprocessing.active_children()
        with without_gc():
            iterator = iter(batches)
            next(iterator)
            batches.drop()
            for _ in batches:
                break
            batches.drop()
            batches.step = 1
            del batches
            assert not multiprocessing.active_children()


@run_on_ranks()
def test_setting_the_step_seeds_as_the_end_of_the_one_before():
    model, optimizer, batches = small()
    drawn = []
    for _ in range(3):
        drawn.append((torch.rand(1).item(), random.random()))
        train_on(model, batches)
        optimizer.step()
        optimizer.zero_grad()
    for step in (2, 0, 1):
        torch.manual_seed(syncengine.rank())
        batches.step = step
        assert (torch.rand(1).item(), random.random()) == drawn[step]
    batches.load_state_dict({**batches.state_dict(), "step": 1})
    assert (torch.rand(1).item(), random.random()) == drawn[1]
