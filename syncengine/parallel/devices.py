"""Finds the device of a module, a CPU or a CUDA device, and refuses what can't be done there."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._utils import _get_device_index

from syncengine.errors import InvalidUsage


def device_of(named: Iterable[tuple[str, torch.Tensor]]) -> torch.device:
    """The CPU or CUDA device of these parameters; CPU if none. Raises ``InvalidUsage`` naming one on another device."""
    first = None
    for name, parameter in named:
        if parameter.device.type not in ("cpu", "cuda"):
            raise InvalidUsage(
                f"syncengine.Parallel does not support parameter {name} on {parameter.device}; move the module to the "
                "CPU or to a CUDA device before wrapping it"
            )
        first = first or (name, parameter.device)
        if parameter.device != first[1]:
            raise InvalidUsage(
                f"syncengine.Parallel does not support modules on several devices: parameter {first[0]} is on "
                f"{first[1]}, {name} on {parameter.device}; move the module to one device before wrapping it"
            )
    return torch.device("cpu") if first is None else first[1]


def check_device_ids(
    device: torch.device, device_ids: Sequence[Any] | None, output_device: Any
) -> tuple[list[int] | None, int | None]:
    """DDP's attributes ``device_ids`` and ``output_device``. Raises ``InvalidUsage`` if they name another device."""
    if device.type == "cpu" and (device_ids or output_device is not None):
        raise InvalidUsage(
            "DistributedDataParallel device_ids and output_device arguments only work with GPU modules, but got "
            f"device_ids {device_ids}, output_device {output_device} for a module on the CPU: leave both out"
        )
    if not device_ids:
        if output_device is not None:
            raise InvalidUsage(f"output_device {output_device} needs device_ids: leave it out, or give both")
        return None, None
    output_device = device_ids[0] if output_device is None else output_device
    index, output = (_get_device_index(x, True) for x in (device_ids[0], output_device))
    for name, value in (("device_ids", index), ("output_device", output)):
        if value != device.index:
            raise InvalidUsage(f"{name} says device {value}, but the module is on {device}: move it there before")
    return [index], output


def check_buffers_on(device: torch.device, buffers: Mapping[str, torch.Tensor]) -> None:
    """Raises ``InvalidUsage``, naming the buffer, if one lies on another device."""
    for name, buffer in buffers.items():
        if buffer.device != device:
            raise InvalidUsage(
                f"syncengine.Parallel can't synchronize buffer {name} on {buffer.device} of a module on {device}; move "
                "it there, or name it in the module's _ddp_params_and_buffers_to_ignore"
            )
