"""Chapter 1: a script for DistributedDataParallel in which one line is another, and the weights are the same.

torchrun --nproc-per-node 2 examples/tutorial/one_line.py          # with syncengine
torchrun --nproc-per-node 2 examples/tutorial/one_line.py --ddp    # as the script was before
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine


def digest(model: nn.Module) -> str:
    """A short text that differs if one bit of one weight does."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def main() -> None:
    """Trains with the one wrapper or the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ddp", action="store_true")
    wrap = DistributedDataParallel if parser.parse_args().ddp else syncengine.Parallel
    dist.init_process_group("gloo")
    train(wrap)
    dist.destroy_process_group()  # no model is left: torch's DistributedDataParallel may hang if it ends later


def train(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Trains for 50 steps, and prints a digest of the weights on rank 0."""
    torch.manual_seed(dist.get_rank())  # other data on each rank; the weights are copied from rank 0
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1))
    model = wrap(model)  # the line that is another
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(50):
        x = torch.randn(64, 32)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(
            f"{type(model).__name__} on {dist.get_world_size()} ranks: loss {loss.item():.4f}, weights {digest(model)}"
        )


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("one_line.py needs 2 ranks or more: torchrun --nproc-per-node 2 examples/tutorial/one_line.py")
    main()
