"""micro_batches(): the same weights, optimizer state and losses at any number of ranks, and in a plain loop."""

import copy
import functools
import hashlib
import os
import random
import zlib
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hosts import Hosts
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import mostly_nightly
from pool import RankPool, run_on_ranks
from programs import run_programs
from random_layers import Layer
from repository import ROOT
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import syncengine

STEPS = int(os.environ.get("SYNCENGINE_TEST_STEPS", "15"))
VOCABULARY = 23


class Augmented(Dataset):
    """Sequences with random numbers of torch's and Python's in them."""

    _ids = torch.randint(VOCABULARY, (150, 7), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ids[index], torch.randn(6, 8) * random.random()


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


def branches() -> nn.Module:
    """A micro-batch's samples choose the branch; one is used by none, one is frozen. A parameter has no dimensions."""

    def forward(self: Any, ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = self.stem(noise.to(self.gain.dtype)).relu() * self.gain
        return self.branches[int(ids.sum()) % 3](x).square().mean()

    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    layers[1].requires_grad_(False)
    return Layer(forward, stem=nn.Linear(8, 8), branches=layers, gain=nn.Parameter(torch.full((), 1.5)))


class Attention(nn.Module):
    """A block of a transformer and an MLP, with dropout and a buffer, which ranks tell each other in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((), 0.75))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, VOCABULARY))

    def forward(self, ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.block(noise * self.scale))
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def convolution() -> nn.Module:
    """With GroupNorm, and weights whose elements lie in another order."""
    layers = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)]
    return Layer(
        lambda self, ids, noise: (self.layers(noise[:, None]).mean((2, 3)) - ids[:, :4]).square().mean(),
        layers=nn.Sequential(*layers).to(memory_format=torch.channels_last),
    )


def table() -> nn.Module:
    """Two of its three parameters have sparse gradients."""
    return Layer(
        lambda self, ids, noise: self.head((self.words(ids[:, 1:]) + noise).mean(1) + self.bag(ids)).square().mean(),
        words=nn.Embedding(VOCABULARY, 8, sparse=True),
        bag=nn.EmbeddingBag(VOCABULARY, 8, mode="sum", sparse=True),
        head=nn.Linear(8, 1, bias=False),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "language": Language,
    "checkpointed": lambda: Language(checkpointed=True),
    "attention": Attention,
    "convolution": convolution,
    "branches": branches,
    "half": lambda: branches().bfloat16(),
    "table": table,
}


def make(kind: Any, frozen: int = 0) -> nn.Module:
    """``kind``: one of MODELS, or a function that makes another model; ``frozen``: a bit for each parameter."""
    torch.manual_seed(7)
    net = kind() if callable(kind) else MODELS[kind]()
    for i, p in enumerate(net.parameters()):
        p.requires_grad_(p.requires_grad and not frozen >> i & 1)
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return (torch.optim.Adagrad if hasattr(net, "bag") else torch.optim.AdamW)(net.parameters(), lr=1e-2)


def clip(net: nn.Module) -> None:
    if not hasattr(net, "bag"):  # torch has no norm of a sparse gradient
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)


def loader(workers: int = 0) -> DataLoader:
    return DataLoader(Augmented(), batch_size=3, shuffle=True, drop_last=True, num_workers=workers)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = chain(model.buffers(), *((p, *optimizer.state.get(p, {}).values()) for p in model.parameters()))
    octets = b"".join(bytes(t.detach().contiguous().flatten().view(torch.uint8).tolist()) for t in tensors)
    return hashlib.sha256(octets).hexdigest()


Answer = tuple[str, dict[tuple[int, int], float]]  # a digest; the losses, by step and micro-batch


def train(kind: Any, total: int, steps: int, frozen: int = 0, **options: Any) -> Answer:
    """Trains on each rank. `before` and `after` are called around the steps: with net, optimizer and micro-batches;
    `begin` before each step, with model and micro-batches."""
    torch.set_num_threads(1)
    net = make(kind, frozen)
    looks = {"find_unused_parameters": kind in ("branches", "half"), "static_graph": kind == "checkpointed"}
    model = syncengine.Parallel(options.get("wrap", lambda net: net)(net), **looks)
    optimizer = options["optimizer"](net.parameters(), lr=1e-2) if "optimizer" in options else optimizer_of(net)
    batches = syncengine.micro_batches(model, loader(options.get("workers", 0)), total=total, seed=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=options.get("scaled", False))
    options.get("before", lambda *_: None)(net, optimizer, batches)
    losses = {}
    for step in range(steps):
        options.get("begin", lambda *_: None)(model, batches)
        for i, batch in batches:
            loss = model(*batch)
            scaler.scale(loss).backward()
            losses[step, i] = loss.item()
        scaler.unscale_(optimizer)
        clip(net)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    options.get("after", lambda *_: None)(net, optimizer, batches)
    return digest(net, optimizer), losses


def seed(*key: object) -> None:
    number = zlib.crc32(" ".join(map(str, key)).encode())
    torch.manual_seed(number)
    random.seed(number)


def plain_batches(step: int, total: int) -> Iterator[list[torch.Tensor]]:
    """The micro-batches of a step in torch alone, each behind the seeds that are promised for it."""
    data, batches = Augmented(), loader()
    epoch, within = divmod(step, len(batches) // total)
    seed(5, "epoch", epoch)
    order = list(batches.batch_sampler)[within * total :]
    for i in range(total):
        seed(5, step, i, "samples")
        batch = batches.collate_fn([data[index] for index in order[i]])
        seed(5, step, i)
        yield batch


def add(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        present = b if a is None else a
        return present if present is None or present.is_sparse else present + 0
    return (a + b).coalesce() if a.is_sparse else a + b


def tree(parts: list) -> list:
    """The sums over the promised tree of what each micro-batch has for each parameter."""
    if len(parts) == 1:
        return [grad.coalesce() if grad is not None and grad.is_sparse else grad for grad in parts[0]]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return [add(a, b) for a, b in zip(tree(parts[:half]), tree(parts[half:]), strict=True)]


def plain(kind: Any, total: int, steps: int, frozen: int = 0) -> Answer:
    """The same in torch alone: an independent reading of what is promised. Each micro-batch is on a copy of the whole
    model, of which the last gives it its buffers."""
    torch.set_num_threads(1)
    net = make(kind, frozen)
    optimizer = optimizer_of(net)
    losses = {}
    for step in range(steps):
        copies = []
        for i, batch in enumerate(plain_batches(step, total)):
            copies.append(copy.deepcopy(net))
            loss = copies[-1](*batch)
            loss.backward()
            losses[step, i] = loss.item()
        grads = tree([[p.grad for p in one.parameters()] for one in copies])
        for p, grad in zip(net.parameters(), grads, strict=True):
            p.grad = None if grad is None else grad * (1 / total)
        for module, last in zip(net.modules(), copies[-1].modules(), strict=True):
            module._buffers = last._buffers
        clip(net)
        optimizer.step()
        optimizer.zero_grad()
    return digest(net, optimizer), losses


def joined(answers: list[Answer]) -> Answer:
    """One answer, of which the ranks have the weights all and the losses in parts."""
    assert len({weights for weights, _ in answers}) == 1
    losses = {key: loss for _, part in answers for key, loss in part.items()}
    assert len(losses) == sum(len(part) for _, part in answers)
    return answers[0][0], losses


@pytest.fixture(scope="module")
def expected(pool: RankPool) -> Callable[[str, int, int], Any]:
    return functools.cache(lambda *what: pool.run(plain, *what, world=1, settings=None)[0])


@pytest.mark.nightly
@pytest.mark.usefixtures("needs_hosts")
def test_real_hosts_train_what_the_plain_example_does(programs: RankPool, unused_port: int):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SYNCENGINE_")} | {"OMP_NUM_THREADS": "1"}
    environ |= {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(unused_port), "WORLD_SIZE": "3"}
    (plain_loop,) = run_programs(programs, ["-m", "examples.same_bits_plain"], [environ])
    places = [0, 0, 1]
    environs = [
        environ | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": str(2 - host)}
        for rank, host in enumerate(places)
    ]
    with Hosts(2) as hosts:
        ranks = run_programs(programs, ["-m", "examples.same_bits", "train"], environs, prepare=hosts.entering(places))
    assert "".join(rank.stdout for rank in ranks) == plain_loop.stdout, [rank.stderr for rank in ranks]
    assert len(plain_loop.stdout.strip()) == 16


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("total", "steps", "world"),
    mostly_nightly([*product([8], [STEPS], (1, 2, 3, 4, 5, 8)), *product((3, 6, 7), [4], (1, 2, 3))], 11),
)
def test_any_number_of_ranks_trains_what_a_plain_loop_does(
    pool: RankPool, expected, total: int, steps: int, world: int
):
    for kind in MODELS:
        answers = pool.run(train, kind, total, steps, world=world, timeout=600)
        assert joined(answers) == expected(kind, total, steps), kind


@pytest.mark.thorough
@pytest.mark.parametrize("hosts", mostly_nightly(["ab", "aab", "aabb", "aba"], 1))
def test_hosts_train_the_same(pool: RankPool, expected, hosts: str):
    assert joined(pool.run(train, "language", 8, STEPS, hosts=hosts, timeout=200)) == expected("language", 8, STEPS)


@pytest.mark.thorough
@pytest.mark.parametrize("kinds_of_buckets", mostly_nightly(["in place", "flat"], 1), indirect=True)
def test_flat_buckets_have_the_same_bits(pool: RankPool, expected, kinds_of_buckets: None):
    for kind in ("language", "half", "table"):
        assert joined(pool.run(train, kind, 8, 5, world=3)) == expected(kind, 8, 5), kind


def variant(name: str) -> Any:
    options: dict[str, Any] = {
        "scaled": {"scaled": True},
        "sharded": {"optimizer": lambda p, **o: syncengine.ShardedOptimizer(p, torch.optim.AdamW, **o)},
        "compiled": {"wrap": lambda net: torch.compile(net, backend="aot_eager")},
        "workers": {"workers": 2},
    }[name]
    weights, losses = train("language", 8, 10, **options)
    return weights if name != "sharded" else "", losses


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_nightly(["scaled", "sharded", "compiled", "workers"], 0, 1))
def test_other_ways_train_the_same(pool: RankPool, expected, name: str):
    weights, losses = expected("language", 8, 10)
    for world in (1, 3):
        answer = joined(pool.run(variant, name, world=world, timeout=200))
        assert answer == (weights if name != "sharded" else "", losses)


def compile_head(net: nn.Module) -> nn.Module:
    net.head = torch.compile(net.head)
    return net


def compiled() -> Answer:
    answer = train("attention", 8, 4, wrap=compile_head)
    assert counters["stats"]["unique_graphs"] > 0  # torch leaves what it skips as it is, and says nothing
    return answer


@pytest.mark.nightly
def test_inductor_trains_the_same_at_any_number_of_ranks(pool: RankPool):
    """Beside itself alone: its kernels, of GELU and dropout, round in their own way. A C++ compiler takes seconds."""
    one, three = (joined(pool.run(compiled, world=world, timeout=300)) for world in (1, 3))
    assert one == three


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


@pytest.mark.thorough
@pytest.mark.parametrize("total", mostly_nightly([1, 2, 8], 2))
@run_on_ranks(world=1, spawned=True)  # what earlier tests have left in a process may be freed meanwhile
def test_a_rank_keeps_a_gradient_for_each_level_of_the_tree(total: int):
    """How many copies of all gradients there are at the peak of the second step."""
    # Three weights of 36 MiB, each of which the allocator maps and unmaps by itself.
    wide = nn.ModuleList(nn.Linear(9 << 10, 1 << 10, bias=False) for _ in range(3))
    net = Layer(lambda self, row: sum(layer(row).sum() for layer in self.layers), layers=wide)
    model = syncengine.Parallel(net)
    batches = syncengine.micro_batches(model, DataLoader(torch.ones(2 * total, 9 << 10)), total=total)
    for _ in range(2):
        model.zero_grad()
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
        for _, row in batches:
            model(row).backward()
    copies = (memory("VmHWM") - before) / sum(p.numel() * p.element_size() for p in net.parameters())
    assert total.bit_length() - 0.1 < copies < total.bit_length() + 1 / 3 + 0.1, copies  # and one parameter's


def save_or_go_on(folder: str, goes_on: bool) -> str:
    def save_or_load(net: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer), "batches": batches}
        (dcp.load if goes_on else dcp.save)(state, checkpoint_id=folder)
        if goes_on:
            net.load_state_dict(state["model"])
            set_optimizer_state_dict(net, optimizer, state["optimizer"])

    return train("language", 8, 5, **{"before" if goes_on else "after": save_or_load})[0]


@pytest.mark.thorough
def test_a_checkpoint_goes_on_at_another_number_of_ranks(pool: RankPool, expected, tmp_path: Path):
    for saving, loading in [(2, 3), (3, 1)]:
        folder = str(tmp_path / f"{saving}")
        pool.run(save_or_go_on, folder, False, world=saving, gloo=True)
        answers = pool.run(save_or_go_on, folder, True, world=loading, gloo=True)
        assert set(answers) == {expected("language", 8, 10)[0]}


# The kinds that are drawn, and a bit for each parameter that may be frozen. torch 2.13 crashes in the backward of a
# GroupNorm in channels_last behind which nothing is trained, so 13.
DRAWN = {"convolution": 13, "branches": 14, "table": 3}


@pytest.mark.nightly
@settings(deadline=None, max_examples=10)
@given(st.integers(1, 9), st.sampled_from([*DRAWN]), st.text("ab", min_size=1, max_size=5), st.integers(0, 15))
def test_drawn_jobs_train_the_same(pool: RankPool, expected, total: int, kind: str, hosts: str, frozen: int):
    hosts, frozen = hosts[:total], frozen & DRAWN[kind]
    assert joined(pool.run(train, kind, total, 3, frozen, hosts=hosts)) == expected(kind, total, 3, frozen)
