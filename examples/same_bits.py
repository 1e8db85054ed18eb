"""One model, bit for bit, at any number of ranks.

python -m examples.same_bits           trains on 1 rank, on 2 and in a plain loop of torch, and compares
python -m examples.same_bits train     one run: alone, or on all ranks of torchrun, mpirun or srun
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, TOTAL, SEED = 50, 8, 0  # of 8 micro-batches each

torch.set_num_threads(1)  # the same on every rank, and in every run
_SAMPLES = torch.randn(200, 32, generator=torch.Generator().manual_seed(1))
LOADER = DataLoader(TensorDataset(_SAMPLES, _SAMPLES.cumsum(1)), batch_size=4, shuffle=True, drop_last=True)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean over one micro-batch."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def digest(model: nn.Module) -> str:
    """A digest of the bits of all weights."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def train() -> None:
    """Makes one run on the ranks of this launch."""
    import syncengine  # here, so that the plain loop never loads it

    net, optimizer = make()
    syncengine.init()
    model = syncengine.Parallel(net)
    batches = syncengine.micro_batches(model, LOADER, total=TOTAL, seed=SEED)
    for _ in range(STEPS):
        for _, batch in batches:
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    if syncengine.rank() == 0:
        print(digest(net))
    syncengine.shutdown()


def compare() -> int:
    """Makes all runs. Returns 1 if they have trained different weights."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    commands = [[*torchrun, __file__, "train"], [__file__, "train"], ["-m", "examples.same_bits_plain"]]
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "SYNCENGINE_SUMMARY": "0"}
    two, one, plain = (
        subprocess.run(
            [sys.executable, *command], check=True, capture_output=True, text=True, env=environment, cwd=root
        )
        for command in commands
    )
    digests = [run.stdout.strip() for run in (two, one, plain)]
    same = len(set(digests)) == 1
    verdict = f"the same weights, {digests[0]}" if same else f"different weights: {', '.join(digests)}"
    print(f"same bits   {STEPS} steps on 2 ranks, on 1 rank and in a plain loop of torch: {verdict}")
    return not same


if __name__ == "__main__":
    sys.exit(train() if sys.argv[1:] == ["train"] else compare())
