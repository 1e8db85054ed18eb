"""The training of same_bits.py in torch alone, on one process: the promise of docs/numerics.md in code."""

import zlib

import torch

from examples.same_bits import LOADER, SEED, STEPS, TOTAL, digest, loss_of, make


def seed(*key: object) -> None:
    """Seeds the random numbers of an epoch, or of a micro-batch of a step."""
    torch.manual_seed(zlib.crc32(" ".join(map(str, key)).encode()))


def tree(gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The sum over the tree: the sum of the largest power of two of them, but not all, and the sum of the rest."""
    if len(gradients) == 1:
        return gradients[0]
    half = 1 << ((len(gradients) - 1).bit_length() - 1)
    return [a + b for a, b in zip(tree(gradients[:half]), tree(gradients[half:]), strict=True)]


model, optimizer = make()
for step in range(STEPS):
    epoch, within = divmod(step, len(LOADER) // TOTAL)
    seed(SEED, "epoch", epoch)
    order = list(LOADER.batch_sampler)[within * TOTAL :]
    gradients = []
    for i in range(TOTAL):
        seed(SEED, step, i, "samples")
        batch = LOADER.collate_fn([LOADER.dataset[index] for index in order[i]])
        seed(SEED, step, i)
        loss_of(model, batch).backward()
        gradients.append([p.grad for p in model.parameters()])
        optimizer.zero_grad()
    for p, gradient in zip(model.parameters(), tree(gradients), strict=True):
        p.grad = gradient * (1 / TOTAL)
    optimizer.step()
    optimizer.zero_grad()
print(digest(model))
