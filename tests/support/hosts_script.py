"""One rank of test_hosts_network.py: makes all-reduces and prints what became of them.

Each line of its input is a number of elements and one of rounds.
"""

import json
import sys
import time

import torch

import syncengine


def main() -> None:
    communicator = syncengine.init(timeout=30.0)
    print("ready", flush=True)
    for line in sys.stdin:
        count, rounds = map(int, line.split())
        error = text = ""
        right = True
        try:
            for _ in range(rounds):
                tensor = torch.full((count,), float(communicator.rank))
                syncengine.all_reduce(tensor)
                right &= bool(tensor.eq(sum(range(communicator.size))).all())
                if rounds == 1:
                    syncengine.barrier()
        except syncengine.errors.SyncError as failure:
            error, text = type(failure).__name__, str(failure)
        print(json.dumps({"error": error, "text": text, "right": right, "at": time.monotonic()}), flush=True)


if __name__ == "__main__":
    main()
