"""Sparse gradients are averaged as DDP does: gathered, summed, coalesced."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flat import numerics_of
from parallel_models import both
from pool import RankPool, run_on_ranks
from random_layers import Layer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import syncengine
from syncengine.errors import SyncError

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")


class Tables(nn.Module):
    """Two tables, a dense layer between them; `unused` ids leave the second one out."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 6, sparse=True, dtype=dtype)
        self.mix = nn.Linear(6, 6, dtype=dtype)
        self.bags = nn.EmbeddingBag(30, 6, mode="sum", sparse=True, dtype=dtype)

    def forward(self, ids: torch.Tensor, use_bags: bool = True) -> torch.Tensor:
        hidden = self.mix(self.words(ids).sum(0))
        return hidden * self.bags(ids % 30, torch.zeros(1, dtype=torch.int64))[0] if use_bags else hidden


def ids(step: int, rank: int | None = None) -> torch.Tensor:
    """Repeated ones, a different number on each rank, none at all on rank 1 in step 2."""
    rank = syncengine.rank() if rank is None else rank
    count = 0 if (step, rank) == (2, 1) else 3 + 4 * rank + step
    return torch.randint(50, (count,), generator=torch.Generator().manual_seed(10 * step + rank)) % 7


def history(model: nn.Module, set_to_none: bool, hook: Any) -> list[torch.Tensor]:
    if hook is not None:
        model.register_comm_hook(None, hook)
    seen: list[torch.Tensor] = []
    for step in range(5):
        if step == 3:
            with model.no_sync():
                model(ids(step + 10)).square().sum().backward()
        model(ids(step)).square().sum().backward()
        for parameter in model.parameters():
            grad = parameter.grad
            seen.append(grad.clone())
            if grad.is_sparse:
                seen += [torch.tensor(grad.is_coalesced()), grad._indices().clone(), grad._values().clone()]
            with torch.no_grad():
                parameter.add_(grad, alpha=-0.0001)
        model.zero_grad(set_to_none=set_to_none)
    return seen


def check_like_ddp(dtype: torch.dtype, hook: Any) -> None:
    for set_to_none in (True, False):
        seen = both(partial(Tables, dtype), partial(history, set_to_none=set_to_none, hook=hook))
        assert any(tensor.is_sparse for tensor in seen)


@pytest.mark.parametrize("hook", [None, default_hooks.allreduce_hook], ids=["engine", "hook"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_gradients_are_ddps(pool: RankPool, dtype: torch.dtype, hook: Any):
    pool.run(check_like_ddp, dtype, hook, gloo=True, settings={"numerics": numerics_of(pool)})


@run_on_ranks(world=3)
def test_weights_and_ranks_without_a_batch():
    """Sparse averages follow weight() and join() as dense ones do."""
    rank = syncengine.rank()
    histories = []
    for sparse in (True, False):
        torch.manual_seed(0)
        module = Tables()
        module.words.sparse = module.bags.sparse = sparse
        model = syncengine.Parallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with model.join(divide_by_initial_world_size=False):
            for step in range(3, 4 + rank):
                model.weight(rank + step)
                optimizer.zero_grad()
                model(ids(step)).square().sum().backward()
                optimizer.step()
        histories.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*histories)


@run_on_ranks(world=3)
def test_a_table_that_a_rank_does_not_use():
    """DDP raises: "Expected sparse gradient to be defined"."""
    torch.manual_seed(0)
    model = syncengine.Parallel(Tables(), find_unused_parameters=True)
    for step in range(2):
        model.zero_grad()
        model(ids(step), use_bags=syncengine.rank() == 0).sum().backward()
        bags = model.module.bags.weight
        (local,) = torch.autograd.grad(model.module(ids(step, 0)).sum(), bags)
        assert bags.grad.is_sparse
        torch.testing.assert_close(bags.grad.to_dense(), local.to_dense() / 3)
    model.zero_grad()
    model(ids(3), use_bags=False).sum().backward()
    assert model.module.bags.weight.grad is None


class Functional(nn.Module):
    """Its table has sparse gradients, of which the wrapper does not know before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, 3))

    def forward(self, x: torch.Tensor, sparse: bool = True) -> torch.Tensor:
        return nn.functional.embedding(x, self.table, sparse=sparse)


def used_twice() -> nn.Module:
    return Layer(lambda self, x: self.table(x) @ self.table.weight.t(), table=nn.Embedding(5, 3, sparse=True))


@pytest.mark.parametrize("make", [Functional, used_twice])
@run_on_ranks()
def test_a_gradient_of_the_other_layout_is_named(make: Callable[[], nn.Module]):
    text = "dense gradient: parameter table" if make is Functional else "sparse gradient: parameter table.weight"
    with pytest.raises(SyncError, match=f"Expected variable to have {text}"):  # the other's may come at any time
        model = syncengine.Parallel(make())
        model(torch.tensor([1, 2])).sum().backward()
