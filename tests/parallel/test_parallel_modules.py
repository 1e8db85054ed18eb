"""Kinds of modules and of outputs, and wrappers in wrappers or beside each other, each with the bits of DDP."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_models import Conv, Wrap, backwards, both, data, different_bits, gradients, small
from pool import run_on_ranks
from random_layers import Layer, linear
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

import syncengine


@run_on_ranks(gloo=True)
def test_scripted_and_traced_modules():
    both(lambda: torch.jit.script(small()), backwards)
    both(lambda: torch.jit.trace(small(), torch.zeros(5, 24)), backwards)


@run_on_ranks(gloo=True, environ={"TP_SOCKET_IFNAME": "lo"})
def test_references_to_results(tmp_path: Path):
    def refer(self: Any, x: torch.Tensor, inside: bool) -> Any:
        y = self.linear(x)
        return [rpc.RRef(y)] if inside else rpc.RRef({"unused": self.other(x), "y": y})

    def make() -> nn.Module:
        return Layer(refer, linear=linear(), other=linear(), never=linear())

    def step(model: nn.Module, inside: bool) -> None:
        for i in range(3):
            model.zero_grad()
            out = model(data(i), inside)
            y = out[0].local_value() if inside else out.local_value()["y"]
            y.square().mean().backward()

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path / 'store'}")
    rpc.init_rpc(f"rank{syncengine.rank()}", rank=syncengine.rank(), world_size=2, rpc_backend_options=options)
    for inside in (True, False):
        both(make, partial(step, inside=inside), find_unused_parameters=True)
    rpc.shutdown()


@run_on_ranks(gloo=True)
def test_a_forward_that_returns_nothing():
    def keep(self: Any, x: torch.Tensor) -> None:
        self.kept = self.linear(x)

    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            assert model(data(i)) is None
            model.module.kept.square().sum().backward()
        model.module.kept = None

    both(lambda: Layer(keep, linear=linear()), step)


def partly(wrap: Wrap) -> nn.Module:
    """A part is wrapped by itself, and so left out of what is around it, as TorchRec does."""
    module = Layer(lambda self, x: self.outer(self.inner(x).tanh()), inner=wrap(linear()), outer=linear())
    module._ddp_params_and_buffers_to_ignore = ["inner.module.weight", "inner.module.bias"]
    return module


def with_all(train: Callable[[Wrap], list[torch.Tensor]]) -> None:
    """`train` has the same bits with Parallel and with DDP."""
    assert not different_bits(*(train(wrap) for wrap in (syncengine.Parallel, DistributedDataParallel)))


@run_on_ranks(gloo=True)
def test_a_wrapper_around_a_wrapped_part():
    def train(wrap: Wrap, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = wrap(partly(wrap), **options)
        return [*(loss.detach() for loss in backwards(model)), *gradients(model)]

    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        with_all(partial(train, **options))


@pytest.mark.thorough
@run_on_ranks(gloo=True)
def test_a_wrapper_around_a_whole_wrapper_is_warned_of():
    for inner in (syncengine.Parallel, DistributedDataParallel, nn.DataParallel):
        wrapped = inner(small())
        for module in (wrapped, torch.compile(wrapped, backend="eager")):
            with pytest.warns(UserWarning, match=rf"is itself a {inner.__name__}.*give it the \.module of that"):
                syncengine.Parallel(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backwards(syncengine.Parallel(partly(syncengine.Parallel)))
        backwards(DistributedDataParallel(partly(syncengine.Parallel)))
        backwards(syncengine.Parallel(nn.Sequential(syncengine.Parallel(small()))))


@run_on_ranks(gloo=True)
def test_models_that_share_a_part():
    def train(wrap: Wrap, in_turns: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        shared = nn.Linear(24, 24)
        models = [wrap(nn.Sequential(shared, nn.Linear(24, width))) for width in (2, 3)]
        history = []
        for i in range(4):
            losses = [model(data(i)).square().sum() for model in models if not in_turns or model is models[i % 2]]
            sum(losses).backward()
            for model in models:
                history += [g.clone() for g in gradients(model) if g is not None]
                model.zero_grad()
        return history

    with_all(partial(train, in_turns=True))
    with_all(partial(train, in_turns=False))


@run_on_ranks(gloo=True)
def test_a_class_of_the_users_own():
    def train(wrap: Wrap) -> list[torch.Tensor]:
        class Transparent(wrap):  # the usual way to reach the module's attributes through the wrapper
            def __getattr__(self, name: str) -> Any:
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(self.module, name)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * 2

        torch.manual_seed(0)
        model = Transparent(Conv())
        assert model.body is model.module.body
        return [*(loss.detach() for loss in backwards(model)), *gradients(model), *model.buffers()]

    with_all(train)
