"""What the parts of ``Parallel`` know of the model that they belong to."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch.nn.parallel.distributed import _BufferCommHook

from syncengine._C import Communicator, ReducerOptions
from syncengine.parallel.buckets import sparse_parameters


@dataclass(frozen=True, eq=False)
class Model:
    """A module, and the ranks that train it. Made anew for other ranks."""

    module: torch.nn.Module
    communicator: Communicator
    device: torch.device
    names: list[str]  # of the parameters that are synchronized
    parameters: list[torch.nn.Parameter]
    sparse: list[bool]  # of each: its gradient is of sparse layout

    @classmethod
    def of(
        cls, module: torch.nn.Module, communicator: Communicator, device: torch.device, ignored: Container[str]
    ) -> Model:
        """That of all parameters but those that are ``ignored``."""
        named = named_to_synchronize(module, ignored)
        parameters = [parameter for _, parameter in named]
        sparse = sparse_parameters(module, parameters)
        return cls(module, communicator, device, [name for name, _ in named], parameters, sparse)

    def __str__(self) -> str:
        """As errors call it."""
        return f"Parallel({type(self.module).__name__})"


@dataclass
class Switches:
    """What tools switch between steps, by DDP's names; a copy of the model has the same."""

    forward_sync_buffers: bool
    require_backward_grad_sync: bool = True  # the next forward's backward averages
    require_forward_param_sync: bool = True  # so did that of the last forward: the next one synchronizes buffers
    sink_clone: bool = True  # outputs that go through the sink are copied
    buffer_hook: _BufferCommHook = field(init=False)  # once there is one


def looks_for_unused(options: ReducerOptions) -> bool:
    """Whether each forward does: a static graph finds its unused parameters once."""
    return options.find_unused_parameters and not options.static_graph


def named_to_synchronize(module: torch.nn.Module, ignored: Container[str]) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that are not ``ignored``."""
    return [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
