"""One rank of test_hosts_network.py: makes all-reduces and prints what became of them."""

import json
import sys
import time

import torch

import syncengine


def main() -> None:
    count, rounds = int(sys.argv[1]), int(sys.argv[2])
    error = text = ""
    right = True
    started = time.monotonic()
    try:
        communicator = syncengine.init(timeout=30.0)
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(rounds):
            started = time.monotonic()
            tensor = torch.full((count,), float(communicator.rank))
            syncengine.all_reduce(tensor)
            right &= bool(tensor.eq(sum(range(communicator.size))).all())
            if rounds == 1:
                syncengine.barrier()
    except syncengine.errors.SyncError as failure:
        error, text = type(failure).__name__, str(failure)
    outcome = {"error": error, "text": text, "right": right, "at": time.monotonic(), "started": started}
    print(json.dumps(outcome), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
