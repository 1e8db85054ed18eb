"""Chapter 4: one of four ranks is killed, and the others go on with the weights of a run in which nobody died.

syncengine run -n 4 --keep-going examples/tutorial/a_rank_is_killed.py    # rank 2 is killed in step 12
syncengine run -n 4 examples/tutorial/a_rank_is_killed.py --nobody        # nobody is
"""

import argparse
import hashlib
import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncengine


def main() -> None:
    """Trains for 30 steps of eight micro-batches, and prints a digest of the weights on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nobody", action="store_true")
    nobody = parser.parse_args().nobody
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the same on every rank, since some kernels add by thread
    samples = torch.randn(320, 32)
    loader = DataLoader(TensorDataset(samples, samples.cumsum(1)), batch_size=4, shuffle=True)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    syncengine.init()
    first_rank = syncengine.rank()
    model = syncengine.Parallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(elastic: syncengine.Elastic) -> None:
        batches = syncengine.micro_batches(model, loader, total=8)
        batches.step = elastic.step
        for step in elastic.steps(30):
            if step == 12 and first_rank == 2 and not nobody:
                os.kill(os.getpid(), signal.SIGKILL)
            for _, (x, y) in batches:
                nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    syncengine.elastic(train, model=model, optimizer=optimizer)
    if syncengine.rank() == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
        print(f"{syncengine.world_size()} ranks are left: weights {hashlib.sha256(weights).hexdigest()[:16]}")
    syncengine.shutdown()


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit(
            "a_rank_is_killed.py needs 4 ranks: syncengine run -n 4 --keep-going examples/tutorial/a_rank_is_killed.py"
        )
    main()
