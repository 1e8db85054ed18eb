"""torch.compile over, under and inside the wrapper: the bits of DDP under the same compiler, and the same graphs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from marks import mostly_nightly
from parallel_models import assert_averaged, both, data, gradients
from pool import RankPool, run_on_ranks
from raising_model import Raising
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import InvalidUsage


class Wide(nn.Module):
    """Two layers, by default of over a MiB each, so that DDPOptimizer cuts between them."""

    def __init__(self, width: int = 600) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Checkpointed(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


@pytest.fixture(scope="module", autouse=True)
def own_processes(pool: RankPool) -> Iterator[None]:
    """Compilers leave threads, and caches that hold gradients."""
    yield
    pool.refresh()


@contextmanager
def fresh_dynamo(optimize_ddp: bool | str, backend: str = "eager") -> Iterator[Any]:
    """Clears the compiler's caches before and after; yields a backend that counts its graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend  # an import of seconds, which ranks alone need

    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield CompileCounterWithBackend(backend)
    torch._dynamo.reset()


FINE = {"bucket_cap_mb": 1}
CASES = [
    ("over", "aot_eager", True, FINE),
    ("over", "eager", False, {"modes": True}),
    ("over_in_place", "eager", "ddp_optimizer", {"modes": True}),
    ("under", "aot_eager", True, FINE),
    ("under", "eager", "no_optimization", {}),
    ("parts", "eager", True, FINE),
    ("over", "eager", True, {"find_unused_parameters": True}),
    ("under", "aot_eager", True, {"make": Checkpointed}),
    ("over", "inductor", True, {"make": partial(Wide, 40)}),  # one graph: a C++ compiler takes seconds for each
]


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "backend", "optimize_ddp", "options"), mostly_nightly(CASES, 0, 5))
@run_on_ranks(gloo=True, timeout=300)
def test_compiled_training_has_the_bits_and_graphs_of_ddp(
    place: str, backend: str, optimize_ddp: bool | str, options: dict[str, Any]
):
    """Three steps; with `modes` also under no_sync and without gradients, which compiles anew."""
    make, modes = options.pop("make", Wide), options.pop("modes", False)

    def fresh() -> nn.Module:
        torch._dynamo.reset()
        counter.frame_count = 0
        module = make()
        if place == "under":
            return torch.compile(module, backend=counter, fullgraph=True)
        if place == "parts":
            module.first = torch.compile(module.first, backend=counter)
            module.second.compile(backend=counter)
        return module

    def step(model: nn.Module) -> list[torch.Tensor]:
        if place == "over":
            model = torch.compile(model, backend=counter)
        elif place == "over_in_place":
            model.compile(backend=counter)
        found = []
        for i in range(3):
            model.zero_grad()
            if modes and i > 0:
                with model.no_sync():
                    model(data(i + 10)).square().mean().backward()
            loss = model(data(i)).square().mean()
            loss.backward()
            found += [loss.detach(), *gradients(model)]
        if modes:
            with torch.no_grad():
                found.append(model.eval()(data(9)))
        return [*found, torch.tensor(counter.frame_count)]

    with fresh_dynamo(optimize_ddp, backend) as counter:
        assert both(fresh, step, **options)[-1] >= (2 if place == "parts" else 1)


@pytest.mark.nightly
@run_on_ranks(gloo=True)
def test_a_compiled_training_step():
    def train(model: nn.Module) -> list[torch.Tensor]:
        with fresh_dynamo(True) as counter:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            @torch.compile(backend=counter)
            def step(x: torch.Tensor, model=model, optimizer=optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            losses = [step(data(i)) for i in range(3)]
            assert counter.frame_count > 0
            return losses

    both(Wide, train)


@run_on_ranks()
def test_the_wrapper_itself_is_not_traced():
    """Only the module is compiled, once: none of the wrapper's own calculations."""
    with fresh_dynamo(True) as counter:
        model = torch.compile(syncengine.Parallel(Wide(), find_unused_parameters=True), backend=counter)
        for i in range(3):
            model(data(i)).sum().backward()
        assert counter.frame_count == 2  # cut after DDP's first MiB
        nodes = [node for graph in counter.graphs for node in graph.graph.nodes]
        called = [str(node.target) for node in nodes if node.op.startswith("call")]
        assert len(called) == 9, called
        assert sum("linear" in target for target in called) == 4


@pytest.mark.thorough
@run_on_ranks()
def test_the_whole_module_may_be_asked_for_in_one_graph():
    """DDP can't: fullgraph=True takes the wrapper for part of the graph."""
    for optimize_ddp, graphs in ((True, 2), (False, 1)):
        with fresh_dynamo(optimize_ddp) as counter:
            model = torch.compile(syncengine.Parallel(Wide()), backend=counter, fullgraph=True)
            model(data()).sum().backward()
            assert counter.frame_count == graphs


@run_on_ranks(gloo=True)
def test_compiled_autograd_is_refused_by_name():
    from torch._dynamo import compiled_autograd

    with fresh_dynamo("python_reducer"):
        model = syncengine.Parallel(Wide())
        model(data()).square().sum().backward()  # without it the option changes nothing
        assert_averaged(model.module, model.module(data()).square().sum())
        loss = model(data()).sum()
        refused = pytest.raises(InvalidUsage, match="does not work with compiled autograd")
        with compiled_autograd._enable(partial(torch.compile, backend="eager")), refused:
            loss.backward()


@run_on_ranks()
def test_a_module_that_raises_leaves_the_compiler_as_it_was():
    model = syncengine.Parallel(Raising())
    with model.module.raising("forward"), torch.no_grad():
        model(data())
    assert DistributedDataParallel._active_ddp_module is None
    with fresh_dynamo(True) as counter:
        torch.compile(nn.Linear(2, 2), backend=counter)(torch.ones(1, 2))
        assert counter.frame_count == 1


@run_on_ranks(world=1)
def test_alone_the_module_is_compiled_too():
    with fresh_dynamo(True) as counter:
        model = torch.compile(syncengine.Parallel(Wide()), backend=counter)
        model(data()).sum().backward()
        assert counter.frame_count == 1
