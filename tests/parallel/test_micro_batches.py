"""micro_batches(): the same weights, optimizer state and losses at any number of ranks, and in a plain loop."""

from __future__ import annotations

import hashlib
import itertools
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import RankFailure, RankPool
from test_hosts import live_on
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import syncengine
from syncengine.parallel.summation import ancestors, children, deal, nodes_within

VOCABULARY = 23


class Augmented(Dataset):
    """Sequences with random numbers of torch's and Python's in them."""

    def __init__(self, size: int = 150) -> None:
        generator = torch.Generator().manual_seed(3)
        self._ids = torch.randint(VOCABULARY, (size, 7), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self._ids[index]
        noise = torch.randn(6, 8) * random.random()
        return ids, noise


class Language(nn.Module):
    """An embedding tied to the output, an LSTM, dropout; perhaps reentrant checkpointing of the same block twice."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))
        self.norm = nn.LayerNorm(8)
        self._checkpointed = checkpointed

    def forward(self, ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = self.lstm(self.embedding(ids[:, :-1]) + noise)[0]
        for _ in range(2):
            x = x + (checkpoint(self.block, x, use_reentrant=True) if self._checkpointed else self.block(x))
        logits = self.norm(x) @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Branches(nn.Module):
    """Which branch a micro-batch uses depends on its samples; one is used by none, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.branches[1].requires_grad_(False)

    def forward(self, ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = self.stem(noise).relu()
        return self.branches[int(ids.sum()) % 3](x).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "language": Language,
    "checkpointed": lambda: Language(checkpointed=True),
    "branches": Branches,
    "half": lambda: Branches().bfloat16(),
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[kind]()


def loader(workers: int = 0) -> DataLoader:
    return DataLoader(Augmented(), batch_size=3, shuffle=True, drop_last=True, num_workers=workers)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    hashed = hashlib.sha256()
    for p in model.parameters():
        for tensor in (p.detach(), *optimizer.state.get(p, {}).values()):
            hashed.update(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()))
    return hashed.hexdigest()


def cast(batch: list[torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0], batch[1].to(next(model.parameters()).dtype)


def train(kind: str, total: int, steps: int, **options: Any) -> tuple[str, dict[tuple[int, int], float]]:
    """On these ranks."""
    torch.set_num_threads(1)
    net = make(kind)
    model = syncengine.Parallel(options.get("wrap", lambda net: net)(net), find_unused_parameters=kind != "language")
    optimizer = options.get("optimizer", torch.optim.AdamW)(net.parameters(), lr=1e-2)
    batches = syncengine.micro_batches(model, loader(), total=total, seed=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=options.get("scaled", False))
    losses = {}
    for step in range(steps):
        for i, batch in batches:
            loss = model(*cast(batch, net))
            scaler.scale(loss).backward()
            losses[step, i] = loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return digest(net, optimizer), losses


def plain(kind: str, total: int, steps: int) -> tuple[str, dict[tuple[int, int], float]]:
    """The same in torch alone: an independent reading of what is promised."""
    torch.set_num_threads(1)
    net = make(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data, batches = Augmented(), loader()
    losses = {}

    def seed(*key: object) -> None:
        number = zlib.crc32(" ".join(map(str, key)).encode())
        torch.manual_seed(number)
        random.seed(number)

    def tree(parts: list) -> list:
        if len(parts) == 1:
            return parts[0]
        half = 1
        while half * 2 < len(parts):
            half *= 2
        return [
            None if a is b is None else (0 if a is None else a) + (0 if b is None else b)
            for a, b in zip(tree(parts[:half]), tree(parts[half:]), strict=True)
        ]

    for step in range(steps):
        epoch, within = divmod(step, len(batches) // total)
        seed(5, "epoch", epoch)
        order = list(batches.batch_sampler)[within * total :]
        parts = []
        for i in range(total):
            seed(5, step, i, "samples")
            batch = batches.collate_fn([data[index] for index in order[i]])
            seed(5, step, i)
            loss = net(*cast(batch, net))
            loss.backward()
            losses[step, i] = loss.item()
            parts.append([p.grad for p in net.parameters()])
            optimizer.zero_grad()
        for p, grad in zip(net.parameters(), tree(parts), strict=True):
            p.grad = None if grad is None else grad * (1 / total)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return digest(net, optimizer), losses


def joined(answers: list[tuple[str, dict[tuple[int, int], float]]]) -> tuple[str, dict[tuple[int, int], float]]:
    """One answer, of which the ranks have the weights all and the losses in parts."""
    assert len({weights for weights, _ in answers}) == 1
    losses = {key: loss for _, part in answers for key, loss in part.items()}
    assert len(losses) == sum(len(part) for _, part in answers)
    return answers[0][0], losses


@pytest.fixture(scope="module")
def expected(pool: RankPool) -> Callable[[str, int, int], Any]:
    known: dict[tuple[str, int, int], Any] = {}

    def of(*what: Any) -> Any:
        if what not in known:
            known[what] = pool.run(plain, *what, world=1, settings=None)[0]
        return known[what]

    return of


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_any_number_of_ranks_trains_what_a_plain_loop_does(pool: RankPool, expected, kind: str, world: int):
    steps = 50 if kind in ("language", "branches") else 10
    answers = pool.run(train, kind, 8, steps, world=world, timeout=200)
    assert joined(answers) == expected(kind, 8, steps)


def on_hosts(hosts: str, *arguments: Any) -> Any:
    live_on(hosts)
    syncengine.init(timeout=60.0)
    return train(*arguments)


@pytest.mark.parametrize("hosts", ["ab", "aab", "aabb", "aba"])
def test_hosts_train_the_same(pool: RankPool, expected, hosts: str):
    answers = pool.run(on_hosts, hosts, "language", 8, 50, world=len(hosts), settings=None, timeout=200)
    assert joined(answers) == expected("language", 8, 50)


@pytest.mark.parametrize("total", [3, 6, 7])
def test_numbers_that_are_no_powers_of_two(pool: RankPool, expected, total: int):
    for world in (1, 2, 3):
        assert joined(pool.run(train, "branches", total, 10, world=world)) == expected("branches", total, 10)


def variant(name: str) -> Any:
    options: dict[str, Any] = {
        "scaled": {"scaled": True},
        "sharded": {"optimizer": lambda p, **o: syncengine.ShardedOptimizer(p, torch.optim.AdamW, **o)},
        "compiled": {"wrap": lambda net: torch.compile(net, backend="aot_eager")},
    }[name]
    if name != "sharded":
        return train("language", 8, 10, **options)
    return "", train("language", 8, 10, **options)[1]


@pytest.mark.parametrize("name", ["scaled", "sharded", "compiled"])
def test_other_ways_train_the_same(pool: RankPool, expected, name: str):
    weights, losses = expected("language", 8, 10)
    for world in (1, 3):
        answer = joined(pool.run(variant, name, world=world, timeout=200))
        assert answer == (weights if name != "sharded" else "", losses)


def save_or_go_on(folder: str, goes_on: bool) -> str:
    torch.set_num_threads(1)
    net = make("language")
    model = syncengine.Parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batches = syncengine.micro_batches(model, loader(), total=8, seed=5)
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    if goes_on:
        state = {
            "model": net.state_dict(),
            "optimizer": get_optimizer_state_dict(net, optimizer),
            "batches": batches,
        }
        dcp.load(state, checkpoint_id=folder)
        net.load_state_dict(state["model"])
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
    for _ in range(5):
        for _, batch in batches:
            model(*batch).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if not goes_on:
        state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer), "batches": batches}
        dcp.save(state, checkpoint_id=folder)
    return digest(net, optimizer)


def test_a_checkpoint_goes_on_at_another_number_of_ranks(pool: RankPool, expected, tmp_path: Path):
    for saving, loading in [(2, 3), (3, 1)]:
        folder = str(tmp_path / f"{saving}")
        pool.run(save_or_go_on, folder, False, world=saving, gloo=True)
        answers = pool.run(save_or_go_on, folder, True, world=loading, gloo=True)
        assert set(answers) == {expected("language", 8, 10)[0]}


def step_that_raises() -> list[bool]:
    digests = []
    for disturbed in (False, True):
        net = make("language")
        model = syncengine.Parallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        batches = syncengine.micro_batches(model, loader(), total=8, seed=5)
        for step in range(4):
            if disturbed and step == 2:
                with pytest.raises(ZeroDivisionError):
                    for count, (_, batch) in enumerate(batches):
                        model(*batch).backward()
                        1 // (1 - count)
            for _, batch in batches:
                model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        digests.append(digest(net, optimizer))
    return digests


def test_a_step_that_is_left_has_not_happened(pool: RankPool):
    for answer in pool.run(step_that_raises):
        assert answer[0] == answer[1]


MISUSES: dict[str, tuple[str, Callable[[], Any]]] = {}


def misuse(text: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def decorate(function: Callable[[], Any]) -> Callable[[], Any]:
        MISUSES[function.__name__] = text, function
        return function

    return decorate


def batches_of(net: nn.Module | None = None, given: DataLoader | None = None, total: int = 4) -> Any:
    model = syncengine.Parallel(net or make("language"))
    return model, syncengine.micro_batches(model, given or loader(), total=total)


@misuse("total=1 micro-batches are too few for 2 ranks")
def too_few() -> None:
    batches_of(total=1)


@misuse("different sizes, 2 to 4 samples")
def unlike_sizes() -> None:
    batches_of(given=DataLoader(Augmented(), batch_size=4))


@misuse("has a generator of its own")
def own_generator() -> None:
    batches_of(given=DataLoader(Augmented(), batch_size=5, shuffle=True, generator=torch.Generator()))


@misuse("give the loader num_workers=0, not 2")
def workers() -> None:
    batches_of(given=loader(workers=2))


@misuse("DistributedSampler, which cuts the data by rank")
def distributed_sampler() -> None:
    sampler = torch.utils.data.DistributedSampler(Augmented(), 2, 0)
    batches_of(given=DataLoader(Augmented(), batch_size=3, sampler=sampler))


@misuse("gives another order each time")
def sampler_with_a_state() -> None:
    class Turning(list):
        def __iter__(self):
            self.append(self.pop(0))
            return super().__iter__()

    batches_of(given=DataLoader(Augmented(), batch_size=3, sampler=Turning(range(150))))


@misuse("module 0 is a BatchNorm1d.*use GroupNorm")
def batch_norm() -> None:
    batches_of(nn.Sequential(nn.BatchNorm1d(8)))


@misuse("threads=.*rank 1 has \\[threads=2\\]")
def threads() -> None:
    torch.set_num_threads(1 + syncengine.rank())
    try:
        batches_of()
    finally:
        torch.set_num_threads(1)


@misuse("sparse=False")
def sparse() -> None:
    model, batches = batches_of(nn.Embedding(VOCABULARY, 2, sparse=True))
    for _, (ids, _) in batches:
        model(ids).sum().backward()


@misuse("call optimizer.zero_grad")
def no_zero_grad() -> None:
    model, batches = batches_of()
    for _ in range(2):
        for _, batch in batches:
            model(*batch).backward()


@misuse("step after the whole loop")
def step_within() -> None:
    model, batches = batches_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, batch in batches:
        model(*batch).backward()
        optimizer.step()


@misuse("has brought no gradient")
def no_backward() -> None:
    model, batches = batches_of()
    for _, batch in batches:
        model(*batch)


@misuse("the checkpoint's micro-batches have total=8, these have total=4")
def another_total() -> None:
    _, batches = batches_of()
    batches.load_state_dict({**batches.state_dict(), "total": 8})


@pytest.mark.parametrize("name", MISUSES)
def test_bad_use_is_an_error(pool: RankPool, name: str):
    text, function = MISUSES[name]
    with pytest.raises(RankFailure, match=f"(?s)(InvalidUsage|Mismatch).*{text}"):
        pool.run(function)


def weighted_order() -> list[int]:
    sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(150)], 150)
    _, batches = batches_of(given=DataLoader(Augmented(), batch_size=3, sampler=sampler))
    batches._fetched, orders = iter(()), []
    for step in (0, 13):
        orders += [list(place[1:]) for place, _ in zip(batches._places(step), range(2), strict=False)]
    return orders


def test_samplers_that_draw_from_torch_are_followed(pool: RankPool):
    first, second = pool.run(weighted_order)
    assert first != second
    assert len({str(order) for order in first + second}) == 8


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 64), st.integers(1, 12))
def test_every_micro_batch_is_dealt_once_and_is_in_the_tree(total: int, ranks: int):
    if total < ranks:
        return
    parts = deal(total, ranks)
    assert [i for part in parts for i in part] == list(range(total))
    assert all(parts)
    nodes = [node for part in parts for node in nodes_within(part, (0, total))]
    assert [i for begin, end in nodes for i in range(begin, end)] == list(range(total))
    for i in range(total):
        path = [*ancestors(total, i), (i, i + 1)]
        assert path[0] == (0, total)
        assert all(below in children(above) for above, below in itertools.pairwise(path))


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 9), st.sampled_from(["language", "branches"]), st.text("ab", min_size=1, max_size=4))
def test_drawn_jobs_train_the_same(pool: RankPool, expected, total: int, kind: str, hosts: str):
    hosts = hosts[:total]
    answers = pool.run(on_hosts, hosts, kind, total, 3, world=len(hosts), settings=None)
    assert joined(answers) == expected(kind, total, 3)
