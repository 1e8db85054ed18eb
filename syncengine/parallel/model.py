"""The model, as all parts of ``Parallel`` know it: its parameters, its ranks, and switches."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch.nn.parallel.distributed import _BufferCommHook

from syncengine._C import Communicator, ReducerOptions

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


@dataclass(frozen=True, eq=False)
class Model:
    """A module, and the ranks that train it. If the ranks change, a new ``Model`` is made."""

    module: torch.nn.Module
    communicator: Communicator
    device: torch.device
    names: list[str]  # the names of the parameters that are synchronized
    parameters: list[torch.nn.Parameter]
    sparse: list[bool]  # whether each one's gradient is of sparse layout

    @cached_property
    def by_id(self) -> dict[int, str]:
        """Names of the parameters, by the ``id()`` of each."""
        return dict(zip(map(id, self.parameters), self.names, strict=True))

    def __str__(self) -> str:
        """The name of the model in errors."""
        return f"Parallel({type(self.module).__name__})"


@dataclass
class Switches:
    """Switches that tools set between steps, by DDP's names. A copy keeps all but no_sync()'s and micro-batches'."""

    forward_sync_buffers: bool
    require_backward_grad_sync: bool = True  # the next forward's backward averages
    accumulates: bool = False  # in a micro-batch of micro_batches() that does not complete its step
    require_forward_param_sync: bool = True  # the last forward's backward averages: the next one syncs buffers
    forwards: float = 0  # of the wrapper so far, of whatever kind; NaN once a CUDA graph holds one
    said_past: bool = False  # that the model is trained past its wrapper
    sink_clone: bool = True  # outputs that go through the sink are copied
    buffer_hook: _BufferCommHook = field(init=False)  # once there is one

    @property
    def synchronizes(self) -> bool:
        """Whether the next forward's backward averages: not in no_sync(), nor before this rank's last micro-batch."""
        return self.require_backward_grad_sync and not self.accumulates


def looks_for_unused(options: ReducerOptions) -> bool:
    """Whether each forward looks for unused parameters: a static graph finds them once."""
    return options.find_unused_parameters and not options.static_graph


def named_parameters(module: torch.nn.Module, ignored: Container[str]) -> dict[str, torch.nn.Parameter]:
    """The parameters of ``module``, each by the first of its names that is not ``ignored``, as in DDP."""
    named: dict[str, torch.nn.Parameter] = {}
    seen: set[torch.nn.Parameter] = set()
    for prefix, submodule in module.named_modules():
        for name, parameter in submodule.named_parameters(prefix, recurse=False):
            if name not in ignored and parameter not in seen:
                seen.add(parameter)
                named[name] = parameter
    return named


def not_ignored(named: Iterable[tuple[str, _Tensor]], ignored: Container[str]) -> dict[str, _Tensor]:
    """The tensors whose names are not ``ignored``."""
    return {name: tensor for name, tensor in named if name not in ignored}
