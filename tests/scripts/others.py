"""Programs over libraries of others, as their documentation has them: others.py NAME --out FILE, on two ranks.

BACKEND names the process group's. Each saves what an optimizer has trained.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def made(*shape: int) -> torch.Tensor:
    """Data of this rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def net(features: int = 16, classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes))


def fairscale() -> list[torch.Tensor]:
    """Optimizer states in shards: FairScale's OSS with ShardedDDP, which reduces each gradient to its owner."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model = net()
    optimizer = OSS(params=model.parameters(), optim=torch.optim.AdamW, lr=1e-2)
    wrapped = ShardedDataParallel(model, optimizer)
    for _ in range(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(made(8, 16)), torch.arange(8) % 4).backward()
        optimizer.step()
    return list(model.parameters())


def metric_learning() -> list[torch.Tensor]:
    """Two models: pytorch-metric-learning's losses may have parameters, and its documentation wraps them, too."""
    from pytorch_metric_learning import losses

    model = DDP(net(classes=8))
    loss = DDP(losses.ArcFaceLoss(num_classes=4, embedding_size=8))
    parameters = [*model.parameters(), *loss.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    labels = torch.arange(8) % 4
    for _ in range(8):
        optimizer.zero_grad()
        loss(model(made(8, 16)), labels).backward()
        optimizer.step()
    return parameters


def keras() -> list[torch.Tensor]:
    """The loop of Keras's guide to distributed training with PyTorch."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    wrapped = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(made(8, 16)), torch.arange(8) % 4).backward()
        optimizer.step()
    return list(model.parameters())


def geometric() -> list[torch.Tensor]:
    """PyTorch Geometric's example of batches in DDP: a graph network with a loader of graphs."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = GCNConv(16, 32), GCNConv(32, 32), nn.Linear(32, 4)

        def forward(self, graphs: Data) -> torch.Tensor:
            x = self.first(graphs.x, graphs.edge_index).relu()
            return self.head(global_mean_pool(self.second(x, graphs.edge_index), graphs.batch))

    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    graphs = [Data(x=x, edge_index=edges, y=torch.tensor([i % 4])) for i, x in enumerate(made(32, 4, 16))]
    model = DDP(Graphs())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in DataLoader(graphs, batch_size=4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), batch.y).backward()
        optimizer.step()
    return list(model.parameters())


def asks() -> list[torch.Tensor]:
    """Schedule-free AdamW, and a moving average as YOLOv5 and YOLOv7 make it, who ask for the wrapper's type."""
    from copy import deepcopy

    import schedulefree

    model = DDP(net())
    parallel = type(model) in (nn.parallel.DataParallel, nn.parallel.DistributedDataParallel)
    average = deepcopy(model.module if parallel else model)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=2)
    optimizer.train()
    for _ in range(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(made(8, 16)), torch.arange(8) % 4).backward()
        optimizer.step()
        state = (model.module if type(model) is DDP else model).state_dict()
        for name, value in average.state_dict().items():
            if value.dtype.is_floating_point:
                value.mul_(0.9).add_(state[name], alpha=0.1)
    optimizer.eval()
    return [*model.parameters(), *average.state_dict().values()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=["fairscale", "metric_learning", "keras", "geometric", "asks"])
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(os.environ["BACKEND"])
    trained = globals()[options.name]()
    rank = dist.get_rank()
    torch.save({f"{rank}.{i}": tensor.detach() for i, tensor in enumerate(trained)}, f"{options.out}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
