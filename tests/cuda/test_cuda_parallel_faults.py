"""``Parallel(model.cuda())`` when a rank fails, or where something is not supported or does not fit."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cuda_ranks import alone, marked, run_processes
from cuda_training import batch, deterministic, graph_step, on_gpus
from parallel_models import Mlp
from torch import nn
from torch.autograd import Variable

import syncengine
from syncengine.errors import Aborted, InvalidUsage, PeerLost, SyncError, Timeout

# ---- faults ----

FAULT_AT = 3  # the step in which rank 1 fails

FAULTS: dict[str, Callable[[nn.Module], None]] = {
    "killed": lambda model: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda model: os.kill(os.getpid(), signal.SIGSTOP),
    "forward": lambda model: model.module.register_forward_pre_hook(lambda module, inputs: 1 / 0),
    "backward": lambda model: model.module.head.weight.register_hook(lambda grad: 1 / 0),
}


def suffers(rank: int, kind: str) -> tuple[str, str, bool]:
    """A survivor's error, its text, and whether all it has trained since the last good step is NaN."""
    deterministic()
    syncengine.init(timeout=15.0)  # connecting, with a CUDA context to be made, takes some of it
    torch.manual_seed(0)
    model = syncengine.Parallel(Mlp().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(6, 24, device="cuda")
    for _ in range(FAULT_AT):
        graph_step(model, optimizer, x)
    torch.cuda.synchronize()
    good = [p.detach().clone() for p in model.parameters()]
    steps = 0
    try:
        syncengine.barrier()  # all have these averages; the fault may already end this wait
        if rank == 1:
            FAULTS[kind](model)
        while True:
            graph_step(model, optimizer, x)
            torch.cuda.synchronize()  # no stream waits for ever
            steps += 1
    except (SyncError, ZeroDivisionError) as error:
        unreduced = [
            p.isnan().all().item() if steps else torch.equal(p, q)
            for p, q in zip(model.parameters(), good, strict=True)
        ]
        return type(error).__name__, str(error), all(unreduced)


@alone
@marked
@pytest.mark.parametrize(
    ("world", "kind", "error", "text"),
    [
        (2, "killed", PeerLost, "rank 1"),
        (3, "killed", PeerLost, "rank 1"),
        (2, "stopped", Timeout, "rank 1"),
        (2, "forward", Aborted, "rank 1 raised in forward: ZeroDivisionError"),
        (2, "backward", Aborted, "rank 1: backward aborted"),
        (3, "backward", Aborted, "rank 1: backward aborted"),
    ],
)
def test_a_failing_rank(world: int, kind: str, error: type[SyncError], text: str):
    killed = 1 if kind in ("killed", "stopped") else None
    outcomes = run_processes(world, partial(suffers, kind=kind), killed=killed)
    for name, said, is_nan in outcomes[::2]:  # all but rank 1
        assert name == error.__name__ and text in said
        assert is_nan, "trained on gradients that were not reduced"


class Lingers:
    """A callback of a graph task, which keeps the rest of the task for a moment when that is let go."""

    def __call__(self) -> None: ...

    def __del__(self) -> None:
        time.sleep(0.05)


def fails(rank: int) -> tuple[str, bool, str, bool]:
    """Backward's error, whether all .grad were None right after it, its text, and .grad behind the next forward.

    Rank 1 raises; rank 0's backward goes on when that is over.
    """

    def begin(grad: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(Lingers())
        if rank == 0:
            dist.barrier()

    syncengine.init(timeout=30)
    model = syncengine.Parallel(Mlp().cuda())
    loss = model(batch(0)).sum()
    loss.register_hook(begin)
    if rank == 1:
        next(model.parameters()).register_hook(lambda grad: 1 / 0)
    with pytest.raises((SyncError, ZeroDivisionError)) as error:
        loss.backward()
    at_once = all(p.grad is None for p in model.parameters())
    if rank == 1:
        dist.barrier()
    model(batch(1))
    gone = all(p.grad is None for p in model.parameters())
    syncengine.shutdown()
    return error.typename, at_once, str(error.value), gone


@on_gpus(in_job=False)
def test_a_failed_backward_leaves_no_gradients(rank: int):
    """Also where autograd's device thread lets go of the graph task after backward() has raised, as it may."""
    dist.init_process_group("gloo")
    ends = {fails(rank) for _ in range(10)}
    if rank == 0:
        assert ends == {("Aborted", True, "rank 1: backward aborted", True)}, ends
    else:
        assert {(raised, gone) for raised, _, _, gone in ends} == {("ZeroDivisionError", True)}, ends


@on_gpus()
def test_models_of_one_shape_are_not_taken_for_each_other(rank: int):
    models = [syncengine.Parallel(nn.Linear(24, 24).cuda()) for _ in range(2)]
    models.reverse() if rank == 1 else None
    with pytest.raises(SyncError) as error:
        for model in models * 2:
            model(batch(0)).sum().backward()
            torch.cuda.synchronize()
    text = f"{error.typename}: {error.value}"
    assert "Mismatch" in text and "bucket 0" in text, text


# ---- what is refused ----


@on_gpus()
def test_what_is_not_supported_is_refused_by_name(rank: int):
    mixed = nn.Sequential(nn.Linear(24, 24).cuda(), nn.Linear(24, 1))
    with pytest.raises(InvalidUsage, match=r"several devices: parameter 0.weight is on cuda:\d, 1.weight on cpu"):
        syncengine.Parallel(mixed)
    with pytest.raises(InvalidUsage, match="device_ids says device 99"):
        syncengine.Parallel(nn.Linear(1, 1).cuda(), device_ids=[99])
    norm = nn.BatchNorm1d(3).cuda()
    norm.running_mean = norm.running_mean.cpu()
    with pytest.raises(InvalidUsage, match="buffer running_mean on cpu"):
        syncengine.Parallel(norm)
    model = syncengine.Parallel(nn.Linear(24, 24).cuda())
    model.cpu()
    with pytest.raises(SyncError, match="stay where they were"):
        model(batch(0).cpu()).sum().backward()


@on_gpus(in_job=False)
def test_synchronized_norms_without_torch_distributed_are_refused(rank: int):
    """Torch's layer would normalize by this rank's batch alone, since torch.distributed is not initialized."""
    syncengine.init(timeout=60.0)
    text = r"^1, a SyncBatchNorm on cuda:\d exchanges .*: call torch\.distributed\.init_process_group\(\) first$"
    with pytest.raises(InvalidUsage, match=text):
        syncengine.Parallel(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)).cuda())
    syncengine.shutdown()
