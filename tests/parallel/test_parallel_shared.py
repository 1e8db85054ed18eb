"""Parameters of several wrapped models in one backward; outputs that are inputs; outputs that can't be found."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flat import flat
from parallel_models import assert_averages, averages, both, data, different_bits, flat_gradients, gradients
from pool import RankPool, run_on_ranks
from raising_model import InBackward
from random_layers import Layer, linear
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import InvalidUsage, SyncError


def around(encoder: nn.Module, width: int) -> nn.Module:
    """A model whose encoder is of several pages, so that gradients are reduced in place."""
    head = nn.Linear(64, width)
    return Layer(lambda self, x, use: self.head(self.encoder(x) if use else x), encoder=encoder, head=head)


def batch(step: int) -> torch.Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(100 * step + syncengine.rank()))


def together(unevenly: bool = True, keeps: bool = False) -> None:
    """DDP's two reducers may call Gloo in another order on each rank, so autograd alone says what is right."""
    uses: list[tuple[Callable[[int], bool], dict[str, bool]]] = [(lambda i: True, {})]
    if unevenly:  # flat buckets are to be started in one order on all ranks
        uses.append((lambda i: syncengine.rank() == i % 2, {"find_unused_parameters": True}))
        uses.append((lambda i: syncengine.rank() == 0, {"static_graph": True}))
    for use, options in uses:
        encoder = nn.Linear(64, 64)
        memory = [flat_gradients(encoder)] if keeps else []
        models = [syncengine.Parallel(around(encoder, width), **options) for width in (2, 3)]
        for i in range(4):
            expected = averages(encoder, sum(model.module(batch(i), use(i)).square().sum() for model in models))
            encoder.zero_grad(set_to_none=not keeps)
            sum(model(batch(i), use(i)).square().sum() for model in models).backward()
            assert not different_bits(gradients(encoder), expected), (i, options)
            assert not keeps or not different_bits(memory, [torch.cat([grad.flatten() for grad in expected])]), i


@pytest.mark.parametrize("memory", ["pool", "torch", "flat"])
def test_models_that_share_a_large_part(pool: RankPool, memory: str):
    settings = {"timeout": 60.0, "gradient_memory": "torch" if memory == "torch" else "arena"}
    pool.run(*((flat, together, False) if memory == "flat" else (together,)), gloo=True, settings=settings)


@run_on_ranks(gloo=True)
def test_models_that_share_a_part_keep_the_memory_of_its_gradients():
    together(unevenly=False, keeps=True)


@run_on_ranks(world=3)
def test_weights_of_models_that_share_a_large_part_or_a_sparse_table():
    weight = [1, 3, 4][syncengine.rank()]
    encoder = nn.Linear(64, 64, bias=False)
    models = [syncengine.Parallel(around(encoder, 1)) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.module.head.weight)
        model.weight(weight)
    x = torch.full((1, 64), 1.0 + syncengine.rank())
    sum(model(x, True).sum() for model in models).backward()
    assert encoder.weight.grad.unique().tolist() == [4.75]  # (1 * 2 + 3 * 4 + 4 * 6) / 8
    table = nn.Embedding(100, 64, sparse=True)
    models = [syncengine.Parallel(nn.Sequential(table)) for _ in range(2)]
    for model in models:
        model.weight(weight)
    sum(model(torch.tensor([syncengine.rank(), 5])).sum() for model in models).backward()
    dense = table.weight.grad.to_dense()
    assert dense[[0, 1, 2, 5, 6], 0].tolist() == [0.25, 0.75, 1.0, 2.0, 0.0]


@run_on_ranks(gloo=True)
def test_an_input_that_is_an_output():
    def step(model: nn.Module, past_first: bool) -> list[torch.Tensor | None]:
        before = nn.Linear(24, 24)
        for i in range(3):
            before.zero_grad(), model.zero_grad()
            h = before(data(i))
            losses = [model(h)[0].square().sum(), h.square().sum()]
            first, second = losses[::-1] if past_first else losses
            first.backward(retain_graph=True)
            assert not past_first or model.module.head.weight.grad is None
            second.backward()
        return gradients(before)

    kinds = ({}, {"find_unused_parameters": True}, {"static_graph": True})
    for past, options in itertools.product((False, True), kinds):
        both(lambda: Layer(lambda self, h: (self.head(h), h), head=linear()), partial(step, past_first=past), **options)


def hiding(checkpoints: int = 0) -> nn.Module:
    """A layer in that many nested reentrant checkpoints, and a result in which no outputs are looked for."""

    def forward(self: Any, x: torch.Tensor) -> SimpleNamespace:
        call = self.layer
        for _ in range(checkpoints):
            call = partial(checkpoint, call, use_reentrant=True)
        return SimpleNamespace(value=call(x.requires_grad_()))

    return Layer(forward, layer=nn.Linear(24, 24))


@run_on_ranks(gloo=True)
def test_backwards_past_a_model_whose_outputs_are_not_found():
    def step(model: nn.Module) -> list[torch.Tensor | None]:
        found = []
        for i in range(3):
            for each in (model, model.module):
                model.zero_grad()
                each(data(i)).value.square().sum().backward()
                found += gradients(model)
        return found

    for checkpoints in range(3):
        both(partial(hiding, checkpoints), step)
        module = hiding(checkpoints)
        for i, model in itertools.product(range(3), [syncengine.Parallel(module) for _ in range(2)]):
            assert_averages(model, module.layer(data(i)).square().sum(), lambda out: out.value.square().sum(), data(i))


@run_on_ranks()
def test_a_second_backward_through_outputs_that_are_not_found_is_an_error():
    """By its outermost graph: what a reentrant checkpoint runs in it was made after the forward."""
    for checkpoints in range(3):
        model = syncengine.Parallel(hiding(checkpoints))
        for i in range(2):
            value = model(data(i)).value
            value.square().sum().backward(retain_graph=True)
            with pytest.raises(InvalidUsage, match="has already synchronized"):
                value.sum().backward()
        syncengine.barrier()
    for checkpoints in range(2):  # nor does any of several forwards have a second backward
        model = syncengine.Parallel(hiding(checkpoints))
        kept = model(data()).value
        kept.sum().backward(retain_graph=True)
        first, second = model(data(1)).value, model(data(2)).value
        second.sum().backward()
        for value in (kept, first):
            with pytest.raises(InvalidUsage, match="has already synchronized"):
                value.sum().backward()
        syncengine.barrier()


def in_thread(call: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call).result()


def generator_past_the_wrapper(model: nn.Module, run: Any) -> list[Any]:
    """The discriminator's steps, with the generator's forward between; then the generator's, by the bare module."""
    generator, found = nn.Linear(24, 24), []
    for i in range(3):
        run(model(data(i)).value.sum().backward)
        fake = generator(data(i + 1))
        run(model(fake.detach()).value.sum().backward)
        model.zero_grad()
        run(model.module(fake).value.sum().backward)
        found += [*gradients(generator), *gradients(model)]
        model.zero_grad(), generator.zero_grad()
    return found


@run_on_ranks(gloo=True)
def test_a_generators_step_past_a_model_whose_outputs_are_not_found():
    """Its nodes are older than one forward of the discriminator, and later than another, but made in none."""
    for checkpoints, run in itertools.product(range(3), (lambda call: call(), in_thread)):
        both(partial(hiding, checkpoints), partial(generator_past_the_wrapper, run=run))


@run_on_ranks(gloo=True)
def test_a_hidden_loss_of_one_node():
    """A checkpoint makes the loss here; an autograd Function of the user's may, too."""

    def forward(self: Any, x: torch.Tensor) -> SimpleNamespace:
        loss = checkpoint(lambda x: self.layer(x).square().sum(), x.requires_grad_(), use_reentrant=True)
        return SimpleNamespace(value=loss)

    for static_graph in (False, True):
        module = Layer(forward, layer=nn.Linear(24, 24))
        model = syncengine.Parallel(module, static_graph=static_graph)
        for i in range(4):
            expected = averages(module, module.layer(data(i)).square().sum())
            module.zero_grad()
            loss = model(data(i)).value
            loss.backward(retain_graph=True)
            assert not different_bits(gradients(module), expected), (static_graph, i)
            with pytest.raises(InvalidUsage, match="has already synchronized"):
                loss.backward()
            syncengine.barrier()


@run_on_ranks(gloo=True)
def test_a_step_within_somebody_elses_backward():
    module = hiding()
    model = syncengine.Parallel(module)

    @torch.enable_grad()
    def train() -> None:
        model(data()).value.square().sum().backward()
        module.layer.weight.square().sum().backward()  # this rank's own

    for _ in range(3):
        expected = averages(module, module.layer(data()).square().sum())
        module.zero_grad()
        expected[0] = expected[0] + 2 * module.layer.weight.detach()
        InBackward.apply(torch.ones(3, requires_grad=True), train).backward(torch.ones(3))
        assert not different_bits(gradients(module), expected)


def in_checkpoints(self: Any, x: torch.Tensor) -> SimpleNamespace:
    """Layers in reentrant checkpoints, one after the other, and a result that is not found."""
    for layer in self.layers:
        x = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
    return SimpleNamespace(value=x)


@run_on_ranks(gloo=True)
def test_checkpoints_behind_outputs_that_are_not_found():
    """DDP never averages such a static graph."""
    # A LayerNorm is one node: autograd does not tell where its task starts from.
    for layers in ([nn.Linear(24, 24) for _ in range(3)], [nn.LayerNorm(24) for _ in range(3)]):
        for calls, static_graph in ((layers, False), (layers, True), ([*layers, layers[0]], True)):
            model = syncengine.Parallel(Layer(in_checkpoints, layers=nn.Sequential(*calls)), static_graph=static_graph)
            for i in range(3):
                plain = model.module.layers(data(i)).square().sum()
                assert_averages(model, plain, lambda out: out.value.square().sum(), data(i))


@pytest.mark.parametrize(("options", "other"), [({}, False), ({"find_unused_parameters": True}, True)])
@run_on_ranks()
def test_gradients_that_come_after_the_average_are_an_error(options: dict[str, bool], other: bool):
    """A parameter in two reentrant checkpoints; one that seemed unused in the first: behind outputs not found."""
    layers = [nn.Linear(24, 24) for _ in range(2)]
    with pytest.raises(SyncError, match="ready only once"):  # the other's may come at any time
        model = syncengine.Parallel(Layer(in_checkpoints, layers=nn.Sequential(layers[0], layers[other])), **options)
        model(data()).value.sum().backward()


@run_on_ranks(gloo=True)
def test_an_error_between_checkpoints_behind_outputs_that_are_not_found_costs_a_step():
    module = Layer(in_checkpoints, layers=nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(2))))
    model = syncengine.Parallel(module)
    for i in range(3):
        expected = averages(module, module.layers(data(i)).sum())
        module.zero_grad()
        value = model(data(i)).value
        if i == 1:
            value.grad_fn.next_functions[0][0].register_prehook(lambda _: 1 / 0)  # of the first layer's checkpoint
            with pytest.raises(ZeroDivisionError):
                value.sum().backward()
            assert gradients(module) == [None, None]
        else:
            value.sum().backward()
            assert not different_bits(gradients(module), expected), i
