"""hvd.join() beside what a script does besides reducing: backwards of collectives, SyncBatchNorm, other optimizers."""

from __future__ import annotations

import pytest
import torch
from test_horovod import of_rank

import syncengine.horovod as hvd

DOUBLE = torch.float64


def backward_beside_join(joined: int, when: str) -> None:
    """Rank r gathers r + 1 rows; and 4 rows are scattered as 2, 1, 1."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if rank == joined and when == "before forward":
        hvd.join()
        return
    x = torch.ones(rank + 1, 2, dtype=DOUBLE, requires_grad=True)
    y = torch.ones(4, 2, dtype=DOUBLE, requires_grad=True)
    gathered, part = hvd.allgather(x), hvd.reducescatter(y)
    if rank == joined:
        hvd.join()
        return
    active = [r for r in range(size) if r != joined]
    brought = active if when == "before forward" else range(size)
    first = sum(r + 1 for r in brought if r < rank)
    (gathered * of_rank(rank, DOUBLE, gathered.shape)).sum().backward()
    everyone = sum(of_rank(r, DOUBLE, gathered.shape) for r in active) / size
    torch.testing.assert_close(x.grad, everyone[first : first + rank + 1])
    (part * of_rank(rank, DOUBLE, part.shape)).sum().backward()
    parts = [of_rank(r, DOUBLE, (rows, 2)) * (r != joined) / size for r, rows in enumerate((2, 1, 1))]
    torch.testing.assert_close(y.grad, torch.cat(parts))
    hvd.join()


@pytest.mark.parametrize("when", ["before forward", "before backward"])
@pytest.mark.parametrize("joined", [0, 1, 2])
def test_backward_beside_join(pool, joined, when):
    pool.run(backward_beside_join, joined, when, world=3, environ={"SYNCENGINE_TIMEOUT": "10"})
