"""``mixed_precision``, with the bits of modules that are cast as a whole.

DDP's needs streams, which CPUs don't have: it is the reference on a GPU, in test_cuda_equality.py. Here it is a copy
of the module in the small dtype, for each step and rank, whose gradients are averaged as the settings say.
"""

import asyncio
import contextlib
import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from marks import flat_at_night
from models.lstm import Sentences
from models.workload import same_bits
from parallel_models import CAP, Conv, Mlp, Tied, data, gradients
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import InvalidUsage, Mismatch

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")

BF16 = _MixedPrecision(param_dtype=torch.bfloat16)
BF16_REDUCED_IN_FP32 = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BUFFERS_TOO = _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
FP16 = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)

# What a model makes of a step's batch of one rank. `dtype`: of floating-point inputs; None leaves the cast to Parallel.
Call = Callable[[nn.Module, int, int, torch.dtype | None], torch.Tensor]


def on_data(model: nn.Module, step: int, rank: int, dtype: torch.dtype | None) -> torch.Tensor:
    return model(data(step, rank).to(dtype))


def on_dict(model: nn.Module, step: int, rank: int, dtype: torch.dtype | None) -> torch.Tensor:
    return model({"x": data(step, rank).to(dtype), "scale": 3}, dtype="a name that is the model's own")


def on_sentences(model: nn.Module, step: int, rank: int, _: torch.dtype | None) -> torch.Tensor:
    return Sentences().loss(model.eval(), torch.Generator().manual_seed(rank), step)  # eval: no dropout


def steps(model: nn.Module, call: Call, count: int) -> list[torch.Tensor]:
    """Losses, and the last gradients. They are large enough for float16."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0001, momentum=0.9)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        losses.append(call(model, step, syncengine.rank(), None).float().square().sum())
        losses[-1].backward()
        optimizer.step()
    return losses + gradients(model)


def expected(module: nn.Module, call: Call, precision: _MixedPrecision, count: int) -> list[torch.Tensor]:
    """The same without Parallel, of both ranks' batches."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0001, momentum=0.9)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        for rank in range(2):
            low = copy.deepcopy(module)
            for name, parameter in low.named_parameters():
                parameter.data = parameter if name in ignored else parameter.to(precision.param_dtype)
            loss = call(low, step, rank, precision.param_dtype).float().square().sum()
            loss.backward()
            is_own = rank == syncengine.rank()
            losses += [loss] * is_own
            for (name, mine), its_low in zip(module.named_parameters(), low.parameters(), strict=True):
                if its_low.grad is not None and (is_own or name not in ignored):
                    mine.grad = its_low.grad.to(mine.dtype) + (0 if mine.grad is None else mine.grad)
        for name, mine in module.named_parameters():
            if mine.grad is not None and name not in ignored:
                mine.grad = (mine.grad / 2).to(precision.reduce_dtype or precision.param_dtype).float()
        optimizer.step()
    return losses + gradients(module)


class Checkpointed(Mlp):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.layers, x.requires_grad_(), use_reentrant=self.reentrant))


def shared() -> nn.Module:
    """A weight of two modules: its gradient is a sum of two in the small dtype."""
    first, second = nn.Linear(24, 24), nn.Linear(24, 24)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


class Partly(nn.Module):
    """One part frozen, one that DDP leaves alone, and inputs in a dict beside a number."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.ignored = nn.Linear(24, 24, dtype=torch.float64)
        self.head = nn.Linear(24, 5)
        self.register_buffer("counts", torch.zeros(3))
        names = ("ignored.weight", "ignored.bias", "counts")
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)

    def forward(self, inputs: dict[str, Any], dtype: str) -> torch.Tensor:
        assert inputs["x"].dtype == self.head.weight.dtype == torch.bfloat16
        assert (self.ignored.weight.dtype, self.counts.dtype) == (torch.float64, torch.float32)
        hidden = self.ignored(self.frozen(inputs["x"]).double())
        return self.head(hidden.bfloat16()) * inputs["scale"]


CASES: list[tuple[Callable[[], nn.Module], Call, _MixedPrecision, dict[str, Any]]] = [
    (Mlp, on_data, BF16, {}),
    (Mlp, on_data, BF16, CAP),
    (Mlp, on_data, BF16, {"static_graph": True}),
    (Mlp, on_data, BF16, {"find_unused_parameters": True}),
    (Mlp, on_data, BF16_REDUCED_IN_FP32, {}),
    (Mlp, on_data, FP16, {}),
    (Tied, on_data, BF16, {}),
    (Tied, on_data, FP16, {"gradient_as_bucket_view": True}),
    (shared, on_data, BF16_REDUCED_IN_FP32, {}),
    (partial(Checkpointed, True), on_data, BF16, {}),
    (partial(Checkpointed, False), on_data, BF16, {}),
    (Partly, on_dict, BF16, {}),
    (Partly, on_dict, BUFFERS_TOO, {}),
    (Sentences().model, on_sentences, BF16, {}),
]


@pytest.mark.thorough
@flat_at_night
@run_on_ranks()
def test_the_bits_are_those_of_modules_in_the_small_dtype():
    for make, call, precision, options in CASES:
        torch.manual_seed(0)
        module = make()
        count = 1 if make is Partly else 3  # the ranks' ignored parameters go their own ways
        theirs = expected(copy.deepcopy(module), call, precision, count)
        ours = steps(syncengine.Parallel(module, mixed_precision=precision, **options), call, count)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert same_bits(a, b), (make, precision, options, i)


@run_on_ranks(world=3)
def test_gradients_may_travel_in_the_small_dtype_alone():
    """Averages of plain float32 backwards, each contribution rounded."""
    torch.manual_seed(0)
    module = nn.Linear(24, 7)
    precision = _MixedPrecision(reduce_dtype=torch.bfloat16)
    model = syncengine.Parallel(copy.deepcopy(module), mixed_precision=precision)
    assert model(data(0, 0)).dtype == torch.float32
    model(data()).square().sum().backward()
    of_ranks = (torch.autograd.grad(module(data(0, r)).square().sum(), list(module.parameters())) for r in range(3))
    for mine, *contributions in zip(gradients(model), *of_ranks, strict=True):
        total = sum(contribution.bfloat16().float() for contribution in contributions)
        assert torch.equal(mine, (total * (1 / 3)).bfloat16().float())


@run_on_ranks()
def test_buffers_are_cast_for_good():
    """DDP casts counters, too."""
    precision = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    model = syncengine.Parallel(Conv(), mixed_precision=precision)
    steps(model, on_data, 2)
    assert {str(b.dtype) for b in model.buffers()} == {"torch.bfloat16", "torch.int64"}
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


@run_on_ranks()
def test_gradients_accumulate_in_the_parameters_dtype():
    """DDP adds them up in bfloat16."""
    torch.manual_seed(0)
    model = syncengine.Parallel(nn.Linear(24, 3), mixed_precision=BF16_REDUCED_IN_FP32)
    mine = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(3):
        low = copy.deepcopy(model.module).bfloat16()
        on_data(low, step, syncengine.rank(), torch.bfloat16).square().sum().backward()
        for total, parameter in zip(mine, low.parameters(), strict=True):
            total += parameter.grad.float()
        with model.no_sync() if step < 2 else contextlib.nullcontext():
            on_data(model, step, syncengine.rank(), None).square().sum().backward()
    for total in mine:
        syncengine.all_reduce(total, "avg")
    assert all(map(torch.equal, gradients(model), mine))


@run_on_ranks()
def test_nothing_stays_behind_a_forward():
    model = syncengine.Parallel(Mlp(), mixed_precision=BF16)
    before = dict(model.named_parameters())

    def check() -> None:
        assert all(value is before[name] for name, value in model.named_parameters())
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}

    assert model(data(0, 0)).dtype == torch.bfloat16
    check()
    with torch.no_grad():
        model(data(0, 0))
    check()
    assert model.module.head(torch.ones(1, 500, dtype=torch.bfloat16)).dtype == torch.bfloat16  # one part alone
    check()
    copied = pickle.loads(pickle.dumps(model))
    assert [str(hook) for hook, _ in copied._comm_hooks] == ["syncengine.hooks.mixed_precision"]
    assert copied(data(0, 0)).dtype == torch.bfloat16


@run_on_ranks()
def test_nothing_stays_behind_a_forward_of_a_recurrent_layer():
    """It keeps its parameters in a list as well."""
    lstm = nn.LSTM(24, 8)
    syncengine.Parallel(lstm, mixed_precision=BF16)(data(0, 0).unsqueeze(0))
    assert all(map(lambda a, b: a is b, lstm._flat_weights, lstm.parameters()))


@run_on_ranks(world=1)
def test_an_exception_in_forward_leaves_the_parameters_in_place():
    model = syncengine.Parallel(Mlp(), mixed_precision=BF16)
    before = list(model.parameters())
    model.module.head.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model(data(0, 0))
    assert all(map(lambda a, b: a is b, before, model.parameters()))


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        (torch.bfloat16, "not a torch.nn.parallel.distributed._MixedPrecision"),
        (_MixedPrecision(param_dtype=torch.int8), "param_dtype=torch.int8 is not a floating-point dtype"),
        (_MixedPrecision(param_dtype=torch.float64), "can't be reduced in torch.float64"),
    ],
)
@run_on_ranks()
def test_what_can_not_work_is_refused_by_name(precision: Any, text: str):
    with pytest.raises(InvalidUsage, match=text):
        syncengine.Parallel(nn.Linear(1, 1), mixed_precision=precision)


@run_on_ranks()
def test_a_second_hook_is_refused():
    model = syncengine.Parallel(nn.Linear(1, 1), mixed_precision=BF16)
    with pytest.raises(RuntimeError, match="comm_hook"):
        model.register_comm_hook(None, syncengine.hooks.fp16_compress)


@run_on_ranks()
def test_a_wrapper_in_a_cycle_casts_for_no_later_one():
    """The collector has taken the wrapper on one rank alone."""
    module = Mlp()
    gc.disable()
    try:
        model: Any = syncengine.Parallel(module, mixed_precision=BF16)
        model.itself = [model]
        del model
        if syncengine.rank() == 0:
            gc.collect()
        assert syncengine.Parallel(module)(data(0, 0)).dtype == torch.float32
    finally:
        gc.enable()


@run_on_ranks()
def test_the_module_of_a_wrapper_that_was_not_made_casts_nothing():
    """The error keeps the wrapper, as a notebook's last error does."""
    module = nn.Linear(4, 3 + syncengine.rank())
    with pytest.raises(Mismatch) as kept:
        syncengine.Parallel(module, mixed_precision=BF16)
    assert module(torch.ones(1, 4)).dtype == torch.float32
    del kept
    gc.collect()
    assert not module._forward_pre_hooks and not module._forward_hooks


@run_on_ranks()
def test_casts_go_with_the_wrapper():
    """Under DDP the module's hooks stay, and a copy of the module has them, too."""
    module = Mlp()
    for _ in range(2):
        model = syncengine.Parallel(module, mixed_precision=BF16)
        assert model(data(0, 0)).dtype == torch.bfloat16
        for copy_of in (copy.deepcopy, lambda original: pickle.loads(pickle.dumps(original))):
            assert copy_of(module)(data(0, 0)).dtype == torch.float32
            copied = copy_of(model)
            assert copied(data(0, 0)).dtype == torch.bfloat16
            inner = copied.module
            del copied
            assert inner(data(0, 0)).dtype == torch.float32
        del model
        assert module(data(0, 0)).dtype == torch.float32
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


# --- Ctrl-C, or whatever else is no `Exception`: casts do not stay in the module


def interrupt(module: nn.Module, error: type[BaseException], after: int) -> None:
    """The module's next calls but `after` of them raise `error`, once."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            handle.remove()
            raise error

    handle = module.register_forward_pre_hook(hook)


INTERRUPTIONS = [  # torch calls hooks after an `Exception` alone
    (Mlp, KeyboardInterrupt, 0),  # in forward
    (Mlp, asyncio.CancelledError, 0),
    (Mlp, ZeroDivisionError, 0),
    (partial(Checkpointed, False), SystemExit, 0),
    (partial(Checkpointed, False), KeyboardInterrupt, 1),  # in backward, which recomputes a part
    (partial(Checkpointed, True), KeyboardInterrupt, 1),
    (partial(Checkpointed, True), ZeroDivisionError, 1),
]


@pytest.mark.thorough
@flat_at_night
@run_on_ranks()
def test_an_interrupt_costs_a_step_and_leaves_the_parameters_in_place():
    for make, error, after in INTERRUPTIONS:
        torch.manual_seed(0)
        model = syncengine.Parallel(make(), mixed_precision=BF16)
        reference = syncengine.Parallel(copy.deepcopy(model.module), mixed_precision=BF16)
        before = dict(model.named_parameters())
        interrupt(model.module.layers[3], error, after)
        with pytest.raises(error):
            model(data(9)).square().sum().backward()
        assert all(value is before[name] for name, value in model.named_parameters())
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
        model.zero_grad()
        results = steps(model, on_data, 3)
        assert all(map(same_bits, results, steps(reference, on_data, 3))), (make, error, after)


@flat_at_night
@run_on_ranks()
def test_after_an_interrupt_past_the_wrapper_its_next_forward_casts_anew():
    model = syncengine.Parallel(Mlp(), mixed_precision=BF16)
    reference = syncengine.Parallel(copy.deepcopy(model.module), mixed_precision=BF16)
    weights = [*model.parameters(), *reference.parameters()]
    interrupt(model.module.layers[3], KeyboardInterrupt, 0)
    with pytest.raises(KeyboardInterrupt):
        model.module(data(0, 0).bfloat16())
    with torch.no_grad():
        torch._foreach_mul_(weights, 2)
    assert torch.equal(model(data(0, 0)), reference(data(0, 0)))
    assert all(map(same_bits, steps(model, on_data, 3), steps(reference, on_data, 3)))
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
