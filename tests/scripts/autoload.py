"""A script that never says "import syncengine". See test_autoload.py.

torchrun --nproc-per-node 2 autoload.py
python autoload.py a-file-that-is-not-there-yet
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel


def work(rank: int, world_size: int, init_method: str) -> None:
    """One rank prints a line of JSON."""
    imported = "syncengine" in sys.modules
    dist.init_process_group("syncengine", init_method=init_method, rank=rank, world_size=world_size)
    total = torch.arange(3.0) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    answer = {
        "rank": dist.get_rank(),
        "imported": imported,
        "backend": dist.get_backend(),
        "total": total.tolist(),
        "model": "Parallel" if hasattr(model, "stragglers") else type(model).__name__,
    }
    os.write(1, json.dumps(answer).encode() + b"\n")  # at once, not mixed with other ranks' lines
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.multiprocessing.spawn(work, (2, f"file://{sys.argv[1]}"), nprocs=2)
    else:
        work(-1, -1, "env://")
