"""hvd.join() beside what a script does besides reducing: backwards of collectives, SyncBatchNorm, other optimizers."""

import pytest
import torch
from horovod_ranks import run_with_hvd
from test_horovod import of_rank

import syncengine.horovod as hvd
from syncengine.errors import InvalidUsage, Mismatch

DOUBLE = torch.float64
SOON = {"timeout": 60.0}


@pytest.mark.parametrize("joined", [0, 1, 2])
@run_with_hvd(world=3, settings=SOON)
def test_backward_beside_join(joined: int):
    """Rank r gathers r + 1 rows before one of them joins; the gradient is an average, in which that one has zeros."""
    rank, size = hvd.rank(), hvd.size()
    x = torch.ones(rank + 1, 2, dtype=DOUBLE, requires_grad=True)
    y = torch.ones(4, 2, dtype=DOUBLE, requires_grad=True)
    gathered, part = hvd.allgather(x), hvd.reducescatter(y)
    if rank == joined:
        hvd.join()
        return
    first = sum(r + 1 for r in range(rank))
    (gathered * of_rank(rank, DOUBLE, gathered.shape)).sum().backward()
    everyone = sum(of_rank(r, DOUBLE, gathered.shape) for r in range(size) if r != joined) / size
    torch.testing.assert_close(x.grad, everyone[first : first + rank + 1])
    with pytest.raises(InvalidUsage, match=rf"allgather needs every rank, but rank {joined} has called join\(\)"):
        part.sum().backward()
    hvd.join()


@pytest.mark.parametrize(("steps", "world"), [([2, 0], 2), ([1, 3, 2], 3)], ids=str)
@run_with_hvd(settings=SOON)
def test_sync_batch_norm_beside_join(steps: list[int], world: int):
    """Against a BatchNorm of one process over the samples of those who still have some."""
    rank = hvd.rank()
    ours, alone = hvd.SyncBatchNorm(3, dtype=DOUBLE), torch.nn.BatchNorm1d(3, dtype=DOUBLE)
    for step in range(steps[rank]):
        active = [r for r, own in enumerate(steps) if step < own]
        parts = [torch.randn(r + 2, 3, generator=torch.Generator().manual_seed(r), dtype=DOUBLE) for r in active]
        slopes = [of_rank(9 + r, DOUBLE, (r + 2, 3)) for r in active]
        whole = torch.cat(parts).requires_grad_()
        (alone(whole) * torch.cat(slopes)).sum().backward()
        me, sizes = active.index(rank), [r + 2 for r in active]
        x = parts[me].clone().requires_grad_()
        (ours(x) * slopes[me]).sum().backward()
        torch.testing.assert_close(x.grad, whole.grad.split(sizes)[me])
        torch.testing.assert_close(ours(x), alone(whole).split(sizes)[me])
        torch.testing.assert_close(ours.running_var, alone.running_var)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == len(active)
    assert hvd.join() == max(r for r, own in enumerate(steps) if own == max(steps))


@run_with_hvd()
def test_sync_batch_norm_is_named_where_calls_differ():
    with pytest.raises(Mismatch) as caught:
        if hvd.rank() == 0:
            hvd.SyncBatchNorm(3)(torch.ones(2, 3))
        else:
            hvd.allreduce(torch.ones(1))
    hvd.init()
    assert torch.isfinite(hvd.SyncBatchNorm(3)(torch.ones(2, 3))).all(), "the new communicator is used"
    text = str(caught.value)
    assert "rank 0 called SyncBatchNorm of 3 channels, but rank 1 called allreduce" in text
