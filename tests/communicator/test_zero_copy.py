"""Gradients are reduced where autograd left them: what is copied nevertheless, and that nobody notices."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from faults import memory_of_this_process
from models import workload
from parallel_models import Mlp, different_bits
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine

MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", ["resnet18", "gpt", "lstm", "recommender"])
@run_on_ranks()
def test_what_is_copied(name: str):
    """Of gradients of at least a page: nothing."""
    kind = workload(name)
    model = syncengine.Parallel(kind.model(), **kind.options)
    generator = torch.Generator().manual_seed(syncengine.rank())
    for step in range(3):  # the first plan, the rebuilt one, and memory that was used before
        kind.loss(model, generator, step).backward()
        stats = model.sync_stats()
        assert stats["copied_bytes"].pop("small") <= sum(p.nbytes for p in model.parameters() if p.nbytes < PAGE)
        assert not any(stats["copied_bytes"].values()), stats
        assert stats["reduced_bytes"] == sum(p.nbytes for p in model.parameters())
        model.zero_grad()


@pytest.mark.nightly
@run_on_ranks(spawned=True)
def test_memory_does_not_grow_with_changing_batch_sizes():
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
            # Anonymous memory in full: what is in common with other forks would grow when one of them ends.
            seen.append(memory_of_this_process("Anonymous") + memory_of_this_process("Pss_Shmem"))
            syncengine.barrier()
    assert seen[1] - seen[0] < MIB


@pytest.mark.thorough
@run_on_ranks(gloo=True)
def test_threads_that_allocate_at_the_same_time():
    """Other threads allocate, free and run their own backward while this one synchronizes."""
    stop = threading.Event()

    def churn(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        while not stop.is_set():
            weight = torch.randn(64, 64, generator=generator, requires_grad=True)
            (weight * 2).sum().backward()
            assert torch.equal(weight.grad, torch.full((64, 64), 2.0)), "another gradient than its own"

    with ThreadPoolExecutor(3) as threads:
        churning = [threads.submit(churn, seed) for seed in range(3)]
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
        for future in churning:
            future.result()
    assert different_bits(*found) == 0


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of samples that differ between ranks."""
    return model(batch / 24 * (1 + syncengine.rank())).square().mean()


@pytest.mark.thorough
@run_on_ranks(spawned=True, gloo=True)
def test_data_loaders_forked_before_during_and_after_training():
    """Workers forked before the first step, during training (one epoch after the other), and after it."""
    torch.manual_seed(0)
    module = Mlp()
    numbers = torch.arange(24.0)[:, None].repeat(1, 24)
    before = iter(torch.utils.data.DataLoader(numbers, 6, num_workers=1, multiprocessing_context="fork"))
    model = syncengine.Parallel(module)
    for batch in before:
        loss_of(model, batch).backward()
    during = torch.utils.data.DataLoader(numbers, 6, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for batch in during:
            loss_of(model, batch).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    after = [batch for batch in during]  # noqa: C416
    assert torch.equal(torch.cat(after)[:, 0], torch.arange(24.0))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    expected = [torch.zeros_like(p) for p in module.parameters()]
    for _ in range(3):
        for batch in after:
            own = torch.autograd.grad(loss_of(module, batch), list(module.parameters()))
            for total, grad in zip(expected, own, strict=True):
                dist.all_reduce(total.add_(grad))
                total.div_(2)
    assert all(map(torch.equal, grads, expected))  # which Gloo has made the same on both ranks
