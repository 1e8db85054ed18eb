"""torch.compile outside and inside the wrapper: the module is compiled, the wrapper's own code runs as it is.

Dynamo would trace all Python code that a compiled call reaches. The wrapper's work is done in C++ and in collectives,
so tracing it would gain nothing, and cost a graph break at each of them. So forward turns dynamo off for itself,
and on again for the module.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

# torch.compiler.disable() is not used: it would import all of dynamo, for seconds, even where nothing is compiled.
_eval_frame = torch._C._dynamo.eval_frame


class _Thread(threading.local):
    """The state by which each thread turns dynamo on again for the module, and knows whose forward it runs."""

    callback: Any = None  # dynamo's, in the code that called the wrapper: None outside of torch.compile
    active: DistributedDataParallel | None = None  # the Parallel whose forward runs


_thread = _Thread()


def not_traced(function: Any) -> Any:
    """Marks a function so that dynamo does not trace it, but does trace what it calls."""
    skip = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)
    _eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


def not_compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function: dynamo traces neither it nor what it calls, except for the module in ``call_module``."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        outer = _thread.callback
        _thread.callback = _eval_frame.set_eval_frame(None)
        try:
            return forward(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(_thread.callback)
            _thread.callback = outer

    marked: Any = not_traced(run)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "syncengine.Parallel.forward runs as it is; its module is compiled"
    return run


def is_active(wrapper: DistributedDataParallel) -> bool:
    """Whether this thread is in the wrapper's module, called by its forward."""
    return _thread.active is wrapper


def call_module(wrapper: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the wrapped module, compiled if the wrapper is called in compiled code.

    Dynamo's DDPOptimizer takes the wrapper for DDP, and cuts the graph so that gradients come while backward runs.
    """
    active, around = _thread.active, DistributedDataParallel._active_ddp_module
    if around is None or hasattr(around, "_reduces"):
        # torch keeps the active DDP in one attribute for all threads: a Parallel in it may be another thread's, and
        # would stay for ever if this thread put it back at the end. So this thread puts back its own, or None.
        around = active
    if wrapper.reducer.reduces:
        _thread.active = DistributedDataParallel._active_ddp_module = wrapper
    _eval_frame.set_eval_frame(_thread.callback)
    try:
        return wrapper.module(*inputs, **kwargs)
    finally:
        _eval_frame.set_eval_frame(None)
        _thread.active, DistributedDataParallel._active_ddp_module = active, around
