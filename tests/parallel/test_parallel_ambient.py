"""What a program sets for all that runs in it, or in a part: it is for the model, not for the wrapper's tensors."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from marks import flat_at_night, mostly_nightly
from models.workload import same_bits
from parallel_models import gradients, of_both
from pool import run_on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import syncengine

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")


class Counted(nn.Module):
    """Buffers that travel in one message and one that does not, one of them new in each forward unless `steady`."""

    def __init__(self, steady: bool = False) -> None:
        super().__init__()
        self.steady = steady
        self.layers = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(20_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps.add_(1) if self.steady else self.steps + 1
        self.seen += 1 + syncengine.rank()
        return self.layers(x)


def batch(step: int = 0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * step + syncengine.rank())
    return torch.randn(5, 24, generator=generator, device="cpu", dtype=torch.float32)


def train(model: nn.Module, steps: int = 4) -> list[torch.Tensor]:
    """Plans, no_sync, evaluations in between; the gradients of each step, and all state at the end."""
    left: list[torch.Tensor] = []
    for i in range(steps):
        model.zero_grad()
        if i == 1:
            with model.no_sync():
                model(batch(50)).square().mean().backward()
        model(batch(i)).square().mean().backward()
        left += [g.clone() for g in gradients(model) if g is not None]
        with torch.no_grad():
            model.eval()(batch(i))
            model.train()
    return left + [t.clone() for t in model.state_dict().values()]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert all(same_bits(mine, other) for mine, other in zip(ours, theirs, strict=True))


@run_on_ranks(gloo=True)
def test_the_first_forward_may_be_one_for_inference():
    """As in Lightning's sanity check. What it leaves must serve training."""

    def step(model: nn.Module, train_before: int) -> list[torch.Tensor]:
        left = train(model, train_before) if train_before else []
        with torch.inference_mode():
            model.eval()(batch())
            model.train()
        if model.module.steps.is_inference():  # DDP can't write that
            model.module.steps = model.module.steps.clone()
        return left + train(model)

    for make, train_before in itertools.product((Counted, partial(Counted, steady=True)), (0, 3)):
        assert_same(*of_both(partial(step, train_before=train_before), make))
    model = syncengine.Parallel(Counted())
    model.module.steps = torch.zeros(1)
    with torch.inference_mode(), torch.enable_grad():  # in which autograd records nothing
        for _ in range(2):
            assert not model(batch()).requires_grad
    model.module.steps = model.module.steps.clone()
    train(model)


@run_on_ranks()
def test_buffers_may_come_from_inference():
    """DDP raises there."""
    model, other = syncengine.Parallel(Counted()), syncengine.Parallel(Counted())
    other.load_state_dict(model.state_dict())
    for m, mode in ((model, torch.inference_mode), (other, torch.no_grad)):
        with mode():
            m.module.steps = m.module.steps + syncengine.rank()
    assert model.module.steps.is_inference()
    assert_same(train(model), train(other))


@contextlib.contextmanager
def changed(change: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    change(value)
    yield
    change(back)  # if nothing was raised: with an error the process ends


class Everywhere(TorchFunctionMode):
    """What is made without a device goes elsewhere, as under torch.device()."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.zeros, torch.empty, torch.ones, torch.full, torch.arange):
            kwargs.setdefault("device", "meta")
        return function(*args, **kwargs)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "default device meta": partial(changed, torch.set_default_device, "meta", None),
    "default device cpu": partial(changed, torch.set_default_device, "cpu", None),
    "device meta around": lambda: torch.device("meta"),
    "a mode of functions": Everywhere,
    "default dtype float64": partial(changed, torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype bfloat16": partial(changed, torch.set_default_dtype, torch.bfloat16, torch.float32),
    "deterministic": partial(changed, torch.use_deterministic_algorithms, True, False),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no gradients at construction": torch.no_grad,
    "inference at construction": torch.inference_mode,
}


def train_joined(model: nn.Module) -> list[torch.Tensor]:
    with model.join():
        for i in range(3 + syncengine.rank()):
            model(batch(i)).square().mean().backward()
    return [*gradients(model), *(t.clone() for t in model.state_dict().values())]


OPTIONS = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
HOOKS = {"hooked": default_hooks.allreduce_hook, "compressed": default_hooks.fp16_compress_hook}
WAYS = ["plain", *OPTIONS, "joined", *HOOKS]


def run(wrap: Any, way: str, state: str | None = None) -> list[torch.Tensor]:
    """What training leaves that runs in a state: at construction, or all the time."""
    enter = STATES[state] if state else contextlib.nullcontext
    torch.manual_seed(0)
    module = Counted()
    with enter():
        model = wrap(module, **OPTIONS.get(way, {}))
    if way in HOOKS:
        model.register_comm_hook(None, HOOKS[way])
    with contextlib.nullcontext() if state and state.endswith("at construction") else enter():
        return train_joined(model) if way == "joined" else train(model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kinds_of_buckets", "way"),
    mostly_nightly(itertools.product(["in place", "flat"], WAYS), 3, 5, 6),
    indirect=["kinds_of_buckets"],
)
@run_on_ranks(gloo=True)
def test_what_is_set_outside_is_for_the_model(way: str):
    expected = run(syncengine.Parallel, way)
    for state in STATES:
        # Autocast is the one that is for what the model computes.
        theirs = run(DistributedDataParallel, way, state) if state == "autocast" else expected
        assert_same(run(syncengine.Parallel, way, state), theirs)


@run_on_ranks(gloo=True)
def test_ddp_does_the_same_where_it_can():
    expected = run(syncengine.Parallel, "plain")
    for state in ("default device cpu", "default dtype float64", "deterministic", "anomalies"):
        assert_same(run(DistributedDataParallel, "plain", state), expected)


def own_ways(state: str | None = None) -> list[torch.Tensor]:
    """Training in ways that DDP has not, of modules that were made outside of the state."""
    torch.manual_seed(0)
    modules = [Counted(), Counted(), nn.Sequential(nn.Linear(24, 4), nn.SyncBatchNorm(4))]
    table = nn.EmbeddingBag(7, 4, sparse=True, mode="sum")
    with STATES[state]() if state else contextlib.nullcontext():
        weighted, half, batch_norm = (syncengine.Parallel(module) for module in modules)
        half.register_comm_hook(None, syncengine.hooks.bf16_compress)
        left = train(half) + train(batch_norm)
        for i in range(3):
            weighted.weight(1 + syncengine.rank())
            weighted(batch(i)).square().mean().backward()
        with weighted.join(divide_by_initial_world_size=False):
            for i in range(2 + syncengine.rank()):
                weighted.weight(3.0)
                weighted(batch(i)).square().mean().backward()
        left += train(copy.deepcopy(weighted))
        sparse = syncengine.Parallel(table)
        for i in range(3):
            sparse.zero_grad()
            sparse(torch.tensor([[syncengine.rank(), 2, i]], device="cpu")).square().sum().backward()
            left.append(table.weight.grad.to_dense().clone())
    return left


@pytest.mark.thorough
@flat_at_night
@run_on_ranks()
def test_what_is_set_outside_is_not_for_weights_batch_norms_and_tables():
    expected = own_ways()
    for state in ("default device meta", "a mode of functions", "default dtype bfloat16", "deterministic"):
        assert_same(own_ways(state), expected)
