"""Scripts for DistributedDataParallel, unchanged: ``SYNCENGINE_PATCH=1 torchrun ... train.py``."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from syncengine._C import has_cuda
from syncengine.config import MOST_RANKS
from syncengine.parallel import Parallel
from syncengine.parallel.broadcast import describe_layout
from syncengine.parallel.devices import check_buffers_on, check_device_ids, device_of
from syncengine.parallel.mixed_precision import compression
from syncengine.parallel.model import named_parameters, not_ignored
from syncengine.parallel.refusal import check_arguments, check_parameters, refuse_delayed

# Arguments that say yes or no, and of which kind they may be; the others are checked by what reads them.
_FLAGS: dict[str, tuple[type, ...]] = {
    name: (bool,) if parameter.default is not None else (bool, type(None))
    for name, parameter in inspect.signature(Parallel.__init__).parameters.items()
    if isinstance(parameter.default, bool) or name in ("broadcast_buffers", "forward_sync_buffers")
}


def refusal(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int) -> str | None:
    """Why ``Parallel(*args, **kwargs)`` can't serve what DDP may; None if it can, or if DDP does not either."""
    try:
        bound = inspect.signature(Parallel.__init__).bind(None, *args, **kwargs)
    except TypeError as error:
        return f"syncengine.Parallel does not take the same arguments: {error}"
    bound.apply_defaults()
    arguments = bound.arguments
    module = arguments["module"]
    if not isinstance(module, torch.nn.Module):
        return "it is no torch.nn.Module"
    if ranks > MOST_RANKS:
        return f"syncengine can't connect {ranks} ranks, {MOST_RANKS} at most"
    for name, value in arguments.items():
        if name in _FLAGS and not isinstance(value, _FLAGS[name]):
            return f"{name}={value!r} is no {' or '.join(kind.__name__ for kind in _FLAGS[name])}"
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    try:
        refuse_delayed(arguments["delay_all_reduce_named_params"], arguments["param_to_hook_all_reduce"])
        check_arguments(arguments["device_ids"], arguments["bucket_cap_mb"], arguments["bucket_cap_mb_list"])
        named = named_parameters(module, ignored)
        check_parameters(named)
        device = device_of(named.items())
        check_device_ids(device, arguments["device_ids"], arguments["output_device"])
        if arguments["mixed_precision"] is not None:
            compression(arguments["mixed_precision"], [*named.values()])
        buffers = not_ignored(module.named_buffers(), ignored)
        if device.type == "cuda":
            check_buffers_on(device, buffers)
        if arguments["forward_sync_buffers"] is None and arguments["broadcast_buffers"] is False:
            buffers = {}  # nothing is copied into them
        describe_layout([*named.items(), *buffers.items()])
    except Exception as error:  # of a value of another kind, say: DDP accepts it, or has an error of its own
        return str(error)
    if device.type == "cuda" and not has_cuda:
        return (
            "it is on a CUDA device, and syncengine was built without CUDA: with nvcc and a torch that has CUDA, "
            "install syncengine again"
        )
    return None
