"""Data parallelism as one axis of several, on 2 x 2 ranks; --ddp is the same training over DDP and Gloo.

torchrun --nproc-per-node 4 examples/hybrid.py

tensor: an MLP cut by torch's tensor parallelism; pipeline: two stages, each on two ranks; recommendation: an embedding
whose rows are dealt out to all ranks, below a dense part that all ranks replicate.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import syncengine

STEPS, BATCH, WIDTH, ROWS, FEATURES = 60, 32, 64, 200, 8
Result = tuple[list[float], list[torch.Tensor]]  # losses, and this rank's parameters


def batches(data_rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each step's samples [sample, feature] and their targets, for the ranks with this place on the data axis."""
    x = torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(data_rank))
    return list(zip(x, (x[..., :8].sum(-1, keepdim=True) / 4).sin(), strict=True))


def learn(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """One step; returns the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def tensor(mesh: DeviceMesh, wrap: type) -> Result:
    """Trains an MLP cut over the axis `model`: columns of the first layer and rows of the second one."""
    module = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 1))
    parallelize_module(module, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = wrap(module, device_mesh=mesh["data"])  # averages each shard with the same shard of the other replica
    parameters, losses = list(model.parameters()), []
    optimizer = torch.optim.Adam(parameters, lr=0.003)
    for x, y in batches(mesh.get_local_rank("data")):
        losses.append(learn(optimizer, nn.functional.mse_loss(model(x), y)))
    return losses, parameters


def pipeline(mesh: DeviceMesh, wrap: type) -> Result:
    """Trains a pipeline with four microbatches a step; the backward of the last one averages the gradients."""
    stage, mean = mesh.get_local_rank("model"), []
    module = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 1)][stage]
    model = wrap(module, device_mesh=mesh["data"])
    part = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("model"))
    schedule = Schedule1F1B(part, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches(mesh.get_local_rank("data")):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(*([] if stage else [x]), **({"target": y, "losses": losses} if stage else {}))
        mean.append(sum(loss.item() for loss in losses) / 4)
        optimizer.step()
    return mean, list(model.parameters())


class ShardedEmbedding(nn.Module):
    """Row i is on rank i % ranks: each rank asks the others for the rows it needs, and sends their gradients back."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS // dist.get_world_size(), FEATURES)
        self.rows.weight.register_hook(lambda gradient: gradient / dist.get_world_size())  # a mean, as Parallel's

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows [sample, feature] of ids [sample]."""
        ranks = dist.get_world_size()
        order = (ids % ranks).argsort(stable=True)
        asked = (ids % ranks).bincount(minlength=ranks)
        wanted = torch.empty_like(asked)
        dist.all_to_all_single(wanted, asked)
        places = ids.new_empty(int(wanted.sum()))
        dist.all_to_all_single(places, ids[order] // ranks, wanted.tolist(), asked.tolist())
        found = all_to_all_single(torch.empty(len(ids), FEATURES), self.rows(places), asked.tolist(), wanted.tolist())
        return found[order.argsort()]


def recommendation(_: DeviceMesh, wrap: type) -> Result:
    """Learns which people like which things: each has a row. `wrap` averages only the dense part, over all ranks."""
    taste = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(1))
    embedding, dense = ShardedEmbedding(), nn.Sequential(nn.Linear(2 * FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))
    model, parameters = wrap(dense), [*dense.parameters(), *embedding.parameters()]
    optimizer, losses = torch.optim.Adam(parameters, lr=0.02), []
    seen = torch.Generator().manual_seed(dist.get_rank())
    for ids in torch.randint(ROWS, (STEPS, 2, 4 * BATCH), generator=seen):
        features = torch.cat(embedding(ids.flatten()).chunk(2), dim=1)
        likes = (taste[ids].prod(0).sum(1, keepdim=True) > 0).float()
        losses.append(learn(optimizer, nn.functional.binary_cross_entropy_with_logits(model(features), likes)))
    return losses, parameters


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("hybrid.py needs 4 ranks: torchrun --nproc-per-node 4 examples/hybrid.py")
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("outputs/hybrid"))
    options = parser.parse_args()
    dist.init_process_group("gloo" if options.ddp else "syncengine")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    options.out.mkdir(parents=True, exist_ok=True)
    for part in (tensor, pipeline, recommendation):
        torch.manual_seed(1)
        losses, parameters = part(mesh, DistributedDataParallel if options.ddp else syncengine.Parallel)
        torch.save([p.detach() for p in parameters], options.out / f"{part.__name__}{dist.get_rank()}.pt")
        if dist.get_rank() == 3:  # has the last stage
            print(f"{part.__name__}: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
    dist.destroy_process_group()
