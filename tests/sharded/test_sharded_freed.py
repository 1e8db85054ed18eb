"""What weights and state leave behind when they move into shared memory goes back to the machine."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from pool import RankPool
from torch import nn

import syncengine
from syncengine._C import return_free_memory

MIB = 1 << 20
LAYERS = 64  # of 512 KiB: malloc would keep such blocks


def private_bytes() -> int:
    """In full: of pages that it has in common with other forks, a part would come and go with those."""
    return int(re.search(r"Anonymous:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())[1]) * 1024


def growth_by_training() -> int:
    torch.optim.AdamW(nn.Linear(1, 1).parameters())  # imports modules
    return_free_memory()
    before = private_bytes()
    torch.manual_seed(0)
    model = syncengine.Parallel(nn.Sequential(*[nn.Linear(362, 362) for _ in range(LAYERS)]))
    optimizer = syncengine.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 362)).sum().backward()
        optimizer.step()
    growth = private_bytes() - before
    optimizer.release()
    return growth


def test_private_memory_is_not_kept(pool: RankPool):
    """32 MiB of weights, and 32 MiB of each rank's part of the state, were private before."""
    assert all(growth < 12 * MIB for growth in pool.run(growth_by_training)), "more is kept than modules and buffers"
