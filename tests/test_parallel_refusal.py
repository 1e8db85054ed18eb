"""What Parallel does not support is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankPool, run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import syncengine
from syncengine.errors import InvalidUsage

REFUSED_ARGUMENTS: dict[str, Any] = {
    "mixed_precision": object(),
    "device_mesh": object(),
    "delay_all_reduce_named_params": [],
    "param_to_hook_all_reduce": torch.zeros(1),
    "bucket_cap_mb_list": [1, 0],
    "bucket_cap_mb": 0,
    "device_ids": [0],
    "output_device": 0,
    "process_group": object(),
}


def refused_arguments() -> None:
    for name, value in REFUSED_ARGUMENTS.items():
        with pytest.raises(InvalidUsage, match=name):
            syncengine.Parallel(nn.Linear(1, 1), **{name: value})


REFUSED_MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.LazyLinear(3), "weight is not initialized"),
    "frozen": (lambda: nn.Linear(1, 1).requires_grad_(False), "doesn't have any parameter that requires a gradient"),
    "meta": (lambda: nn.Linear(1, 1, device="meta"), "weight on meta"),
}


def refused_modules() -> None:
    for make, text in REFUSED_MODULES.values():
        with pytest.raises(InvalidUsage, match=text):
            syncengine.Parallel(make())


def refused_methods() -> None:
    model = syncengine.Parallel(nn.Linear(1, 1))
    for name in ("_set_sparse_metadata",):
        with pytest.raises(InvalidUsage, match=f"{name}.*not support|not support.*{name}"):
            getattr(model, name)()


@pytest.mark.parametrize("check", [refused_arguments, refused_modules, refused_methods])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_not_supported_is_refused_by_name(pool: RankPool, check: Callable[[], None], world: int):
    pool.run(check, world=world)


@run_on_ranks(gloo=True)
def test_ddp_has_no_mixed_precision_on_cpu_either():
    """Should torch learn it, this is to be offered."""
    model = DistributedDataParallel(nn.Linear(1, 1), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="cpu backend doesn't support events"):
        model(torch.ones(1, 1))
