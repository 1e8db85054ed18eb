"""``mixed_precision`` and Ctrl-C, or whatever else is no ``Exception``: casts do not stay in the module."""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from typing import Any

import pytest
import torch
from models.workload import same_bits
from parallel_models import Mlp
from pool import run_on_ranks
from test_mixed_precision import BF16, Checkpointed, data, on_data, steps
from torch import nn

import syncengine


class Interrupt:
    """Raises ``error`` in the module's next calls but ``after`` of them, once."""

    def __init__(self, module: nn.Module, error: type[BaseException], after: int) -> None:
        self.error, self.left = error, after
        self.handle = module.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left < 0:
            self.handle.remove()
            raise self.error


def interrupted_step(model: nn.Module, error: type[BaseException], after: int) -> None:
    """Where torch does not call hooks: it does so for ``Exception`` alone."""
    before = dict(model.named_parameters())
    Interrupt(model.module.layers[3], error, after)
    with pytest.raises(error):
        on_data(model, 9, syncengine.rank(), None).square().sum().backward()
    assert all(value is before[name] for name, value in model.named_parameters())
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    model.zero_grad()


INTERRUPTIONS = [
    (Mlp, KeyboardInterrupt, 0),  # in forward
    (Mlp, asyncio.CancelledError, 0),
    (partial(Checkpointed, False), SystemExit, 0),
    (partial(Checkpointed, False), KeyboardInterrupt, 1),  # in backward, which recomputes a part
    (partial(Checkpointed, True), KeyboardInterrupt, 1),
    (partial(Checkpointed, True), ZeroDivisionError, 1),
]


@pytest.mark.thorough
@run_on_ranks()
def test_an_interrupt_costs_a_step_and_leaves_the_parameters_in_place():
    for make, error, after in INTERRUPTIONS:
        torch.manual_seed(0)
        model = syncengine.Parallel(make(), mixed_precision=BF16)
        reference = syncengine.Parallel(copy.deepcopy(model.module), mixed_precision=BF16)
        interrupted_step(model, error, after)
        results = steps(model, on_data, 3)
        assert all(map(same_bits, results, steps(reference, on_data, 3))), (make, error, after)


@pytest.mark.thorough
@run_on_ranks()
def test_after_an_interrupt_past_the_wrapper_its_next_forward_casts_anew():
    model = syncengine.Parallel(Mlp(), mixed_precision=BF16)
    reference = syncengine.Parallel(copy.deepcopy(model.module), mixed_precision=BF16)
    weights = [*model.parameters(), *reference.parameters()]
    Interrupt(model.module.layers[3], KeyboardInterrupt, 0)
    with pytest.raises(KeyboardInterrupt):
        model.module(data(0, 0).bfloat16())
    with torch.no_grad():
        torch._foreach_mul_(weights, 2)
    assert torch.equal(model(data(0, 0)), reference(data(0, 0)))
    assert all(map(same_bits, steps(model, on_data, 3), steps(reference, on_data, 3)))
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
