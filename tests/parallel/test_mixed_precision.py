"""``mixed_precision``, with the bits of modules that are cast as a whole.

DDP's needs streams, which CPUs don't have: it is the reference on a GPU, in test_cuda_equality.py. Here it is a copy
of the module in the small dtype, for each step and rank, whose gradients are averaged as the settings say.
"""

import asyncio
import contextlib
import copy
import gc
import itertools
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
from random_layers import Layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import InvalidUsage, Mismatch

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")

BF16 = _MixedPrecision(param_dtype=torch.bfloat16)
BF16_REDUCED_IN_FP32 = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
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


def checkpointed(reentrant: bool) -> nn.Module:
    mlp, call = Mlp(), partial(checkpoint, use_reentrant=reentrant)
    return Layer(lambda self, x: self.head(call(self.layers, x.requires_grad_())), layers=mlp.layers, head=mlp.head)


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
        return self.head(self.ignored(self.frozen(inputs["x"]).double()).bfloat16()) * inputs["scale"]


@pytest.mark.thorough
@flat_at_night
@run_on_ranks()
def test_the_bits_are_those_of_modules_in_the_small_dtype():
    for make, call, precision, options in (
        *((Mlp, on_data, precision, {}) for precision in (BF16, BF16_REDUCED_IN_FP32, FP16)),
        (Mlp, on_data, BF16, CAP),
        *((Mlp, on_data, BF16, {option: True}) for option in ("static_graph", "find_unused_parameters")),
        (Tied, on_data, BF16, {}),
        (Tied, on_data, FP16, {"gradient_as_bucket_view": True}),
        (shared, on_data, BF16_REDUCED_IN_FP32, {}),
        *((partial(checkpointed, reentrant), on_data, BF16, {}) for reentrant in (True, False)),
        (Partly, on_dict, BF16, {}),
        (Partly, on_dict, _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16), {}),
        (Sentences().model, on_sentences, BF16, {}),
    ):
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
    model = syncengine.Parallel(copy.deepcopy(module), mixed_precision=_MixedPrecision(reduce_dtype=torch.bfloat16))
    assert model(data(0, 0)).dtype == torch.float32
    model(data()).square().sum().backward()
    of_ranks = (torch.autograd.grad(module(data(0, r)).square().sum(), list(module.parameters())) for r in range(3))
    for mine, *contributions in zip(gradients(model), *of_ranks, strict=True):
        total = sum(contribution.bfloat16().float() for contribution in contributions)
        assert torch.equal(mine, (total * (1 / 3)).bfloat16().float())


@run_on_ranks()
def test_buffers_are_cast_for_good():
    """DDP casts counters, too."""
    model = syncengine.Parallel(Conv(), mixed_precision=_MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16))
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
    for forward in (
        lambda: model(data(0, 0)),
        torch.no_grad()(lambda: model(data(0, 0))),
        lambda: model.module.head(torch.ones(1, 500, dtype=torch.bfloat16)),  # one part alone
    ):
        assert forward().dtype == torch.bfloat16
        assert all(value is before[name] for name, value in model.named_parameters())
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    copied = pickle.loads(pickle.dumps(model))
    assert [str(hook) for hook, _ in copied._comm_hooks] == ["syncengine.hooks.mixed_precision"]
    assert copied(data(0, 0)).dtype == torch.bfloat16
    lstm = nn.LSTM(24, 8)  # keeps its parameters in a list as well
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


@run_on_ranks()
def test_what_can_not_work_is_refused_by_name():
    for precision, text in (
        (torch.bfloat16, "not a torch.nn.parallel.distributed._MixedPrecision"),
        (_MixedPrecision(param_dtype=torch.int8), "param_dtype=torch.int8 is not a floating-point dtype"),
        (_MixedPrecision(param_dtype=torch.float64), "can't be reduced in torch.float64"),
    ):
        with pytest.raises(InvalidUsage, match=text):
            syncengine.Parallel(nn.Linear(1, 1), mixed_precision=precision)
    model = syncengine.Parallel(nn.Linear(1, 1), mixed_precision=BF16)  # has a hook of its own
    with pytest.raises(RuntimeError, match="comm_hook"):
        model.register_comm_hook(None, syncengine.hooks.fp16_compress)


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
    gc.disable()
    try:
        model = syncengine.Parallel(module, mixed_precision=BF16)
        model.itself = [model]
        del model
        if syncengine.rank() == 0:  # the collector takes a wrapper in a cycle on one rank alone
            gc.collect()
        assert syncengine.Parallel(module)(data(0, 0)).dtype == torch.float32
    finally:
        gc.enable()
    module = nn.Linear(4, 3 + syncengine.rank())
    with pytest.raises(Mismatch) as kept:  # the error keeps the wrapper, as a notebook's last error does
        syncengine.Parallel(module, mixed_precision=BF16)
    assert module(torch.ones(1, 4)).dtype == torch.float32
    del kept
    gc.collect()
    assert not module._forward_pre_hooks and not module._forward_hooks


def interrupt(module: nn.Module, error: type[BaseException], after: int) -> None:
    """The module's next calls but `after` of them raise `error`, once."""
    calls = itertools.count()

    def hook(*_: Any) -> None:
        if next(calls) == after:
            raise error

    module.register_forward_pre_hook(hook)


@pytest.mark.thorough
@flat_at_night
@run_on_ranks()
def test_an_interrupt_costs_a_step_and_leaves_the_parameters_in_place():
    for make, error, after in (  # torch calls hooks after an `Exception` alone
        *((Mlp, error, 0) for error in (KeyboardInterrupt, asyncio.CancelledError, ZeroDivisionError)),  # in forward
        (partial(checkpointed, False), SystemExit, 0),
        (partial(checkpointed, False), KeyboardInterrupt, 1),  # in backward, which recomputes a part
        *((partial(checkpointed, True), error, 1) for error in (KeyboardInterrupt, ZeroDivisionError)),
    ):
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
        assert all(map(same_bits, steps(model, on_data, 3), steps(reference, on_data, 3))), (make, error, after)


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
