"""What the parts of ``Parallel`` know of the whole: its attributes, and the methods that one part calls of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from syncengine._C import Communicator, Reducer
from syncengine.parallel.buckets import BucketPlanner, Plan
from syncengine.parallel.delayed import DelayedParameters
from syncengine.parallel.groups import Group
from syncengine.parallel.rounds import Round


class Model(DistributedDataParallel):
    """To be inherited from. Declares only: each method is defined by the part that it belongs to."""

    module: torch.nn.Module
    communicator: Communicator
    process_group: Group  # type: ignore[assignment] # of torch's only where there is one
    logger: Any  # logging.Logger, which is made of this
    reducer: Reducer  # type: ignore[assignment] # in the place of torch's own; if `_reduces`
    named_module_buffers: dict[str, torch.Tensor]
    output_device: int | None
    _reduces: bool
    _delayed: DelayedParameters | None
    _module_parameters: list[torch.nn.Parameter]
    _parameter_names: list[str]
    _planner: BucketPlanner
    _plan: Plan | None
    _has_rebuilt_buckets: bool
    _number: int | None  # that the ranks gave this model when it was wrapped, for its copies
    _join_is_over: bool  # by an error that all ranks have raised
    _comm_hooks: list[tuple[Any, Any]]  # hook and state
    _backward_steps: list[Callable[[torch.nn.Parameter], Any]]  # of optimizers that step in backward
    _looked_for_optimizers: bool

    # wrapper.py
    _build_reducer: Callable[[], None]
    _make_reducer: Callable[[], None]
    _set_planner: Callable[[bool], None]
    _named_state: Callable[[bool], list[tuple[str, torch.Tensor]]]
    _sync_buffers: Callable[..., None]  # (root: int = 0)
    # planning.py
    _plan_buckets: Callable[[Round | None], None]
    # comm_hooks.py
    _has_averaged: Callable[[], bool]
    # uneven.py
    _set_average: Callable[[Round], None]
    _is_inside_step: Callable[[], bool]
    _sync_final_model: Callable[[bool], None]
    # torch's, which has no annotations there
    _log_and_throw: Callable[[type[Exception], str], NoReturn]
    _assign_modules_buffers: Callable[[], None]
    _check_sync_bufs_post_fwd: Callable[[], bool]
    _check_sync_bufs_pre_fwd: Callable[[], bool]
