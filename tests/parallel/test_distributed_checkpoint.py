"""torch.distributed.checkpoint: the files do not say whether DDP or Parallel has written them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models.workload import same_bits
from parallel_models import Mlp, data, gradients
from pool import RankPool, run_on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

import syncengine

WRAPS: dict[str, Callable[..., nn.Module]] = {"ours": syncengine.Parallel, "ddp": DistributedDataParallel}


# Without BatchNorm, whose statistics differ between ranks: torch keeps those of one of them.
def start(wrap: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = WRAPS[wrap](Mlp())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    for i in steps:
        optimizer.zero_grad()
        model(data(i)).square().mean().backward()
        optimizer.step()
    return [*gradients(model), *(t.clone() for t in model.state_dict().values())]


@pytest.mark.thorough
@run_on_ranks(gloo=True)
def test_state_dicts_are_those_of_ddp():
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = []
    for wrap in WRAPS:
        model, optimizer = start(wrap, seed=0)
        train(model, optimizer, range(3))
        state = [
            get_model_state_dict(model),
            get_optimizer_state_dict(model, optimizer),
            get_state_dict(model, optimizer, options=full),
        ]
        states.append(tree_flatten_with_path(state)[0])
    for (path, ours), (expected_path, theirs) in zip(*states, strict=True):
        assert path == expected_path
        assert same_bits(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    assert "head.weight" in state[0]


@run_on_ranks(gloo=True)
def test_states_are_set_as_in_ddp():
    model, optimizer = start("ours", seed=0)
    train(model, optimizer, range(3))
    saved = copy.deepcopy((get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)))
    expected = train(model, optimizer, range(3, 5))
    rank_0_only = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for options in (None, rank_0_only):
        model, optimizer = start("ours", seed=1)
        mine = copy.deepcopy(saved) if options is None or syncengine.rank() == 0 else ({}, {})
        set_model_state_dict(model, mine[0], options=options)
        set_optimizer_state_dict(model, optimizer, mine[1], options=options)
        assert all(same_bits(a, b) for a, b in zip(train(model, optimizer, range(3, 5)), expected, strict=True))


def save(wrap: str, folder: Path) -> list[torch.Tensor]:
    """Trains, saves, and trains on: returns what that gives."""
    model, optimizer = start(wrap, seed=0)
    train(model, optimizer, range(3))
    parts = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), parts, strict=True)), checkpoint_id=folder)
    return train(model, optimizer, range(3, 5))


def load(wrap: str, folder: Path) -> list[torch.Tensor]:
    """Trains on from what was saved."""
    model, optimizer = start(wrap, seed=1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(model, optimizer, range(3, 5))


@pytest.mark.parametrize(("writer", "reader"), [("ours", "ours"), ("ddp", "ours"), ("ours", "ddp")])
def test_training_goes_on_from_a_checkpoint(pool: RankPool, tmp_path: Path, writer: str, reader: str):
    saved = pool.run(save, writer, tmp_path, gloo=True)
    loaded = pool.run(load, reader, tmp_path, gloo=True)
    for ours, expected in zip(tree_leaves(loaded), tree_leaves(saved), strict=True):
        assert same_bits(ours, expected)
