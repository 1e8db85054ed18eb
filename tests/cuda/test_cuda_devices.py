"""Ranks on several GPUs: one for each, and fewer. Skipped where there are not as many.

Elsewhere ranks share whatever there is; in tests/cuda/software/peers_test.cpp devices do not reach each other.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_ranks import marked, run_processes, seeing
from cuda_training import batch, job
from parallel_models import Mlp
from test_cuda_conformance import NUMERICS, conformance
from test_cuda_equality import trains_as_ddp
from test_cuda_parallel import averages, averages_on_streams, check_average, exact_average, replays
from torch import nn

import syncengine
from syncengine.errors import InvalidUsage


def collectives(rank: int) -> str:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    assert torch.cuda.current_device() == device.index
    for numerics in NUMERICS:
        communicator = syncengine.init(numerics=numerics, timeout=60.0)
        conformance(communicator, "devices", most=20)
        another = torch.cuda.device_count() - 1 - device.index
        with torch.cuda.device(another):  # the tensor's counts, not the current one
            for tensor in (torch.empty(1000, device=device), communicator.empty([1000], torch.float32, device)):
                torch.cuda._sleep(1_000_000)
                tensor.fill_(rank + 1.0)
                work = communicator.all_reduce(tensor, async_op=True)
                communicator.barrier(device=device)
                work.wait()
                assert tensor.eq(sum(range(communicator.size + 1))).all()
        syncengine.shutdown()
    return "good"


@marked
@pytest.mark.parametrize(("world", "devices"), [(2, 2), (3, 3), (3, 2), (8, 8)])
def test_collectives(world: int, devices: int):
    assert run_processes(world, collectives, environ=seeing(devices)) == ["good"] * world


@marked
@pytest.mark.parametrize("devices", [3, 2])
def test_training_is_bit_equal_to_ddp_over_gloo(devices: int):
    assert run_processes(3, trains_as_ddp, environ={"SYNCENGINE_NUMERICS": "ring", **seeing(devices)}) == [[]] * 3


@marked
@pytest.mark.parametrize("body", [averages, averages_on_streams, replays])
@pytest.mark.parametrize("devices", [3, 2])
def test_averages_and_captured_steps(devices: int, body: Callable[[int], Any]):
    assert run_processes(3, body, environ=seeing(devices)) == ["good"] * 3


def models_elsewhere(rank: int) -> str:
    """One on a device that is not the current one; one on two devices."""
    device = torch.device("cuda", 1 - torch.cuda.current_device())
    with job():
        torch.manual_seed(0)
        model = syncengine.Parallel(Mlp().to(device))
        for step in range(3):
            model.zero_grad()
            x = batch(step).cpu().to(device)
            expected = exact_average(model.module, x)
            model(x).square().mean().backward()
            check_average(model.module, expected)
        both = nn.Sequential(nn.Linear(24, 24, device="cuda:0"), nn.Linear(24, 1, device="cuda:1"))
        with pytest.raises(InvalidUsage, match="several devices: parameter 0.weight is on cuda:0, 1.weight on cuda:1"):
            syncengine.Parallel(both)
    return "good"


@marked
def test_models_elsewhere_than_on_the_current_device():
    assert run_processes(2, models_elsewhere, environ=seeing(2)) == ["good"] * 2
