"""A click predictor as in advertising: nearly all parameters are in tables of which a batch reads a few rows."""

import torch
from torch import nn
from torch.nn import functional as F

from models.workload import Workload

ROWS = (40_000, 10_000, 300)
WIDTH = 16
DENSE_FEATURES = 13


class Recommender(nn.Module):
    """Tables (several ids a bag), a network for dense features, dot products of all pairs, a network on top."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=sparse) for rows in ROWS)
        self.bottom = nn.Sequential(nn.Linear(DENSE_FEATURES, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        vectors = len(ROWS) + 1
        self.top = nn.Sequential(nn.Linear(WIDTH + vectors * (vectors - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: torch.Tensor, ids: list[torch.Tensor], offsets: list[torch.Tensor]) -> torch.Tensor:
        bottom = self.bottom(dense)
        rows = [table(i, o) for table, i, o in zip(self.tables, ids, offsets, strict=True)]
        vectors = torch.stack([bottom, *rows], 1)
        products = vectors @ vectors.transpose(1, 2)
        interactions = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, interactions], 1)).squeeze(1)


class Clicks(Workload):
    batch = 24
    sparse = False

    def model(self) -> nn.Module:
        return Recommender(self.sparse)

    def loss(self, model: nn.Module, generator: torch.Generator, step: int) -> torch.Tensor:
        dense = torch.randn(self.batch, DENSE_FEATURES, generator=generator)
        offsets = [torch.arange(0, 3 * self.batch, 3) for _ in ROWS]  # three ids a bag
        ids = [torch.randint(rows, (3 * self.batch,), generator=generator) for rows in ROWS]
        clicked = torch.randint(2, (self.batch,), generator=generator).float()
        return F.binary_cross_entropy_with_logits(model(dense, ids, offsets), clicked)


class SparseClicks(Clicks):
    """The tables' gradients have only the rows that a batch looked up."""

    sparse = True

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.02)  # one of those that take both kinds of gradient
