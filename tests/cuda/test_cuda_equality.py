"""Training on CUDA: Parallel beside DDP over Gloo, and over NCCL, in the same processes: all gradients of all steps."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_ranks import marked, needs_real, run_processes
from cuda_training import batch, job, on_gpus
from parallel_models import CAP, Conv, Mixed, Mlp, Tied
from test_cuda_conformance import same
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import syncengine


@dataclass(frozen=True)
class Run:
    model: Callable[[], nn.Module] = Mlp
    optimizer: tuple[str, tuple[tuple[str, Any], ...]] = ("SGD", (("lr", 0.05), ("momentum", 0.9)))
    dtype: torch.dtype | None = torch.float32
    accumulate: int = 1
    set_to_none: bool = True
    autocast: torch.dtype | None = None
    scale: float = 1024.0  # at first, of float16's losses
    spike: int | None = None  # the rank whose gradients overflow in the second step
    options: tuple[tuple[str, Any], ...] = ()


ADAM = ("AdamW", (("lr", 0.01), ("fused", True)))
FOREACH = ("SGD", (("lr", 0.05), ("foreach", True)))
OVERFLOWS = [Run(autocast=torch.float16, scale=2.0**22), Run(autocast=torch.float16, spike=1)]
RUNS = [
    Run(),
    Run(optimizer=ADAM),
    Run(optimizer=FOREACH, accumulate=3, set_to_none=False),
    Run(dtype=torch.bfloat16),
    Run(dtype=torch.float64, options=tuple(CAP.items())),
    Run(model=Conv),
    Run(model=Tied),
    Run(model=Mixed, dtype=None),
    Run(autocast=torch.float16),
    Run(autocast=torch.float16, optimizer=ADAM, accumulate=2),
    Run(autocast=torch.bfloat16, optimizer=FOREACH),
    Run(options=(("find_unused_parameters", True),)),
    Run(options=(("static_graph", True),)),
    Run(options=(("gradient_as_bucket_view", True), ("bucket_cap_mb", 0.5))),
    *OVERFLOWS,
]
MIXED_PRECISION = [
    Run(options=(("mixed_precision", _MixedPrecision(torch.bfloat16, torch.float32, torch.float32)),)),
    Run(options=(("mixed_precision", _MixedPrecision(torch.bfloat16)),)),
]


def train(wrap: Callable[..., nn.Module], run: Run, steps: int = 4) -> list[torch.Tensor]:
    """All gradients of all steps, what the scaler makes of them, and what becomes of the model."""
    torch.manual_seed(7)
    module = run.model().cuda()
    ids = [torch.cuda.current_device()]
    model = wrap(module.to(run.dtype) if run.dtype else module, device_ids=ids, **dict(run.options))
    name, arguments = run.optimizer
    optimizer = getattr(torch.optim, name)(model.parameters(), **dict(arguments))
    scaler = torch.amp.GradScaler("cuda", init_scale=run.scale, enabled=run.autocast is torch.float16)
    history = []
    for step in range(steps):
        for micro in range(run.accumulate):
            last = micro == run.accumulate - 1
            x = batch(10 * step + micro).to(run.dtype or torch.float32)
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cuda", run.autocast, enabled=run.autocast is not None):
                    loss = model(x.cpu()).float().square().mean()  # device_ids: moved to the GPU
                if step == 1 and run.spike == dist.get_rank():
                    loss = loss * 1e6
                scaler.scale(loss).backward()
        history += [p.grad.clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        history.append(torch.tensor(scaler.get_scale()))
        optimizer.zero_grad(set_to_none=run.set_to_none)
    return history + [t.detach().clone() for t in model.state_dict().values()]


def differ(runs: list[Run]) -> list[str]:
    """Those that do not train as under DDP."""
    different = []
    for run in runs:
        ours, theirs = train(syncengine.Parallel, run), train(DistributedDataParallel, run)
        if len(ours) != len(theirs) or not all(map(same, ours, theirs)):
            different.append(str(run))
    return different


def trains_as_ddp(rank: int, runs: list[Run] = RUNS) -> list[str]:
    with job():
        return differ(runs)


@marked
def test_two_ranks_train_bit_equal_to_ddp_over_gloo():
    assert run_processes(2, trains_as_ddp) == [[], []]


@marked
def test_three_ranks_in_a_ring_train_bit_equal_to_ddp_over_gloo():
    assert run_processes(3, trains_as_ddp, environ={"SYNCENGINE_NUMERICS": "ring"}) == [[]] * 3


@on_gpus(world=3)
def test_three_ranks_in_rank_order_differ_from_ddp_by_rounding_alone(rank: int):
    runs = [Run(dtype=torch.float64), Run(dtype=torch.float64, model=Conv, accumulate=3, set_to_none=False)]
    for run in runs:
        ours, theirs = train(syncengine.Parallel, run), train(DistributedDataParallel, run)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def scales(rank: int) -> list[list[float]]:
    with job():
        return [[t.item() for t in train(syncengine.Parallel, run) if t.dim() == 0] for run in OVERFLOWS]


@marked
def test_steps_that_overflow_are_skipped_by_all_ranks():
    first, second = run_processes(2, scales)
    assert first == second
    too_large, spike = first
    assert too_large[:2] == [2.0**21, 2.0**20] and too_large[-1] == too_large[-2]
    assert spike == [1024.0, 512.0, 512.0, 512.0]


def trains_as_ddp_over_nccl(rank: int) -> list[str]:
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return trains_as_ddp(rank)


@needs_real("NCCL")
@marked
def test_two_ranks_train_bit_equal_to_ddp_over_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each of 2 ranks")
    assert run_processes(2, trains_as_ddp_over_nccl) == [[], []]


@needs_real("memory in which DDP's mixed precision finds what it has freed")
@marked
def test_mixed_precision_trains_bit_equal_to_ddp_over_gloo():
    assert run_processes(2, partial(trains_as_ddp, runs=MIXED_PRECISION)) == [[], []]
