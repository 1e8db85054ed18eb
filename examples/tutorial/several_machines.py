"""Chapter 3: ranks on two hosts, and the bytes that crossed the network.

torchrun --nnodes 2 --nproc-per-node 2 ... examples/tutorial/several_machines.py    # on each of two machines
syncengine run -n 4 examples/tutorial/several_machines.py --pretend    # one machine that plays two
"""

import argparse
import os

import torch
from torch import nn

import syncengine


def main() -> None:
    """Trains for 20 steps, and prints on rank 0 which rank is where and what was sent."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pretend", action="store_true")
    if parser.parse_args().pretend:  # ranks 0 and 1 are on one host then, ranks 2 and 3 on another
        os.environ["SYNCENGINE_HOST_ID"] = str(int(os.environ["RANK"]) // 2)
    communicator = syncengine.init()
    torch.manual_seed(communicator.rank)
    model = syncengine.Parallel(nn.Linear(1024, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 1024)).square().mean().backward()
        optimizer.step()
    if communicator.rank == 0:
        sent = communicator.counters().get("interhost_bytes", 0) / 2**20
        print(f"the ranks are on hosts {communicator.hosts}; rank 0 sent {sent:.1f} MiB to other hosts")
    syncengine.shutdown()


if __name__ == "__main__":
    main()
