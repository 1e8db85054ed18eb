"""Activation checkpointing, each kind with the bits of DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from parallel_models import CAP, Mlp, backwards, both, data
from pool import run_on_ranks
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)


class Nested(nn.Module):
    """A checkpoint inside a checkpoint, and one beside them."""

    def __init__(self, outer: bool, inner: bool) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner  # whether they are reentrant
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.layers

        def part(x: torch.Tensor) -> torch.Tensor:
            return layers[2](checkpoint(layers[1], layers[0](x), use_reentrant=self.inner).tanh())

        x = checkpoint(part, x.requires_grad_(), use_reentrant=self.outer).tanh()
        return layers[4](checkpoint(layers[3], x, use_reentrant=self.outer))


@run_on_ranks(gloo=True)
def test_nested_checkpoints():
    for outer in (True, False):
        for inner in (True, False):
            both(partial(Nested, outer, inner), backwards, **CAP)
            both(partial(Nested, outer, inner), backwards)


class Segments(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(self, 3, x, use_reentrant=False)


class Selective(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            save = operation is torch.ops.aten.addmm.default
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


@run_on_ranks(gloo=True)
def test_sequential_and_selective_checkpoints():
    both(lambda: Segments(*(nn.Linear(24, 24) for _ in range(7))), backwards, **CAP)
    both(Selective, backwards, **CAP)
    both(Selective, backwards, find_unused_parameters=True)


@run_on_ranks(gloo=True)
def test_a_checkpoint_around_the_wrapper():
    def step(model: nn.Module, reentrant: bool) -> None:
        for i in range(3):
            model.zero_grad()
            checkpoint(model, data(i).requires_grad_(), use_reentrant=reentrant).square().sum().backward()

    for reentrant in (True, False):
        both(Mlp, partial(step, reentrant=reentrant))
    both(Mlp, partial(step, reentrant=False), find_unused_parameters=True)


@run_on_ranks(gloo=True)
def test_checkpoints_and_accumulation():
    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            with model.no_sync():
                model(data(i)).sum().backward()
            model(data(i + 5)).square().sum().backward()

    for reentrant in (True, False):
        both(partial(Nested, reentrant, reentrant), step)
