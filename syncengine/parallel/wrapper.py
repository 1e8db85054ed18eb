"""``Parallel``: a drop-in for ``torch.nn.parallel.DistributedDataParallel``."""

import copy
import gc
import math
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs

from syncengine._C import Communicator, ReducerOptions
from syncengine.communicator import shrink
from syncengine.errors import InvalidUsage
from syncengine.parallel.audit import Audit
from syncengine.parallel.broadcast import broadcast_named, describe_layout
from syncengine.parallel.buckets import sparse_parameters
from syncengine.parallel.buffers import Buffers, choose_buffer_sync, named_state
from syncengine.parallel.compiled import call_module, is_active, not_compiled
from syncengine.parallel.devices import check_buffers_on, check_device_ids, device_of
from syncengine.parallel.groups import (
    Group,
    check_group,
    is_torchs_default,
    localize_parameters,
    resolve_copy,
    resolve_group,
    with_group,
)
from syncengine.parallel.logging import Logger
from syncengine.parallel.mixed_precision import MixedPrecision, part_from_others
from syncengine.parallel.model import Model, Switches, named_parameters, not_ignored
from syncengine.parallel.newcomers import Newcomers
from syncengine.parallel.open_step import Step, drop_open_step
from syncengine.parallel.optimizers import APPLIED_IN_BACKWARD, BackwardOptimizers
from syncengine.parallel.past_wrapper import follow_steps
from syncengine.parallel.planning import Planning
from syncengine.parallel.reducer import ModelReducer, NoReducer
from syncengine.parallel.refusal import (
    check_arguments,
    check_looks,
    check_parameters,
    refuse_delayed,
    warn_of_find_unused,
    warn_of_wrapper,
)
from syncengine.parallel.replication import check_same_on_all_ranks
from syncengine.parallel.steps import Steps
from syncengine.parallel.summary import follow
from syncengine.parallel.sync_batch_norm import adopt_sync_batch_norm, check_exchange
from syncengine.parallel.tools import ForTools
from syncengine.parallel.uneven import UnevenInputs
from syncengine.parallel.watchers import common, forward_watchers, model_numbers, models
from syncengine_autoload import SERVED_BY

# Attributes that are made anew for a copy of the wrapper.
_PARTS = {"reducer", "_model", "_planning", "_buffer_sync", "_uneven", "_steps"}
_PARTS |= {"process_group", "communicator", "logger", "_optimizers", SERVED_BY}


class Parallel(ForTools):
    """Trains ``module`` data-parallel: each backward averages the gradients over all ranks while it still runs.

    The arguments, attributes and errors are those of ``DistributedDataParallel``; unsupported ones are refused by name.
    ``Parallel`` is a subclass of it only for tools that check by ``isinstance``: none of DDP's machinery runs.

    ``process_group`` takes a torch process group or a ``syncengine.Communicator`` (say, from ``Communicator.split``);
    ``None`` is the default communicator, initialized if need be. The attribute ``communicator`` is the communicator
    over which gradients are averaged, and ``process_group`` has the value that tools expect: torch's group of these
    ranks if there is one, else the communicator. One rank alone calls the module directly.

    ``audit``: before one in that many synchronized forwards the parameters of all ranks are compared, bit by bit; 0 is
    never. ``Mismatch`` then names the parameter and the rank that differs. Nothing is compared in a join context.

    ``nonfinite``: where a gradient is NaN or infinite, "raise" raises ``NotFinite`` from backward on all ranks, and
    "warn" warns on them: which rank has brought it, into which parameter, in which synchronized backward, from 1. The
    default, None, looks at nothing.

    Raises ``InvalidUsage`` for an argument that can't work, and ``Mismatch``, naming the parameter and both sides, if
    the ranks' models differ.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Group | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        audit: int = 0,
        nonfinite: Literal["raise", "warn"] | None = None,
    ) -> None:
        check_group(process_group)
        check_arguments(device_ids, bucket_cap_mb, bucket_cap_mb_list)
        check_looks(audit, nonfinite)
        refuse_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using "
                "it.",
                FutureWarning,
                stacklevel=2,
            )
        if static_graph and find_unused_parameters:
            warn_of_find_unused(stacklevel=2)
        warn_of_wrapper(module, stacklevel=2)
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        self.module = module
        self.communicator, self.process_group = resolve_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            localize_parameters(module, device_mesh)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = named_parameters(module, self.parameters_to_ignore)
        check_parameters(named)
        self.device = device_of(named.items())
        self.device_type = self.device.type
        self.device_ids, self.output_device = check_device_ids(self.device, device_ids, output_device)
        if self.device_type == "cpu":  # torch's own works on CUDA, over its process group
            adopt_sync_batch_norm(module)
        elif self.communicator.size > 1:
            check_exchange(module, self.device)

        self.dim = dim
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self._precision = None
        part_from_others(module)
        if mixed_precision is not None:
            self._precision = MixedPrecision(mixed_precision, module)
            self._precision.go_with(self)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.find_unused_parameters = find_unused_parameters
        self._caps = bucket_cap_mb, bucket_cap_mb_list
        self._audit_every, self._nonfinite = audit, nonfinite
        sync_buffers, sync_initial_buffers = choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self._switches = Switches(sync_buffers)
        self._optimizers = BackwardOptimizers()
        self.logger = Logger(self)
        self._delay_all_reduce_params = []
        self._begun_steps, self._left_steps = {}, {}
        drop_open_step()  # of a model that this may take the place of
        self._compose()
        if init_sync and self.communicator.size > 1:
            self._replicate(sync_initial_buffers)
        if self._precision is not None:
            self._precision.casts = True  # last: the module of a wrapper that was not made casts nothing

    def _reducer_options(self) -> ReducerOptions:
        """The options of the reducer. A subclass, for tests or benchmarks, may set more."""
        options = ReducerOptions()
        options.find_unused_parameters = self.find_unused_parameters
        options.static_graph = self.static_graph
        options.skip_all_reduce_unused_params = self.skip_all_reduce_unused_params
        options.gradient_as_bucket_view = self.gradient_as_bucket_view
        options.batched_grad_copy = self.batched_grad_copy
        options.nonfinite = self._nonfinite or ""
        options.waits_in_between = any(isinstance(m, torch.nn.SyncBatchNorm) for m in self.module.modules())
        return options

    def _compose(self, hooks: Sequence[tuple[Any, Any]] = (), number: int | None = None) -> None:
        """Makes the parts for the present group of ranks, with these communication hooks. ``number``: see Planning."""
        drop_open_step(self)
        models[next(model_numbers)] = self
        if not hooks and self._precision is not None and self._precision.compress is not None:
            hooks = [(self._precision.compress, None)]
        named = named_parameters(self.module, self.parameters_to_ignore)
        parameters = list(named.values())
        sparse = sparse_parameters(self.module, parameters)
        self._model = model = Model(self.module, self.communicator, self.device, list(named), parameters, sparse)
        if model.parameters and self.device_type == "cuda":
            check_buffers_on(self.device, not_ignored(self.module.named_buffers(), self.parameters_to_ignore))
        options = self._reducer_options()
        if hooks or (model.parameters and (self.communicator.size > 1 or self._nonfinite)):
            reducer = ModelReducer(model, options, self)
            follow(model, reducer.step_times())
            follow_steps()
        else:
            reducer = cast(ModelReducer, NoReducer())
        self.reducer = self._optimizers.reducer = reducer
        self._planning = planning = Planning(model, reducer, options, self._caps, number)
        self._buffer_sync = buffers = Buffers(model, self._switches, reducer, self.parameters_to_ignore)
        self._uneven = UnevenInputs(model, self._switches, reducer, buffers)
        new = Newcomers(model, self.parameters_to_ignore)
        audit = Audit(model, self._audit_every)
        self._steps = Steps(model, self._switches, reducer, planning, buffers, self._uneven, new, audit, self.logger)
        for hook, state in hooks:
            self._install_hook(state, hook)

    def shrink(self, patience: float = 30.0) -> None:
        """Goes on, after a failure, with the ranks that are left, in a new ``communicator``.

        All ranks that are left call it. The weights stay as they are on each rank, and so do ``.grad`` and buffers, of
        which some may be further than others: ``syncengine.elastic`` brings them together. A step of ``micro_batches``
        that is open is dropped, with its gradients. Hooks stay in use, buckets are planned anew. Two models of one
        communicator get the same new one. ``patience`` and errors are as for ``syncengine.shrink``.
        """
        self._move_to(shrink(self.communicator, patience))

    def _move_to(self, communicator: Communicator) -> None:
        self.communicator, self.process_group = with_group(communicator)
        self._switches.require_backward_grad_sync = self._switches.require_forward_param_sync = True
        self._compose(hooks=self._comm_hooks)
        if self._reduces:
            self._planning.number = self._planning.reserve_slots()

    def _replicate(self, with_buffers: bool) -> None:
        """Checks that all ranks have the same model, and gives them rank 0's values."""
        named = named_state(self._model, self._buffer_sync if with_buffers else None)
        cap, caps = self._caps
        settings = (
            f"find_unused_parameters={self.find_unused_parameters}, bucket_cap_mb={cap}, "
            f"forward_sync_buffers={self.forward_sync_buffers}, bucket_cap_mb_list={caps}, "
            f"static_graph={self.static_graph}, gradient_as_bucket_view={self.gradient_as_bucket_view}, "
            f"batched_grad_copy={self.batched_grad_copy}, "
            f"skip_all_reduce_unused_params={self.skip_all_reduce_unused_params}, device_type={self.device_type}, "
            f"mixed_precision={self.mixed_precision}, audit={self._audit_every}, "
            f"nonfinite={self._nonfinite}"
        )
        if any(tensor in common for _, tensor in named):
            gc.collect()  # perhaps on some ranks alone an optimizer is there that is gone, in a cycle
        try:
            lines = [settings, *describe_layout(named, _details)]
        except InvalidUsage as error:  # on all ranks, if they have the same model
            check_same_on_all_ranks(self.communicator, f"{self._model} differs", [str(error)])
            raise
        private = [(name, tensor) for name, tensor in named if tensor not in common]  # the others are the same
        broadcast_named(self.communicator, f"{self._model} differs", private, self.device, 0, lines)
        if self._reduces:
            self._planning.number = self._planning.reserve_slots()

    def __getstate__(self) -> dict[str, Any]:
        of_torchs_default = is_torchs_default(self.communicator)
        if of_torchs_default is None:
            raise InvalidUsage(
                "Parallel can only be pickled with the default communicator, or that of torch's default process group: "
                "the copy would not know which one to use. Save model.module.state_dict() instead"
            )
        if any(hook is not getattr(self._precision, "compress", None) for hook, _ in self._comm_hooks):
            warnings.warn(
                "the copy of a Parallel has no communication hook: register it again", UserWarning, stacklevel=2
            )
        state = torch.nn.Module.__getstate__(self)  # without what compile() has made, which calls the original
        kept = {name: value for name, value in state.items() if name not in _PARTS}
        made_anew = {"_number": self._planning.number, "_of_torchs_default": of_torchs_default}
        switches = copy.copy(self._switches)
        # The copy is outside of no_sync() and micro-batches, which would end for the original alone.
        switches.require_backward_grad_sync, switches.accumulates, switches.said_past = True, False, False
        return {**kept, "_switches": switches, **made_anew}

    def __setstate__(self, state: dict[str, Any]) -> None:
        number, of_torchs_default = state.pop("_number"), state.pop("_of_torchs_default")
        torch.nn.Module.__setstate__(self, state)
        self.communicator, self.process_group = resolve_copy(of_torchs_default)
        self.logger = Logger(self)
        if self._precision is not None:
            self._precision.go_with(self)
            self._precision.casts = True
        self._optimizers = BackwardOptimizers()
        self._compose(number=number)

    @not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module; whether its backward will synchronize is decided here, as in DDP."""
        if torch.autograd._profiler_enabled():
            with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):  # what tools look for
                return self._run_forward(inputs, kwargs)
        return self._run_forward(inputs, kwargs)

    def _run_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._switches.forwards += 1
        if self.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._switches.forwards = math.nan
        if APPLIED_IN_BACKWARD in sys.modules:
            self._optimizers.adopt(self._model.parameters)
        if Step.now is not None:
            Step.now.before_forward(self)
        for watcher in forward_watchers:
            watcher(self)
        if self.device_ids and (inputs or kwargs):
            (inputs,), (kwargs,) = _to_kwargs(inputs, kwargs, self.device, False)
        if self._precision is None:
            call = partial(call_module, self, inputs, kwargs)
        else:
            # Inputs and keyword arguments are cast as two objects, since a keyword may be called `dtype`.
            (inputs, kwargs), _ = _cast_forward_inputs(self._precision.dtype, inputs, kwargs)
            call = partial(self._precision.around, partial(call_module, self, inputs, kwargs))
        if self.reducer.reduces:
            return self._steps.forward(call, self)
        if torch.is_grad_enabled():
            self.reducer.begin_forward(self._switches.synchronizes)
        return call()

    def weight(self, n: float) -> None:
        """Gives this rank's gradients the weight ``n`` in the next average: ``sum(n * gradient) / sum(n)``.

        Call it before the forward, on every rank, usually with the number of samples (or tokens) over which this rank's
        loss is a mean; then the average is the gradient of the mean over all samples. It applies to one synchronized
        forward and its backward. A rank with 0 contributes nothing, whatever its gradients are (say, NaN from an empty
        batch). Where several backwards are accumulated under ``no_sync``, ``n`` is for their sum.

        Raises ``InvalidUsage`` unless 0 <= n < inf, and within a forward. If all ranks give 0, the forward raises it.
        """
        try:
            weight = float(n)
        except (TypeError, ValueError, OverflowError):
            weight = math.nan
        if not 0.0 <= weight < math.inf:
            raise InvalidUsage(f"weight({n!r}): give a finite number of at least 0, such as the number of samples")
        if is_active(self):
            raise InvalidUsage(
                f"weight({n!r}) was called within the forward of {self._model}, where other ranks do not expect it: "
                "call it before the forward, on every rank"
            )
        if self._reduces:
            self._uneven.count(weight, in_join=self._join_config.enable)


def _details(tensor: torch.Tensor) -> str:
    """The facts of a parameter, besides shape and dtype, that must be the same on all ranks; of a buffer none."""
    if not isinstance(tensor, torch.nn.Parameter):
        return ""
    shared = ", shared by a ShardedOptimizer" if tensor in common else ""
    return f" strides {tensor.stride()}{', trained' if tensor.requires_grad else ''}{shared}"
