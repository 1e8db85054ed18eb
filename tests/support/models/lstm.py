"""A bidirectional LSTM over sentences of several lengths: weights used once per time step, packed batches, dropout."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from models.workload import Workload

VOCABULARY = 500
TAGS = 9


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 48, padding_idx=0)
        self.lstm = nn.LSTM(48, 64, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.tag = nn.Linear(128, TAGS)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.tag(hidden)


class Sentences(Workload):
    def model(self) -> nn.Module:
        return Tagger()

    def loss(self, model: nn.Module, generator: torch.Generator, step: int) -> torch.Tensor:
        lengths = torch.randint(3, 13, (6,), generator=generator)
        words = torch.randint(1, VOCABULARY, (6, 12), generator=generator)
        words *= torch.arange(12) < lengths[:, None]
        tags = torch.randint(TAGS, (6, 12), generator=generator)
        return F.cross_entropy(model(words, lengths).flatten(0, 1), tags.flatten())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)
