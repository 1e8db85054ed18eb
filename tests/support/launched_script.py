"""A user's script, the same under every launcher. See test_launchers_real.py.

    launched_script.py never before

Says when the script itself initialises torch.distributed: "before", "after" or "never", or that init() makes a
"group"; for each, in turn, every rank prints a line of JSON. The last one's communicator is left to the process's end.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

import syncengine


def main(torch_distributed: str) -> None:
    """One job."""
    if torch_distributed == "before":
        dist.init_process_group("gloo")
    communicator = syncengine.init(timeout=30, torch_group=torch_distributed == "group")
    rank, world_size = syncengine.rank(), syncengine.world_size()
    total = torch.arange(5.0) * (rank + 1)
    syncengine.all_reduce(total)
    expected = torch.arange(5.0) * (world_size * (world_size + 1) / 2)
    first = torch.tensor([rank])
    syncengine.broadcast(first, world_size - 1)
    if torch_distributed == "after":
        dist.init_process_group("gloo")
    if dist.is_initialized():
        theirs = torch.arange(5.0) * (rank + 1)
        dist.all_reduce(theirs)
        assert torch.equal(theirs, total), "torch.distributed works beside syncengine"
        if torch_distributed != "group":  # which ends with syncengine
            dist.destroy_process_group()  # torch's Gloo may crash at exit without
    answer = {
        "rank": rank,
        "torch_distributed": torch_distributed,
        "world_size": world_size,
        "local_rank": syncengine.local_rank(),
        "numerics": communicator.numerics,
        "right": torch.equal(total, expected) and first.item() == world_size - 1,
    }
    os.write(1, json.dumps(answer).encode() + b"\n")  # at once, not mixed with other ranks' lines


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        syncengine.shutdown()
        main(argument)
