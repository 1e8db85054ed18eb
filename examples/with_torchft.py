"""torchft: a replica group of two ranks is killed and comes back, healed by the others, which go on training meanwhile.

python examples/with_torchft.py  # three hosts: `Parallel` averages within one, torchft's Manager between them
"""

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torchft
from torch import nn
from torchft.coordination import LighthouseServer

import syncengine.torchft

GROUPS, RANKS, KILLED = 3, 2, 1


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, the same on all ranks."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    return module, torch.optim.Adam(module.parameters(), lr=0.003)


def loss_of(model: nn.Module, step: int, group: int, rank: int) -> torch.Tensor:
    """The loss on the batch of one rank in one step, whenever that step is made."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed((step * GROUPS + group) * RANKS + rank))
    return (model(x) - (x.sum(1, keepdim=True) / 4).sin()).square().mean()


def train(group: int, out: Path) -> None:
    """Trains on one rank of a replica group, up to the first step in which some rank saw the file `stop`."""
    dist.init_process_group("syncengine")
    rank, (module, plain_optimizer) = dist.get_rank(), make()
    model = syncengine.Parallel(module)
    parts = {"module": module, "optimizer": plain_optimizer}
    manager = syncengine.torchft.Manager(
        pg=syncengine.torchft.ProcessGroup(),
        load_state_dict=lambda state: [part.load_state_dict(state[name]) for name, part in parts.items()],
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=2,
        use_async_quorum=False,  # a replica group that comes back is healed before its first forward
        replica_id=f"group{group}",
        hostname="127.0.0.1",
    )
    optimizer = torchft.Optimizer(manager, plain_optimizer)
    with (out / f"group{group}-rank{rank}.jsonl").open("a", buffering=1) as log:  # rank 0's are read meanwhile
        done = False
        while not done:
            optimizer.zero_grad()  # the quorum
            step, stop = manager.current_step(), torch.full((RANKS,), float((out / "stop").exists()))
            loss = loss_of(model, step, group, rank)
            loss.backward()
            for work in [manager.allreduce(tensor) for tensor in (stop, *(p.grad for p in module.parameters()))]:
                work.wait()
            optimizer.step()  # if all went well, else the step is made again
            if manager.current_step() > step:
                print(json.dumps({"step": step, "groups": manager.num_participants(), "loss": loss.item()}), file=log)
                done = bool(stop.any())  # the same on all ranks, like the averages
    torch.save(module.state_dict(), out / f"group{group}-rank{rank}.pt")
    manager.shutdown()
    dist.destroy_process_group()


def start(group: int, out: Path, lighthouse: str) -> list[subprocess.Popen]:
    """Starts a replica group, as on a host of its own."""
    below = random.sample(range(20_000, 32_000), 100)  # those that the kernel gives to anybody meanwhile
    port = str(next(port for port in below if socket.socket().connect_ex(("127.0.0.1", port))))
    host = {"SYNCENGINE_HOST_ID": f"host{group}", "SYNCENGINE_INTERFACE": "lo", "TORCHFT_LIGHTHOUSE": lighthouse}
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, f"--group={group}", f"--out={out}"]
    with (out / f"group{group}.log").open("ab") as log:  # torchft says thousands of lines
        output = {"stdout": log, "stderr": log}
        environs = [os.environ | host | job | {"RANK": str(rank)} for rank in range(RANKS)]
        return [subprocess.Popen(command, env=environ, **output) for environ in environs]


def lines(out: Path, group: int) -> list[dict]:
    """The steps that a replica group has committed, as it has logged them."""
    return [json.loads(line) for log in out.glob(f"group{group}-rank0.jsonl") for line in log.open()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int)
    parser.add_argument("--out", type=Path, default=Path("outputs/with_torchft"))
    options = parser.parse_args()
    if options.group is not None:
        sys.exit(train(options.group, options.out))
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    groups = [start(group, options.out, server.address()) for group in range(GROUPS)]
    try:
        while not any(line["groups"] == GROUPS and line["step"] >= 20 for line in lines(options.out, 0)):
            time.sleep(0.05)
        for process in groups[KILLED]:
            process.kill()
        while sum(line["groups"] < GROUPS for line in lines(options.out, 0)[20:]) < 20:
            time.sleep(0.05)
        groups[KILLED] = start(KILLED, options.out, server.address())
        while any(line["groups"] < GROUPS for line in lines(options.out, 0)[-100:]):
            time.sleep(0.05)
        (options.out / "stop").touch()
        failed = any(process.wait() for group in groups for process in group)
        assert not failed, f"a rank has failed: {options.out}/group*.log say how"
    finally:
        for process in (process for group in groups for process in group):
            process.kill()
    first, *_, last = committed = lines(options.out, 0)
    fewer = sum(line["groups"] < GROUPS for line in committed)
    print(f"{len(committed)} steps, {fewer} of them by fewer groups; loss {first['loss']:.4f}, then {last['loss']:.4f}")
    one, *others = [list(torch.load(path).values()) for path in options.out.glob("group*.pt")]
    print(f"{len(others) + 1} ranks; equal models:", all(all(map(torch.equal, one, other)) for other in others))
