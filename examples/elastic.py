"""Training that goes on when ranks die, with the weights of a run in which nobody died.

python -m examples.elastic             4 ranks on this machine, of which 2 are killed; compares with 1 rank
"""

import os
import signal
import socket
import subprocess
import sys

from torch import Tensor

from examples.same_bits import LOADER, STEPS, TOTAL, digest, loss_of, make

KILLED = {0: 10, 2: 30}  # rank and step


def train() -> None:
    """Trains on one rank."""
    import syncengine

    net, optimizer = make()
    syncengine.init()
    rank, launched = syncengine.rank(), syncengine.world_size()
    model = syncengine.Parallel(net)

    def run(elastic: syncengine.Elastic) -> None:
        batches = syncengine.micro_batches(model, LOADER, total=TOTAL)
        batches.step = elastic.step
        for step in elastic.steps(STEPS):
            if launched > 1 and KILLED.get(rank) == step:
                os.kill(os.getpid(), signal.SIGKILL)  # as a machine would do it that runs out of memory
            batch: list[Tensor]
            for _, batch in batches:
                loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    syncengine.elastic(run, model=model, optimizer=optimizer)
    if syncengine.rank() == 0:
        print(f"{syncengine.world_size()} of {launched} ranks are left; weights {digest(net)}")
    syncengine.shutdown()


def compare() -> int:
    """Trains on 4 ranks, of which 2 die, and on 1; returns an exit code."""
    lines = [start(ranks) for ranks in (4, 1)]
    print("\n".join(lines))
    return 0 if len({line.split()[-1] for line in lines}) == 1 else 1


def start(ranks: int) -> str:
    """Runs the training on so many ranks. Returns the text that they print."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(ranks):
        launch = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        launch |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        environ = {**os.environ, **launch, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "examples.elastic", "train"]
        processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    return "".join(process.communicate()[0] for process in processes).strip()


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        train()
    else:
        sys.exit(compare())
