"""Chapter 5: a step of training, recorded on each rank and shown on one page.

SYNCENGINE_TRACE=trace torchrun --nproc-per-node 2 examples/tutorial/where_the_time_goes.py
syncengine report trace    # writes trace/report.html; needs jinja2 and matplotlib
"""

import os
import sys

import torch
from torch import nn

import syncengine


def main() -> None:
    """Trains an MLP of 2 M parameters for 30 steps; rank 1 computes more, with longer batches."""
    syncengine.init()
    model = syncengine.Parallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = 256 if syncengine.rank() == 1 else 64
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(samples, 512)).square().mean().backward()
        optimizer.step()
    if syncengine.rank() == 0:
        print({name: round(number, 2) for name, number in model.stats().items() if name.endswith("_ms")})


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("where_the_time_goes.py needs 2 ranks or more, as by torchrun --nproc-per-node 2")
    main()
