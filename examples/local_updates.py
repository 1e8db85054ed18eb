"""Two hosts that seldom talk: local SGD and DiLoCo, by torchft over our process group, beside synchronous training.

torchrun --nproc-per-node 4 examples/local_updates.py  # draws outputs/local_updates/loss.png, too

`Parallel` averages gradients within a host, and torchft, every EVERY steps, the hosts' weights (local SGD), or the ways
that these have gone since (DiLoCo). "synchronous" is `Parallel` over all ranks of both hosts.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib import pyplot
from torch import nn
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

import syncengine.torchft

HOSTS, RANKS, STEPS, EVERY = 2, 2, 240, 20
WAYS = ("synchronous", "local_sgd", "diloco")
HOST, RANK = divmod(int(os.environ.get("RANK", 0)), RANKS)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, the same on all ranks."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 8))
    return module, torch.optim.AdamW(module.parameters(), lr=0.002)


def loss_of(model: nn.Module, step: int, host: int, rank: int) -> torch.Tensor:
    """The loss on the batch of one rank in one step. A random network gives targets; each host draws other inputs."""
    fixed, drawn = torch.Generator().manual_seed(2), torch.Generator().manual_seed((step * HOSTS + host) * RANKS + rank)
    first, last, means = (torch.randn(*shape, generator=fixed) for shape in ((32, 64), (64, 8), (HOSTS, 32)))
    x = torch.randn(64, 32, generator=drawn) + means[host]
    return nn.functional.cross_entropy(model(x), ((x @ first).relu() @ last).argmax(1))


@torch.no_grad()
def validation(module: nn.Module) -> float:
    """The loss on samples of both hosts that nobody trains on."""
    return sum(loss_of(module, STEPS + 1 + i, host, 0).item() for host in range(HOSTS) for i in range(4)) / HOSTS / 4


def train(way: str, within: dist.ProcessGroup, port: int, lighthouse: str) -> tuple[nn.Module, list[float], int]:
    """Returns the module, its losses every EVERY steps, and how many bytes this rank has sent to the other host."""
    module, optimizer = make()
    model = syncengine.Parallel(module, process_group=None if way == "synchronous" else within)
    losses = [validation(module)]

    def steps() -> None:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, step, HOST, RANK).backward()
            optimizer.step()  # and what torchft does after it
            losses.extend([] if step % EVERY else [validation(module)])

    if way == "synchronous":
        steps()
        return module, losses, model.communicator.counters()["interhost_bytes"]
    parts, between = (module, optimizer), syncengine.torchft.ProcessGroup()
    manager = syncengine.torchft.Manager(
        pg=between,
        load_state_dict=lambda state: [part.load_state_dict(each) for part, each in zip(parts, state, strict=True)],
        state_dict=lambda: [part.state_dict() for part in parts],
        min_replica_size=HOSTS,
        use_async_quorum=False,
        init_sync=False,  # since all begin with the same weights
        rank=RANK,
        world_size=RANKS,
        within=within,
        store_addr="127.0.0.1",
        store_port=port,
        lighthouse_addr=lighthouse,
        replica_id=f"{way}{HOST}",
        hostname="127.0.0.1",
    )
    outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    local = LocalSGD(manager, module, optimizer, EVERY)
    with local if way == "local_sgd" else DiLoCo(manager, [module], optimizer, outer, EVERY):
        steps()
    manager.shutdown()
    return module, losses, between.communicator.counters()["interhost_bytes"]


def report(results: dict[str, tuple[list[float], int]], path: Path) -> None:
    """Draws the losses of each way, by step and by the bytes that host 0 has sent."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.set(xlabel="step", ylabel="validation loss")
    right.set(xlabel="MB that one host has sent to the other one", xscale="log")
    for way, (losses, sent) in results.items():
        left.plot(range(0, STEPS + 1, EVERY), losses, label=way)
        right.plot([sent * i / (len(losses) - 1) / 1e6 for i in range(1, len(losses))], losses[1:], label=way)
        print(f"{way}: loss {losses[0]:.3f}, then {losses[-1]:.3f}; host 0 sent {sent} bytes")
    left.legend()
    figure.savefig(path)


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("local_updates.py needs 4 ranks: torchrun --nproc-per-node 4 examples/local_updates.py")
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("outputs/local_updates"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"SYNCENGINE_HOST_ID": f"host{HOST}", "SYNCENGINE_INTERFACE": "lo"}  # two hosts on one machine
    dist.init_process_group("syncengine")
    within, _ = dist.new_subgroups(RANKS)
    server, results = LighthouseServer(bind="127.0.0.1:0", min_replicas=HOSTS), {}
    for way in WAYS:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of a host's rank 0 torchft's
        dist.all_gather_object(said := [None] * HOSTS * RANKS, (store.port, server.address()))
        module, losses, sent = train(way, within, said[HOST * RANKS][0], said[0][1])
        torch.save(module.state_dict(), out / f"{way}{dist.get_rank()}.pt")
        dist.all_gather_object(said, sent)
        results[way] = losses, sum(said[:RANKS])
    if dist.get_rank() == 0:
        report(results, out / "loss.png")
    dist.destroy_process_group()
