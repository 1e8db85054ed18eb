"""The lines of docs/porting.md do what their left column says."""

import re

import pytest
import torch
from parallel_models import Mlp, data, different_bits
from pool import run_on_ranks
from repository import ROOT
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import syncengine

PAGE = (ROOT / "docs" / "porting.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"syncengine((?:\.\w+)+)\(", PAGE))))
def test_what_the_page_calls_is_there(name: str):
    target = syncengine
    for part in name.split(".")[1:]:
        target = getattr(target, part)
    assert callable(target)


@pytest.mark.parametrize("method", sorted(set(re.findall(r"\bmodel\.(\w+)\(", PAGE))))
def test_methods_of_the_page_are_there(method: str):
    assert callable(getattr(syncengine.Parallel, method))


def mean(model: nn.Module, step: int = 0) -> torch.Tensor:
    return model(data(step)).square().mean()


@run_on_ranks()
def test_lines_for_horovod():
    """Each against what all ranks' data give in one process."""
    rank, size = syncengine.rank(), syncengine.world_size()
    torch.manual_seed(rank)  # hvd.broadcast_parameters: Parallel does it
    model = syncengine.Parallel(Mlp())
    alone = Mlp()
    alone.load_state_dict(model.module.state_dict())

    def gradients_of_all(steps: list[int]) -> list[torch.Tensor]:
        alone.zero_grad()
        for r in range(size):
            for step in steps:
                alone(data(step, r)).square().mean().backward()
        return [p.grad.clone() for p in alone.parameters()]

    def check(steps: list[int], factor: float) -> None:
        for ours, theirs in zip(model.parameters(), gradients_of_all(steps), strict=True):
            torch.testing.assert_close(ours.grad, theirs * factor)
        model.zero_grad()

    mean(model).backward()  # op=hvd.Average
    check([0], 1 / size)
    (mean(model) * syncengine.world_size()).backward()  # op=hvd.Sum
    check([0], 1.0)
    with model.no_sync():  # backward_passes_per_step=2
        mean(model, 1).backward()
    mean(model, 2).backward()
    check([1, 2], 1 / size)

    t = torch.full((2,), float(rank))
    out = torch.empty(2 * size)
    syncengine.all_gather(out, t)
    assert out.tolist() == [0.0, 0.0, 1.0, 1.0]
    syncengine.all_reduce(t, "avg")
    assert t.tolist() == [0.5, 0.5]
    syncengine.broadcast(t.fill_(rank), 0)
    assert t.tolist() == [0.0, 0.0]
    with model.join():
        for step in range(1 + rank):
            mean(model, step).backward()


def deepspeed_lines(wrap: type[nn.Module], zero: bool) -> list[torch.Tensor]:
    """Accumulation over 2 micro-batches, clipping, and stage 1 by torch's own optimizer."""
    torch.manual_seed(0)
    model = wrap(Mlp())
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(4):
        with model.no_sync():
            (mean(model, 2 * step) / 2).backward()
        (mean(model, 2 * step + 1) / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [*norms, *(t.detach().clone() for t in model.module.state_dict().values())]


@run_on_ranks(gloo=True)
def test_lines_for_deepspeed():
    for zero in (False, True):
        ours, theirs = (deepspeed_lines(wrap, zero) for wrap in (syncengine.Parallel, DistributedDataParallel))
        assert not different_bits(ours, theirs)
