"""The ranks of a host in examples/with_flower.py: they train whenever the client asks."""

import argparse
import os
import time
from datetime import timedelta
from multiprocessing.connection import Listener
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import syncengine

RANKS, STEPS, BATCH, EXAMPLES = 2, 20, 32, 1280


def make() -> nn.Module:
    """The model, with the same weights everywhere."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def load(module: nn.Module, arrays: list[np.ndarray]) -> nn.Module:
    """Copies Flower's arrays into the parameters."""
    with torch.no_grad():
        for parameter, array in zip(module.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(array))
    return module


def examples_of(host: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples [example, feature] and targets [example, 1] that this host alone sees."""
    x = torch.randn(EXAMPLES, 16, generator=torch.Generator().manual_seed(host)) + host / 8
    return x, (x.sum(1, keepdim=True) / 4).sin()


def loss_of(model: nn.Module, host: int, began: int, step: int, rank: int) -> torch.Tensor:
    """The loss on the batch of one rank, in a step that follows version `began` of the weights."""
    drawn = torch.Generator().manual_seed((began * STEPS + step) * RANKS + rank)
    batch = torch.randint(EXAMPLES, (BATCH,), generator=drawn)
    x, y = (each[batch] for each in examples_of(host))
    return nn.functional.mse_loss(model(x), y)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer, made anew for each message, as FedAvg has it."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def serve(host: int, rank: int, address: str, wait_for: Path | None) -> None:
    """Serves until the process is ended.

    Rank 0 hears from the client; with `wait_for` it waits until that file is there.
    """
    dist.init_process_group("syncengine", timeout=timedelta(days=1))  # which may pass between two messages
    module = make()
    model = syncengine.Parallel(module)
    listener = Listener(address) if rank == 0 else None
    while True:
        connection = listener.accept() if listener else None
        work = [connection.recv() if connection else None]
        while connection and wait_for and not wait_for.exists():
            time.sleep(0.05)
        dist.broadcast_object_list(work)
        began, arrays = work[0]
        optimizer = optimizer_of(load(module, arrays))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, host, began, step, rank).backward()
            optimizer.step()
        if connection:
            connection.send((host, EXAMPLES, [parameter.detach().numpy() for parameter in module.parameters()]))
            connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", type=int)
    parser.add_argument("--address")
    parser.add_argument("--wait-for", type=Path)
    options = parser.parse_args()
    rank = next((rank for rank in range(1, RANKS) if os.fork() == 0), 0)  # torch is imported once a host
    os.environ["RANK"] = str(rank)
    serve(options.host, rank, options.address, options.wait_for)
