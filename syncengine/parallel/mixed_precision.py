"""DDP's ``mixed_precision``: forward and backward in a smaller dtype, parameters, ``.grad`` and optimizer in their own.

DDP replaces the memory of each parameter, from forward until some point in backward. Here parameters do not change:
modules see casts of them while they are called, and autograd carries gradients back through the casts. So accumulated
gradients keep their dtype, a forward without a backward has no effect, and it works on CPUs.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.hooks import RemovableHandle

from syncengine.errors import InvalidUsage
from syncengine.hooks import Compress


class MixedPrecision:
    """Applies the settings to one module. Raises ``InvalidUsage``, before anything is changed, if they can't be met."""

    def __init__(self, settings: _MixedPrecision, module: nn.Module) -> None:
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self._ignored = {tensor for name, tensor in named if name in ignored}
        self.compress = compression(settings, filter(self._takes_part, module.parameters()))
        self.dtype: torch.dtype | None = settings.param_dtype
        self.casts = False  # the wrapper says when
        self._handles: list[RemovableHandle] = []
        self._calls: list[nn.Module] = []  # of modules, the outermost first
        self._hidden: list[tuple[dict[str, Any], str, nn.Parameter]] = []  # behind casts during the outermost call
        for buffer in module.buffers():
            if settings.buffer_dtype is not None and self._takes_part(buffer):
                buffer.data = buffer.to(settings.buffer_dtype)
        if self.dtype is not None:
            for submodule in module.modules():
                self._handles.append(submodule.register_forward_pre_hook(self._enter, prepend=True))
                self._handles.append(submodule.register_forward_hook(self._leave, always_call=True))

    def go_with(self, wrapper: nn.Module) -> None:
        """Removes the module's hooks when ``wrapper`` is gone. Call it for a copy, too, whose hooks are its own."""
        weakref.finalize(wrapper, self._remove_hooks).atexit = False

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "casts": False}

    def around(self, call: Callable[[], Any]) -> Any:
        """Runs the wrapper's ``call`` of the module. However it ends, the parameters are back in place."""
        self._put_back()  # after a call past the wrapper that Ctrl-C has ended, which torch does not tell to _leave
        try:
            return call()
        finally:
            self._put_back()

    def _takes_part(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor not in self._ignored

    # Casts hide parameters during the outermost call: the wrapper's, or that of a module that a checkpoint recomputes.
    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if not self.casts:
            return
        self._calls.append(module)
        if len(self._calls) == 1:
            if torch._C._current_graph_task_id() >= 0:  # recomputed in backward
                torch.autograd.Variable._execution_engine.queue_callback(_AtEnd(partial(self._put_back, self._calls)))
            self._hide_behind_casts(module)

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if not self._calls or self._calls[-1] is not module:
            return  # a hook before _enter has raised
        if len(self._calls) == 1:
            self._put_back()
        else:
            self._calls.pop()

    def _put_back(self, of: list[nn.Module] | None = None) -> None:
        """Puts the parameters back; with ``of``, the calls of a recomputation, only if it has not ended already."""
        if of is not None and of is not self._calls:
            return
        for parameters, name, parameter in self._hidden:
            parameters[name] = parameter
        self._hidden.clear()
        if self._calls:
            _renew_flat_weights(self._calls[0])
            self._calls = []

    def _hide_behind_casts(self, module: nn.Module) -> None:
        casts: dict[int, torch.Tensor] = {}  # a shared parameter has one, which adds up its gradients
        for submodule in module.modules():
            parameters: dict[str, Any] = submodule._parameters
            for name, parameter in parameters.items():
                if parameter is None or parameter.dtype == self.dtype or not self._takes_part(parameter):
                    continue
                if id(parameter) not in casts:
                    casts[id(parameter)] = parameter.to(self.dtype)
                self._hidden.append((parameters, name, parameter))
                parameters[name] = casts[id(parameter)]
        _renew_flat_weights(module)


def part_from_others(module: nn.Module) -> None:
    """Frees an earlier wrapper that only a cycle holds, perhaps on this rank alone: its hooks would still cast."""
    hooks = (hook for submodule in module.modules() for hook in submodule._forward_pre_hooks.values())
    if any(isinstance(getattr(hook, "__self__", None), MixedPrecision) for hook in hooks):
        gc.collect()


class _AtEnd:
    """A callback that makes its call when the graph task drops it, so also if an error has ended the task."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        """Does nothing: ``__del__`` makes the call."""

    def __del__(self) -> None:
        self._call()


def _renew_flat_weights(module: nn.Module) -> None:
    for submodule in module.modules():
        if isinstance(submodule, nn.RNNBase):  # keeps its parameters in a list as well
            submodule._flat_weights = [getattr(submodule, name, None) for name in submodule._flat_weights_names]


def compression(settings: Any, parameters: Iterable[nn.Parameter]) -> Compress | None:
    """The compressing hook for gradients, if they need one. Raises ``InvalidUsage`` for settings that can't be met."""
    if not isinstance(settings, _MixedPrecision):
        raise InvalidUsage(
            f"mixed_precision={settings!r} is not a torch.nn.parallel.distributed._MixedPrecision: that, or None"
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(settings, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InvalidUsage(f"mixed_precision: {name}={dtype!r} is not a floating-point dtype")
    dtype = settings.reduce_dtype or settings.param_dtype
    own = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if dtype is None or own <= {dtype}:
        return None
    if dtype not in (torch.float16, torch.bfloat16):
        raise InvalidUsage(
            f"mixed_precision: gradients of {', '.join(sorted(map(str, own)))} can't be reduced in {dtype}: "
            "give reduce_dtype torch.float16, torch.bfloat16 or the parameters' own dtype (16-bit gradients are added "
            "in float32 anyway)"
        )
    return Compress("mixed_precision", dtype, divides_first=False)
