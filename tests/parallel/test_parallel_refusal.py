"""What Parallel does not support is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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


def refused_sizes() -> None:
    for name, value in (("bucket_cap_mb_list", [1, 1e30]), ("bucket_cap_mb", 2.0**43)):
        with pytest.raises(InvalidUsage, match=rf"{name} must be .*less than 2\*\*43"):
            syncengine.Parallel(nn.Linear(1, 1), **{name: value})


def refused_methods() -> None:
    model = syncengine.Parallel(nn.Linear(1, 1))
    with pytest.raises(InvalidUsage, match="_set_sparse_metadata.*not support|not support.*_set_sparse_metadata"):
        model._set_sparse_metadata()


class On(nn.Module):
    """Its parameters and its buffer say that they lie on these devices, which need not be there."""

    def __init__(self, *devices: str, buffer: str | None = None) -> None:
        super().__init__()
        with FakeTensorMode():
            for i, device in enumerate(devices):
                setattr(self, f"p{i}", nn.Parameter(torch.empty(2, 2, device=device)))
            self.register_buffer("statistics", torch.empty(2, device=buffer or devices[0]))

    def forward(self, x: Any) -> Any:
        return x


REFUSED_ON_CUDA: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "mixed": (lambda: On("cuda:1", "cpu"), {}, "several devices: parameter p0 is on cuda:1, p1 on cpu"),
    "two": (lambda: On("cuda:1", "cuda:0"), {}, "several devices: parameter p0 is on cuda:1, p1 on cuda:0"),
    "other": (lambda: On("xpu"), {}, "parameter p0 on xpu"),
    "ids": (lambda: On("cuda:1"), {"device_ids": [0]}, "device_ids says device 0, but the module is on cuda:1"),
    "output": (lambda: On("cuda:1"), {"device_ids": [1], "output_device": 0}, "output_device says device 0"),
    "output alone": (lambda: On("cuda:1"), {"output_device": 1}, "output_device 1 needs device_ids"),
    "buffer": (lambda: On("cuda:1", buffer="cpu"), {}, "buffer statistics on cpu of a module on cuda:1"),
}


def refused_on_cuda() -> None:
    for make, arguments, text in REFUSED_ON_CUDA.values():
        with pytest.raises(InvalidUsage, match=text):
            syncengine.Parallel(make(), **arguments)
    if syncengine.world_size() == 1:
        model = syncengine.Parallel(On("cuda:1"), device_ids=[1])
        assert (model.device_ids, model.output_device, model.device) == ([1], 1, torch.device("cuda:1"))
    if not torch.cuda.is_available():
        with pytest.raises(InvalidUsage, match="no CUDA side|no driver|no device"):
            model = syncengine.Parallel(On("cuda:1"))
            model.register_comm_hook(None, syncengine.hooks.bf16_compress)  # one rank has no reducer without a hook


@pytest.mark.parametrize("check", [refused_arguments, refused_sizes, refused_modules, refused_methods, refused_on_cuda])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_not_supported_is_refused_by_name(pool: RankPool, check: Callable[[], None], world: int):
    pool.run(check, world=world)
