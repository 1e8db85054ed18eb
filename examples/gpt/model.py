"""A decoder-only transformer: rotary positions, pre-norm blocks, tied embedding."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT; saved in every checkpoint, so that a checkpoint alone rebuilds its model."""

    vocabulary: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 256


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of x [.., position, features]: turns pairs of features by angles that grow with position."""
    length, half = x.shape[-2], x.shape[-1] // 2
    place, pair = torch.arange(length, device=x.device), torch.arange(half, device=x.device)
    angles = place[:, None] * 10000.0 ** (-pair / half)
    cos, sin = angles.cos(), angles.sin()
    left, right = x.split(half, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.project_in = nn.Linear(config.width, 3 * config.width)
        self.project_out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Lets each position of x [batch, length, width] attend to itself and the positions before it."""
        batch, length, width = x.shape
        qkv = self.project_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a four times wider MLP, each behind a norm and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.narrow = nn.Linear(4 * config.width, config.width)
        # Each block starts as the identity: the few hundred steps of a demonstration then learn much more.
        nn.init.zeros_(self.attention.project_out.weight)
        nn.init.zeros_(self.narrow.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream x [batch, length, width] after this block."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.narrow(F.gelu(self.widen(self.norm_mlp(x))))


class GPT(nn.Module):
    """Maps token ids [batch, length] to logits of the next token at each position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss where `targets` are given, else the logits."""
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, generator: torch.Generator, temperature: float = 0.7) -> Tensor:
        """Continue `tokens` [1, length] by `count` sampled tokens."""
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1] / temperature
            token = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, token], dim=1)
        return tokens
