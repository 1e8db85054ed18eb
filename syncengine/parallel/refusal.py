"""Refuses arguments and modules that ``Parallel`` does not support yet, by name: nothing is ignored."""

import math
import sys
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from syncengine.errors import InvalidUsage

_MOST_MIB = 2**43  # bytes have 64 bits


def check_arguments(device_ids: Any, bucket_cap_mb: float | None, bucket_cap_mb_list: Any) -> None:
    """Raises ``InvalidUsage`` for the first argument that can't work."""
    if device_ids is not None and len(device_ids) > 1:
        raise InvalidUsage("device_ids can only be None or contain a single element.")
    if bucket_cap_mb is not None and (not bucket_cap_mb > 0 or _MOST_MIB <= bucket_cap_mb < math.inf):
        raise InvalidUsage(f"bucket_cap_mb must be a positive number of MiB, less than 2**43, but is {bucket_cap_mb!r}")
    if bucket_cap_mb_list and not all(0 < cap < _MOST_MIB for cap in bucket_cap_mb_list):
        raise InvalidUsage(
            f"bucket_cap_mb_list must be positive numbers of MiB, less than 2**43, but is {bucket_cap_mb_list!r}"
        )


def check_looks(audit: Any, nonfinite: Any) -> None:
    """Raises ``InvalidUsage`` unless ``audit`` is a number of steps or 0, and ``nonfinite`` "raise", "warn" or None."""
    if isinstance(audit, bool) or not isinstance(audit, int) or audit < 0:
        raise InvalidUsage(
            f"audit={audit!r} is not allowed: give after how many steps to compare ranks, or 0 for never"
        )
    if nonfinite not in (None, "raise", "warn"):
        raise InvalidUsage(
            f'nonfinite={nonfinite!r} is not allowed: give "raise" or "warn", or None to look at nothing'
        )


def refuse_delayed(delay_all_reduce_named_params: Any, param_to_hook_all_reduce: Any) -> None:
    """Raises ``InvalidUsage`` if either argument is given."""
    if delay_all_reduce_named_params is not None or param_to_hook_all_reduce is not None:
        name = "param_to_hook_all_reduce" if delay_all_reduce_named_params is None else "delay_all_reduce_named_params"
        raise InvalidUsage(
            f"syncengine.Parallel does not support {name}: leave delay_all_reduce_named_params and "
            "param_to_hook_all_reduce out. These parameters are then averaged like the others, to the same values. "
            "Buckets of another size are bucket_cap_mb; parameters that you average yourself are named in the "
            "module's _ddp_params_and_buffers_to_ignore"
        )


def check_parameters(named: Mapping[str, torch.Tensor]) -> None:
    """Raises ``InvalidUsage`` for a module that can't be trained yet, naming the parameter."""
    for name, parameter in named.items():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise InvalidUsage(
                f"parameter {name} is not initialized yet. Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`. Run a dummy forward pass to correctly initialize the modules"
            )
        if parameter.layout is not torch.strided:
            refuse(f"parameter {name} with layout {parameter.layout}", "use dense parameters")
    if not any(parameter.requires_grad for parameter in named.values()):
        raise InvalidUsage(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )


def warn_of_find_unused(stacklevel: int) -> None:
    """Warns, as DDP does, that ``find_unused_parameters`` has no effect with ``static_graph``."""
    warnings.warn(
        "You passed find_unused_parameters=true to DistributedDataParallel, but a static graph finds its unused "
        "parameters by itself, in its first iteration: leave the argument out.",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def warn_of_wrapper(module: torch.nn.Module, stacklevel: int) -> None:
    """Warns if the given module is itself a wrapper; having a wrapped part does not count."""
    inner = getattr(module, "_orig_mod", module)  # what torch.compile has got
    kinds = [DataParallel, DistributedDataParallel]
    if "torch.distributed.fsdp" in sys.modules:  # slow to import
        kinds.append(sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel)
    if isinstance(inner, tuple(kinds)):
        warnings.warn(
            f"the module given to Parallel is itself a {type(inner).__name__}: both would synchronize it, gradients, "
            "buffers and no_sync() twice over, and the weights may become others than with one. If a tool wraps models "
            f"by itself, do not wrap yours; else give it the .module of that {type(inner).__name__}.",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def refuse(what: str, advice: str) -> NoReturn:
    """Raises ``InvalidUsage`` with a text that names ``what``."""
    raise InvalidUsage(f"syncengine.Parallel does not support {what} yet; {advice}")
