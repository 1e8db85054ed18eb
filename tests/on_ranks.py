"""Tests whose body runs on rank processes, and the comparison with DDP that most of them make there."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from models.workload import same_bits
from pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import syncengine


def run_on_ranks(world: int = 2, **options: Any) -> Callable[[Callable[[], Any]], Callable[[RankPool], None]]:
    """Makes a function for rank processes into a test, which passes if the function returns on every rank."""

    def decorate(function: Callable[[], Any]) -> Callable[[RankPool], None]:
        def test(pool: RankPool) -> None:
            pool.run(_call, function.__module__, function.__name__, world=world, **options)

        test.on_ranks = function
        test.__doc__ = function.__doc__
        return test

    return decorate


def _call(module: str, name: str) -> None:
    # A function travels by its name, which is the test's by now.
    __import__(module)
    getattr(sys.modules[module], name).on_ranks()


def data(step: int = 0) -> torch.Tensor:
    """A batch of this rank's own."""
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + syncengine.rank()))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]


def both(make: Callable[[], nn.Module], step: Callable[[nn.Module], Any], **options: Any) -> list[torch.Tensor]:
    """`step` has the same bits with Parallel and with DDP: what it returns, the gradients and state that it leaves.

    Returns what our `step` did, its tensors in a row.
    """
    results = []
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        torch.manual_seed(0)
        model = wrap(make(), **options)
        returned = [leaf for leaf in tree_leaves(step(model)) if isinstance(leaf, torch.Tensor)]
        results.append((returned, gradients(model), copy.deepcopy(model.state_dict())))
    (ours, our_gradients, our_state), (theirs, their_gradients, their_state) = results
    for name, mine, other in [
        *((f"result {i}", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))),
        *((f"gradient {i}", a, b) for i, (a, b) in enumerate(zip(our_gradients, their_gradients, strict=True))),
        *(
            (name, our_state.pop(name), tensor)
            for name, tensor in their_state.items()
            if isinstance(tensor, torch.Tensor)
        ),
    ]:
        assert same_bits(mine, other), name
    return ours
