"""Ray Train on two CPU workers: `Parallel` in the place of `prepare_model`; --ddp is the same over DDP and Gloo.

python examples/with_ray.py
python examples/with_ray.py --backend syncengine  # torch.distributed's collectives, too
"""

import argparse
import os
import tempfile
from pathlib import Path

import ray.train.torch
import torch
from torch import nn

import syncengine


def train(options: dict) -> None:
    """Trains on one worker."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    module = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))
    model = ray.train.torch.prepare_model(module) if options["ddp"] else syncengine.Parallel(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    for epoch in range(3):
        for x in torch.randn(8, 32, 16, generator=data):
            loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.distributed.all_reduce(loss.detach())
        with tempfile.TemporaryDirectory() as folder:
            torch.save(module.state_dict(), Path(folder) / "weights.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            made = {"wrapper": type(model).__name__, "backend": torch.distributed.get_backend()}
            ray.train.report({"epoch": epoch, "loss": loss.item() / 2, **made}, checkpoint=checkpoint)


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--out", type=Path, default=Path("outputs/with_ray"))
    options = parser.parse_args()

    small = {"num_cpus": 3, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    ray.init(**small, _node_ip_address="127.0.0.2")  # of 127.0.0.1 Ray would make a public address
    result = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"ddp": options.ddp},
        torch_config=ray.train.torch.TorchConfig(options.backend),
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(options.out.resolve()), name="run"),
    ).fit()
    print("{wrapper} over {backend}: loss {loss:.4f}".format(**result.metrics), result.checkpoint.path, sep=", ")
    ray.shutdown()
