"""Communication hooks and sparse gradients of ``Parallel(model.cuda())``: bits, streams, errors.

Tests without a GPU are in test_comm_hooks.py and test_sparse_gradients.py, on flat buckets too.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_ranks import marked, run_processes
from cuda_training import batch, on_gpus
from faults import WITHIN
from models.workload import same_bits
from parallel_models import CAP, Mlp
from test_cuda_equality import Run, train
from test_cuda_parallel import LONG, averages_on_streams, host_runs_ahead, local_gradients
from test_sparse_gradients import Tables, ids
from test_torch_comm_hooks import TORCH_HOOKS, with_hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def runs_of(name: str) -> list[Run]:
    if "PowerSGD" in name:  # as in test_torch_comm_hooks
        return [Run(accumulate=a, options=(("bucket_cap_mb", 100),)) for a in (1, 2)]
    if "fused" in name:
        return [Run()]
    return [Run(), Run(accumulate=2, set_to_none=False, options=tuple(CAP.items()))]


@on_gpus()
def test_torchs_hooks_train_bit_equal_to_ddp_over_gloo(rank: int):
    different = []
    for name, register in TORCH_HOOKS.items():
        for run in runs_of(name):
            ours, theirs = (
                train(partial(with_hook, wrap, register), run)
                for wrap in (syncengine.Parallel, DistributedDataParallel)
            )
            if len(ours) != len(theirs) or not all(map(same_bits, ours, theirs)):
                different.append(f"{name}: {run}")
    return different


# ---- streams ----


def average_at_once(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """On the stream that is current in the hook."""
    assert bucket.buffer().is_cuda
    assert all(part.is_cuda for part in bucket.gradients())
    syncengine.all_reduce(bucket.buffer(), "avg")
    return syncengine.hooks.completed(bucket.buffer())


def average_aside(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """On another stream, into memory of that stream, late."""
    buffer, side = bucket.buffer(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    buffer.record_stream(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG // 1000)
        average = buffer.clone()
        syncengine.all_reduce(average, "avg")
        return syncengine.hooks.completed(average)


def average_in_a_thread(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The future is completed when backward has come to its end, and before the device has."""
    buffer, side = bucket.buffer(), torch.cuda.Stream()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
    side.wait_stream(torch.cuda.current_stream())
    syncengine.all_reduce(buffer, "avg")  # in the order of buckets: threads have none
    side.wait_stream(torch.cuda.current_stream())

    def complete() -> None:
        time.sleep(0.02)
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG // 1000)
            future.set_result(buffer.clone())

    threading.Thread(target=complete).start()
    return future


@marked
@pytest.mark.parametrize("hook", [average_at_once, average_aside, average_in_a_thread])
def test_backwards_stream_waits_for_what_a_hook_has_queued_anywhere(hook: Hook):
    assert run_processes(2, partial(averages_on_streams, hook=hook)) == ["good"] * 2


@marked
def test_the_host_does_not_wait_for_futures_that_are_complete():
    assert run_processes(2, partial(host_runs_ahead, hook=average_aside)) == ["good"] * 2


# ---- alone, later, and failing ----


@on_gpus(world=1)
def test_one_rank_runs_its_hook_too(rank: int):
    for hook, change in (
        (average_at_once, lambda grad: grad),
        (syncengine.hooks.bf16_compress, lambda grad: grad.bfloat16().float()),
    ):
        model = syncengine.Parallel(Mlp().cuda())
        model.register_comm_hook(None, hook)
        local = local_gradients(model.module, batch(0))
        for _ in range(2):
            model.zero_grad()
            model(batch(0)).square().mean().backward()
            for parameter, grad in zip(model.parameters(), local, strict=True):
                assert same_bits(parameter.grad, change(grad))


@on_gpus()
def test_a_hook_may_come_after_some_steps(rank: int):
    torch.manual_seed(0)  # the tolerance of bfloat16 below holds for these weights, not for all
    for hook in (average_at_once, syncengine.hooks.bf16_compress):
        model = syncengine.Parallel(Mlp().cuda(), bucket_cap_mb=0.5)
        plain = [torch.zeros_like(p) for p in model.parameters()]
        for step in range(6):
            if step == 3:
                plain = [p.grad.clone() for p in model.parameters()]
                model.register_comm_hook(None, hook)
            model.zero_grad()
            model(batch(0)).square().mean().backward()
        for parameter, grad in zip(model.parameters(), plain, strict=True):
            if hook is average_at_once:
                assert same_bits(parameter.grad, grad)
            else:
                torch.testing.assert_close(parameter.grad, grad, rtol=0.02, atol=1e-4)


@on_gpus()
def test_an_error_of_a_hook_reaches_every_rank(rank: int):
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank == 1:
            raise KeyError("no such bucket")
        return torch.futures.Future(devices=[bucket.buffer().device])  # never completed

    model = syncengine.Parallel(nn.Linear(24, 3).cuda())
    model.register_comm_hook(None, hook)
    loss = model(batch(0)).sum()
    dist.barrier()
    with pytest.raises(KeyError if rank == 1 else syncengine.errors.Aborted, match="no such bucket"):
        loss.backward()
    deadline = time.monotonic() + WITHIN  # autograd's thread lets go of what is left a little later
    while any(p.grad is not None for p in model.parameters()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(p.grad is None for p in model.parameters())


# ---- sparse gradients ----


def average_tables(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Gathers on the host what is sparse, as Gloo would."""
    buffer = bucket.buffer()
    if not buffer.is_sparse:
        return average_at_once(state, bucket)
    dense = buffer.to_dense().cpu()
    dist.all_reduce(dense)
    average = (dense / dist.get_world_size()).to_sparse(1).coalesce()
    return syncengine.hooks.completed(average.to(buffer.device))


@on_gpus()
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("with_hook", [False, True])
def test_sparse_gradients_are_averaged(rank: int, world: int, with_hook: bool):
    """Beside dense sums over what Gloo gathers."""
    model = syncengine.Parallel(Tables().cuda())
    if with_hook:
        model.register_comm_hook(None, average_tables)
    side = torch.cuda.Stream()
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        x = ids(step).cuda()
        expected = []
        for grad in torch.autograd.grad(model.module(x).square().sum(), list(model.module.parameters())):
            dense = (grad.coalesce().to_dense() if grad.is_sparse else grad).cpu()
            dist.all_reduce(dense)
            expected.append(dense / world)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if step > 1 else torch.cuda.current_stream()):
            model(x).square().sum().backward()
            found = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]
            found = [grad.cpu() for grad in found]
        torch.cuda.current_stream().wait_stream(side)
        assert model.module.words.weight.grad.is_coalesced()
        for grad, average in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, average)
