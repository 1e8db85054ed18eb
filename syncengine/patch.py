"""Scripts for DistributedDataParallel, unchanged: ``SYNCENGINE_PATCH=1 torchrun ... train.py``, or, which sets that,

torchrun --nproc-per-node 2 -m syncengine.patch train.py its arguments
torchrun --nproc-per-node 2 -m syncengine.patch -m package.train its arguments
"""

from __future__ import annotations

import inspect
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

import syncengine_autoload
from syncengine._C import has_cuda
from syncengine.errors import InvalidUsage
from syncengine.parallel import Parallel
from syncengine.parallel.devices import check_buffers_on, device_of
from syncengine.parallel.model import named_parameters
from syncengine.parallel.refusal import check_parameters, refuse_delayed

MOST_RANKS = 64

_USAGE = "usage: python -m syncengine.patch [-m] script.py (or, after -m, a module) and its arguments"


def refusal(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int) -> str | None:
    """Why ``Parallel(*args, **kwargs)`` can't serve what DDP may; None if it can, or if DDP does not either."""
    try:
        arguments = inspect.signature(Parallel.__init__).bind(None, *args, **kwargs).arguments
    except TypeError as error:
        return f"syncengine.Parallel does not take the same arguments: {error}"
    module = arguments["module"]
    if not isinstance(module, torch.nn.Module):
        return "it is no torch.nn.Module"
    if ranks > MOST_RANKS:
        return f"syncengine can't connect {ranks} ranks, {MOST_RANKS} at most"
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    try:
        refuse_delayed(arguments.get("delay_all_reduce_named_params"), arguments.get("param_to_hook_all_reduce"))
        named = named_parameters(module, ignored)
        check_parameters(named)
        device = device_of(named.items())
        if device.type == "cuda":
            buffers = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
            check_buffers_on(device, buffers)
    except InvalidUsage as error:
        return str(error)
    if device.type == "cuda" and not has_cuda:
        return (
            "it is on a CUDA device, and syncengine was built without CUDA: with nvcc and a torch that has CUDA, "
            "install syncengine again"
        )
    return None


def main(arguments: list[str]) -> None:
    """Runs a script or module as ``python`` does, with ``Parallel`` in DDP's place, in its child processes, too."""
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(_USAGE)
    if not as_module and not Path(arguments[0]).exists():
        sys.exit(f"syncengine.patch: there is no {arguments[0]}. {_USAGE}")
    os.environ[syncengine_autoload.VARIABLE] = "1"
    syncengine_autoload.patch()
    sys.argv = arguments
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # -m has put the working folder there
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
