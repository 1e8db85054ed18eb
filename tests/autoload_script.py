"""A script that never says "import syncengine". See test_autoload.py.

    autoload_script.py torchrun | spawn
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing


def rank(number: int, world_size: int, init_method: str) -> None:
    """One rank prints a line of JSON."""
    imported = "syncengine" in sys.modules
    dist.init_process_group("syncengine", init_method=init_method, rank=number, world_size=world_size)
    total = torch.arange(5.0) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    answer = {
        "rank": dist.get_rank(),
        "imported": imported,
        "backend": dist.get_backend(),
        "config": dist.get_backend_config(),
        "total": total.tolist(),
    }
    os.write(1, json.dumps(answer).encode() + b"\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(rank, (2, f"file://{sys.argv[2]}"), nprocs=2)
    else:
        rank(-1, -1, "env://")
