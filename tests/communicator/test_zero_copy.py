"""Gradients are reduced where autograd left them: what is copied nevertheless, and that nobody notices."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parallel_models import Mlp, different_bits
from pool import RankPool, run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine
from examples.gpt.model import GPT, GPTConfig

MIB = 2**20


# --- What is copied


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(24, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5000, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens).mean(1))


class LearnedPositions(nn.Module):
    """The gradient of a viewed table that is added to activations is a view of theirs: one memory for both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.positions = nn.Parameter(torch.randn(32 * 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x) + self.positions.view(1, 32, 64))


TOKENS = torch.arange(64).view(2, 32) % 50
COPIES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, dict[str, int]]] = {
    "mlp": (Mlp, torch.ones(5, 24), {}),
    "gpt, tied weights": (lambda: GPT(GPTConfig(vocabulary=50, context=32)), TOKENS, {}),
    "conv, batch norm": (Convolutional, torch.ones(2, 3, 12, 12), {}),
    "lstm": (Recurrent, torch.ones(2, 7, 24), {}),
    "embedding": (Embedded, TOKENS, {}),
    "learned positions": (LearnedPositions, torch.ones(1, 32, 16), {"shared storage": 4 * 32 * 64}),
}


def copied_bytes(name: str) -> list[tuple[dict[str, int], int, int, int]]:
    build, inputs, _ = COPIES[name]
    torch.manual_seed(0)
    model = syncengine.Parallel(build())
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    below_a_page = sum(p.nbytes for p in model.parameters() if p.nbytes < 4096)
    found = []
    for _ in range(3):  # the first plan, the rebuilt one, and memory that was used before
        model(inputs).square().sum().backward()
        stats = model.sync_stats()
        copied = {reason: n for reason, n in stats["copied_bytes"].items() if n}
        found.append((copied, stats["reduced_bytes"], gradient_bytes, below_a_page))
        model.zero_grad()
    return found


@pytest.mark.parametrize("name", COPIES)
def test_what_is_copied(pool: RankPool, name: str):
    for answer in pool.run(copied_bytes, name):
        for copied, reduced, gradient_bytes, below_a_page in answer:
            assert copied.pop("small", 0) <= below_a_page
            assert copied == COPIES[name][2]
            assert reduced == gradient_bytes


# --- Ways to use gradients


def replaced_by_hook(model: nn.Module, x: torch.Tensor) -> None:
    for p in model.parameters():
        p.register_hook(lambda grad: torch.full_like(grad, 0.5) * grad.mean())
    model(x).square().sum().backward()


def retained_graph(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().sum()
    with model.no_sync():
        model(x).sum().backward()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)


def several_backwards(model: nn.Module, x: torch.Tensor) -> None:
    for factor in (1.0, 2.0, 3.0):
        (model(x * factor) * factor).square().sum().backward()


def clipped(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def kept_across_steps(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()
    kept = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x * 3).square().sum().backward()
    for p, earlier in zip(model.parameters(), kept, strict=True):
        p.grad += earlier


def detached_in_place(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()
    for p in model.parameters():
        p.grad.detach_().mul_(2)
    model(x).square().sum().backward()


USES = [replaced_by_hook, retained_graph, several_backwards, clipped, kept_across_steps, detached_in_place]


@run_on_ranks(gloo=True)
def test_gradients_are_ddps_however_they_are_used():
    for use in USES:
        found = []
        for wrap in (syncengine.Parallel, DistributedDataParallel):
            torch.manual_seed(1)
            model = wrap(Mlp())
            x = torch.randn(5, 24, generator=torch.Generator().manual_seed(syncengine.rank()))
            use(model, x)
            use(model, x)  # into what the first left, and with rebuilt buckets
            found.append([p.grad for p in model.parameters()])
        assert different_bits(*found) == 0, use.__name__


# --- Memory


def memory() -> int:
    """Anonymous and shared memory of this process, in bytes; of what ranks share, its part.

    Anonymous memory in full: what this process still has in common with others that were forked like it would seem to
    grow when one of them ends.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Anonymous", "Pss_Shmem"))


def growth_with_changing_batches() -> list[int]:
    torch.manual_seed(0)
    model = syncengine.Parallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    sizes = torch.randint(1, 200, (1000,), generator=torch.Generator().manual_seed(syncengine.rank()))
    seen = []
    for step, size in enumerate(sizes.tolist()):
        model(torch.ones(size, 64)).square().mean().backward()
        model.zero_grad()
        if step in (299, 999):
            syncengine.barrier()
            gc.collect()
            seen.append(memory())
            syncengine.barrier()
    return seen


def test_memory_does_not_grow_with_changing_batch_sizes(pool: RankPool):
    with pool.spawn_ranks(growth_with_changing_batches) as ranks:
        for rank in ranks:
            early, late = rank.result()
            assert late - early < MIB


def check_shutdown_with_gradients_alive() -> None:
    model = syncengine.Parallel(Mlp())
    x = torch.ones(3, 24)
    model(x).square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    copies = [grad.clone() for grad in grads]
    tensor = syncengine.empty(1000)
    tensor.fill_(3)
    syncengine.shutdown()
    del model
    gc.collect()
    assert all(map(torch.equal, grads, copies))
    for grad in grads:
        grad.mul_(2)
    assert all(torch.equal(grad, copy * 2) for grad, copy in zip(grads, copies, strict=True))
    assert tensor.sum() == 3000
    syncengine.init()
    again = syncengine.Parallel(Mlp())
    again(x).square().sum().backward()


def test_gradients_outlive_the_engine(pool: RankPool):
    with pool.spawn_ranks(check_shutdown_with_gradients_alive) as ranks:
        for rank in ranks:
            rank.result()


@run_on_ranks(gloo=True)
def test_threads_that_allocate_at_the_same_time():
    """Other threads allocate, free and run their own backward while this one synchronizes."""
    stop = threading.Event()
    wrong: list[str] = []

    def churn(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        while not stop.is_set():
            weight = torch.randn(64, 64, generator=generator, requires_grad=True)
            (weight * 2).sum().backward()
            if not torch.equal(weight.grad, torch.full((64, 64), 2.0)):
                wrong.append(f"thread {seed}: another gradient than its own")
                return

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        found = []
        for wrap in (syncengine.Parallel, DistributedDataParallel):
            torch.manual_seed(1)
            model = wrap(Mlp())
            for step in range(20):
                x = torch.randn(5, 24, generator=torch.Generator().manual_seed(step * 8 + syncengine.rank()))
                model(x).square().sum().backward()
            found.append([p.grad for p in model.parameters()])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert different_bits(*found) == 0


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((24,), float(index))


def train_on_loaders() -> list[torch.Tensor]:
    """Workers forked before the first step, during training (one epoch after the other), and after it."""
    torch.manual_seed(0)
    module = Mlp()
    before = iter(torch.utils.data.DataLoader(Numbers(), 6, num_workers=1, multiprocessing_context="fork"))
    model = syncengine.Parallel(module)
    for batch in before:
        model(batch / 24).square().mean().backward()
    during = torch.utils.data.DataLoader(Numbers(), 6, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for batch in during:
            model(batch / 24).square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    after = [batch for batch in during]  # noqa: C416
    assert torch.equal(torch.cat(after)[:, 0], torch.arange(24.0))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    alone = Mlp()
    alone.load_state_dict(module.state_dict())
    for _ in range(3):
        for batch in after:
            alone(batch / 24).square().mean().backward()
    assert all(map(torch.allclose, grads, [p.grad for p in alone.parameters()]))  # the same batches on every rank
    return grads


def test_data_loaders_forked_before_during_and_after_training(pool: RankPool):
    with pool.spawn_ranks(train_on_loaders) as ranks:
        first, second = (rank.result() for rank in ranks)
    assert different_bits(first, second) == 0
