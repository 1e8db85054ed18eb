"""A script for Horovod, in the style of its own example for MNIST, of which one line was changed: the import of hvd.

torchrun --nproc-per-node 2 -m examples.horovod_mnist  # or: mpirun -n 2 python -m examples.horovod_mnist
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import syncengine.horovod as hvd


def digits(count: int) -> TensorDataset:
    """`count` noisy pictures of 1 x 28 x 28 with their ten classes, the same on every rank."""
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
    dataset, model = digits(1024), make_model()
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, op=hvd.Average)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(output := model(x), y)
            loss.backward()
            optimizer.step()
        loss, right = hvd.grouped_allreduce([loss.detach(), (output.argmax(1) == y).float().mean()])
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {right:.2f} on {hvd.size()} ranks", flush=True)
    if args.save and hvd.rank() == 0:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
