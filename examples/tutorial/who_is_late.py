"""Chapter 2: rank 1 loads its data slowly, and syncengine says so without being asked.

torchrun --nproc-per-node 2 examples/tutorial/who_is_late.py
"""

import os
import sys
import time

import torch
from torch import nn

import syncengine


def load(rank: int) -> torch.Tensor:
    """A batch. Rank 1 takes 20 ms longer for one, as a slow disk would."""
    if rank == 1:
        time.sleep(0.02)
    return torch.randn(64, 32)


def main() -> None:
    """Trains for 60 steps, and prints who is late."""
    syncengine.init()
    rank = syncengine.rank()
    model = syncengine.Parallel(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        x = load(rank)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        late = model.stragglers()["verdict"]
        print("nobody is late" if late is None else f"rank {late['rank']} is late, in its {late['phase']}")


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("who_is_late.py needs 2 ranks or more: torchrun --nproc-per-node 2 examples/tutorial/who_is_late.py")
    main()
