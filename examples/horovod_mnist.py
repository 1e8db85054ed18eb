"""A script for Horovod, in the style of its own example for MNIST, of which one line was changed: the import of hvd.

torchrun --nproc-per-node 2 -m examples.horovod_mnist
mpirun -n 2 python -m examples.horovod_mnist

The digits are made here: a noisy picture for each of ten classes.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import syncengine.horovod as hvd


def digits(count: int) -> TensorDataset:
    """`count` pictures of 1 x 28 x 28 with their classes, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 28, 28, generator=generator)
    classes = torch.randint(10, (count,), generator=generator)
    return TensorDataset(patterns[classes] + 0.5 * torch.randn(count, 1, 28, 28, generator=generator), classes)


def make_model() -> nn.Module:
    """Two convolutions and two linear layers."""
    convolutions = [nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10))


def main() -> None:
    """Trains, and prints the loss and accuracy of all ranks after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--save", default="", help="where rank 0 puts the trained weights")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42 + hvd.rank())  # rank 0's weights are broadcast
    dataset = digits(1024)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = make_model()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            output = model(x)
            loss = F.cross_entropy(output, y)
            loss.backward()
            optimizer.step()
        right = (output.argmax(1) == y).float().mean()
        loss, right = hvd.allreduce(loss.detach(), name="loss"), hvd.allreduce(right, name="accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {right:.2f} on {hvd.size()} ranks", flush=True)
    if args.save and hvd.rank() == 0:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
