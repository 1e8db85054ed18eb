"""What Lightning, Accelerate and torch's checkpoints do with the model that they think is DDP's."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models.workload import same_bits
from parallel_models import Mlp, Wrap, both, data, different_bits, gradients
from pool import run_on_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten_with_path

import syncengine


class Redirected(nn.Module):
    """Lightning redirects a forward to its step, which ends with synchronization off."""

    def __init__(self, step: Callable[..., torch.Tensor | None]) -> None:
        super().__init__()
        self.inner, self.step = Mlp(), step
        self.wrapper: list[nn.Module] = []  # in a list, not to be a submodule
        self.gradients: list[torch.Tensor] = []

    def forward(self, argument: Any) -> torch.Tensor:
        (wrapper,) = self.wrapper
        out = self.step(self, wrapper, argument)
        wrapper.require_backward_grad_sync = False
        return torch.zeros(()) if out is None else out

    def backward(self, loss: torch.Tensor, synchronize: bool = True, **options: Any) -> None:
        if synchronize:  # as Lightning's manual_backward
            (wrapper,) = self.wrapper
            wrapper.require_forward_param_sync = True
            wrapper.reducer._rebuild_buckets()
            wrapper.reducer.prepare_for_backward([])
        loss.backward(**options)
        self.gradients += gradients(self.inner)


@pytest.mark.parametrize("world", [1, 2])  # scripts that are tried with one rank keep these lines
@run_on_ranks(gloo=True)
def test_lightnings_manual_optimization(world: int):
    """Here backward comes behind the forward."""

    def step(model: nn.Module) -> list[torch.Tensor]:
        model.module.wrapper = [model]
        for i in range(3):
            model.zero_grad()
            loss = model(data(i)).square().mean()
            model.require_backward_grad_sync = True
            if i == 1:  # a backward without Lightning's manual_backward: stays local
                model.module.backward(loss, synchronize=False, retain_graph=True)
                model.zero_grad()
            model.module.backward(loss)
        model.module.wrapper = []
        return model.module.gradients

    both(partial(Redirected, lambda self, wrapper, x: self.inner(x)), step)


def several_backwards(self: Redirected, wrapper: nn.Module, step: int) -> None:
    """Manual optimization has several backwards in a step, also under no_sync."""
    for i, order in enumerate([(True, False, True), (False, True), (False, False)]):
        self.inner.zero_grad()
        for j, synchronize in enumerate(order):
            with contextlib.nullcontext() if synchronize else wrapper.no_sync():
                self.backward(self.inner(data(100 * step + 10 * i + j)).square().mean(), synchronize)


def two_losses(self: Redirected, wrapper: nn.Module, step: int) -> None:
    """Both of one graph: the first is synchronized, the second is this rank's own."""
    self.inner.zero_grad()
    output = self.inner(data(step))
    self.backward(output.square().mean(), retain_graph=True)
    with wrapper.no_sync():
        self.backward(output.abs().mean(), synchronize=False)


def train_inside(model: nn.Module) -> list[torch.Tensor]:
    model.module.wrapper = [model]
    for i in range(3):
        model(i)
        model.require_backward_grad_sync = True
    model.module.wrapper = []
    return model.module.gradients


@pytest.mark.thorough
@run_on_ranks(gloo=True)
def test_lightnings_manual_optimization_under_no_sync():
    both(partial(Redirected, several_backwards), train_inside)
    both(partial(Redirected, two_losses), train_inside)
    model = syncengine.Parallel(Mlp(), bucket_cap_mb=0.1)
    assert model.reducer._rebuild_buckets()
    assert not model.reducer._rebuild_buckets()


@run_on_ranks(gloo=True)
def test_lightnings_flush_of_a_static_graph():
    """After the first backward over a static graph Lightning averages by DDP's own private method."""

    def step(self: Redirected, wrapper: nn.Module, step: int) -> None:
        self.inner.zero_grad()
        self.backward(self.inner(data(step)).square().mean())
        if step == 0:
            wrapper.reducer._delay_all_reduce()
            self.gradients = gradients(self.inner)

    both(partial(Redirected, step), train_inside, static_graph=True)


@pytest.mark.parametrize("world", [1, 2])
@run_on_ranks(gloo=True)
def test_accelerates_trigger_sync_in_backward(world: int):
    def step(model: nn.Module) -> None:
        for i in range(3):
            with model.no_sync():  # trigger_sync_in_backward steps on a forward that ran here
                losses = [model(data(10 * i + j)).square().mean() for j in range(3)]
                losses[0].backward()
            before = model.require_backward_grad_sync, model.require_forward_param_sync
            model.require_backward_grad_sync, model.require_forward_param_sync = True, True
            model.reducer.prepare_for_backward([])
            (losses[1] + losses[2]).backward()
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    both(Mlp, step)


OURS, DDPS = syncengine.Parallel, DistributedDataParallel


# Without BatchNorm, whose statistics differ between ranks: torch keeps those of one of them.
def start(wrap: Wrap, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Mlp())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    for i in steps:
        optimizer.zero_grad()
        model(data(i)).square().mean().backward()
        optimizer.step()
    return [*gradients(model), *(t.clone() for t in model.state_dict().values())]


@run_on_ranks(gloo=True)
def test_state_dicts_are_those_of_ddp():
    full = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = []
    for wrap in (OURS, DDPS):
        model, optimizer = start(wrap, seed=0)
        train(model, optimizer, range(3))
        state = [state_dict.get_model_state_dict(model), state_dict.get_optimizer_state_dict(model, optimizer)]
        state += state_dict.get_state_dict(model, optimizer, options=full)
        states.append(tree_flatten_with_path(state)[0])
    for (path, ours), (expected_path, theirs) in zip(*states, strict=True):
        assert path == expected_path
        assert same_bits(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    assert "head.weight" in state[0]


@pytest.mark.parametrize(("writer", "reader"), [(OURS, OURS), (DDPS, OURS), (OURS, DDPS)])
@run_on_ranks(gloo=True)
def test_training_goes_on_from_a_checkpoint(tmp_path: Path, writer: Wrap, reader: Wrap):
    """The checkpoint is a file, or memory: each rank's, or rank 0's."""
    names = ("model_state_dict", "optim_state_dict")
    model, optimizer = start(writer, seed=0)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(state_dict.get_state_dict(model, optimizer))
    dcp.save(dict(zip(names, saved, strict=True)), checkpoint_id=tmp_path)
    expected = train(model, optimizer, range(3, 5))
    for source in ("file", "each rank", "rank 0") if writer is reader else ("file",):
        model, optimizer = start(reader, seed=1)
        if source == "file":
            state = dict(zip(names, state_dict.get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=tmp_path)
            state_dict.set_state_dict(model, optimizer, **state)
        else:
            of_rank_0 = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            options = of_rank_0 if source == "rank 0" else None
            mine = copy.deepcopy(saved) if options is None or syncengine.rank() == 0 else ({}, {})
            state_dict.set_model_state_dict(model, mine[0], options=options)
            state_dict.set_optimizer_state_dict(model, optimizer, mine[1], options=options)
        assert not different_bits(train(model, optimizer, range(3, 5)), expected), source
