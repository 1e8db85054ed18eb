"""``Parallel``: a drop-in for ``torch.nn.parallel.DistributedDataParallel``."""

import warnings
from typing import Any, cast

import torch
from torch.distributed.algorithms.join import Joinable
from torch.utils.checkpoint import _StopRecomputationError

from syncengine._C import Reducer
from syncengine.communicator import default_communicator
from syncengine.errors import InvalidUsage
from syncengine.parallel.broadcast import TensorBroadcast, describe_layout
from syncengine.parallel.buckets import DDP_CAP, BucketPlanner, Plan, sparse_parameters
from syncengine.parallel.buffers import Buffers
from syncengine.parallel.comm_hooks import CommHooks
from syncengine.parallel.compiled import call_module, not_compiled
from syncengine.parallel.delayed import DelayedParameters, check_delayed
from syncengine.parallel.devices import (
    check_buffers_on,
    check_device_ids,
    check_not_capturing,
    device_of,
    move_inputs,
)
from syncengine.parallel.groups import Group, check_group, localize_parameters, resolve_group
from syncengine.parallel.logging import Logger
from syncengine.parallel.mixed_precision import MixedPrecision
from syncengine.parallel.optimizers import adopt_optimizers
from syncengine.parallel.outputs import tensors_in, through_sink
from syncengine.parallel.planning import PlansBuckets
from syncengine.parallel.reducer import ModelReducer, NoReducer
from syncengine.parallel.refusal import (
    check_arguments,
    check_module,
    refuse_methods,
    warn_of_find_unused,
    warn_of_wrapper,
)
from syncengine.parallel.replication import check_not_replaced, check_same_on_all_ranks
from syncengine.parallel.sync_batch_norm import adopt_sync_batch_norm
from syncengine.parallel.tools import ForTools
from syncengine.parallel.tuning import Tuner
from syncengine.parallel.uneven import UnevenData
from syncengine.parallel.watchers import common, forward_watchers, register


@refuse_methods
class Parallel(CommHooks, PlansBuckets, UnevenData, ForTools):
    """Trains ``module`` data-parallel: each backward averages the gradients over all ranks while it still runs.

    The arguments, attributes and errors are those of ``DistributedDataParallel``; what is not supported yet is
    refused by name. It is a subclass only so that ``isinstance`` holds for the tools that ask: none of DDP's machinery
    runs.

    ``process_group`` takes a torch process group or a ``syncengine.Communicator`` (say, from ``Communicator.split``);
    ``None`` is the default communicator, initialized if need be. Afterwards ``communicator`` is what gradients are
    averaged over, and ``process_group`` what tools expect there: torch's group of these ranks if there is one, else
    the communicator. With one rank the module is called directly.

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
    ) -> None:
        check_group(process_group)
        check_arguments(
            device_ids=device_ids,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )
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
        delayed = check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        self.module = module
        self.communicator, self.process_group = resolve_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            localize_parameters(module, device_mesh)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore.update(name for name, _ in delayed)
        check_module(module, self.parameters_to_ignore, all_delayed=bool(delayed))
        self.device = device_of([*self._named_to_synchronize(), *delayed])
        self.device_type = self.device.type
        self.device_ids, self.output_device = check_device_ids(self.device, device_ids, output_device)
        if self.device_type == "cpu":  # torch's own works on CUDA, over its process group
            adopt_sync_batch_norm(module)

        self.dim = dim
        self.is_multi_device_module = False
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self._mixed_precision = None
        if mixed_precision is not None:
            self._mixed_precision = MixedPrecision(mixed_precision, module)
            self._mixed_precision.go_with(self)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.use_side_stream_for_tensor_copies = False
        self.broadcast_bucket_size = 250 * 1024 * 1024  # nothing depends on it
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.logger = Logger(self)
        self._bucket_cap_mb = bucket_cap_mb
        self._bucket_cap_mb_list = bucket_cap_mb_list
        self._ddp_sink_clone = True
        self._comm_hooks: list[tuple[Any, Any]] = []  # hook and state
        self._delay_all_reduce_params = [parameter for _, parameter in delayed]
        sync_initial_buffers = self._choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self._assign_modules_buffers()
        self._build_reducer()
        if init_sync and self.communicator.size > 1:
            self._replicate(sync_initial_buffers)
        self._delayed = None
        if delayed:
            flat = self._flat_buckets or self.device_type == "cuda"
            self._delayed = DelayedParameters(self.communicator, delayed, param_to_hook_all_reduce, flat)

    def _choose_buffer_sync(self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
        """Sets forward_sync_buffers; returns whether buffers are copied at construction. As DDP since 2.13."""
        if broadcast_buffers is not None:
            warnings.warn(
                "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, which still copies rank 0's "
                "buffers at construction.",
                FutureWarning,
                stacklevel=3,
            )
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            return True
        self.forward_sync_buffers = True if broadcast_buffers is None else broadcast_buffers
        return self.forward_sync_buffers

    _gradients_in_arena = True  # as far as init() was told so; for benchmarks that compare
    _flat_buckets = False  # for tests: on the CPU as on a device, in a build with test hooks

    # --- Construction

    def _named_to_synchronize(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]

    def _named_state(self, with_buffers: bool) -> list[tuple[str, torch.Tensor]]:
        """What is to be the same on all ranks."""
        named: list[tuple[str, torch.Tensor]] = list(zip(self._parameter_names, self._module_parameters, strict=True))
        return [*named, *self.named_module_buffers.items()] if with_buffers else named

    def _name(self) -> str:
        """As errors call the model."""
        return f"Parallel({type(self.module).__name__})"

    def _build_reducer(self) -> None:
        """Makes everything that pickling leaves out."""
        register(self)
        named = self._named_to_synchronize()
        self._parameter_names = [name for name, _ in named]
        self._module_parameters = [parameter for _, parameter in named]
        self._sparse_parameters = sparse_parameters(self.module, self._module_parameters)
        if named and self.device_type == "cuda":
            check_buffers_on(named[0][1].device, self.named_module_buffers)
        self._set_planner(follows_ddp=self.communicator.numerics == "ring")
        self._delayed_checked = False
        self._has_rebuilt_buckets = False
        self._buffers_of_ranks = Buffers(self.communicator, self._name(), self.device)
        self.reducer = cast(ModelReducer, NoReducer())
        self._reduces = False
        if self.communicator.size > 1 and named:
            self._make_reducer()
        hooks, self._comm_hooks = self._comm_hooks, []
        if not hooks and self._mixed_precision is not None and self._mixed_precision.compress is not None:
            hooks = [(self._mixed_precision.compress, None)]
        for hook, state in hooks:  # of the group before, see _update_process_group
            self._install_hook(state, hook)

    def _make_reducer(self) -> None:
        self.reducer = ModelReducer(
            self,
            self._module_parameters,
            self._name(),
            self._parameter_names,
            self.communicator,
            self._sparse_parameters,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            batched_grad_copy=self.batched_grad_copy,
            waits_in_between=self._waits_in_between(),
            gradients_in_arena=self._gradients_in_arena,
            flat_buckets=self._flat_buckets,
        )
        self._reduces = True

    def _waits_in_between(self) -> bool:
        """Whether ranks wait for each other in the middle of forward or backward, too."""
        delays = bool(self._delay_all_reduce_params)
        return delays or any(isinstance(m, torch.nn.SyncBatchNorm) for m in self.module.modules())

    def _set_planner(self, follows_ddp: bool) -> None:
        """Buckets are planned anew before the next forward."""
        self._planner = BucketPlanner.create(
            self._module_parameters,
            self._sparse_parameters,
            follows_ddp,
            self.find_unused_parameters and not self.static_graph,
            self._bucket_cap_mb,
            self._bucket_cap_mb_list,
            in_cache=self.device_type == "cpu",
        )
        # Dynamo cuts compiled graphs by it: into pieces as large as DDP's, whatever the size of our buckets.
        given = self._bucket_cap_mb is not None or self._planner.given_caps
        self.bucket_bytes_cap = self._planner.cap if given else DDP_CAP
        self.bucket_bytes_cap_list = list(self._planner.caps) if self._planner.given_caps else []
        self.bucket_bytes_cap_default = self._bucket_cap_mb is None and not self._planner.given_caps
        self._plan: Plan | None = None
        tunes = self.bucket_bytes_cap_default and not follows_ddp and self.device_type == "cpu"
        self._tuner = Tuner() if tunes else None

    def _replicate(self, with_buffers: bool) -> None:
        """Checks that all ranks have the same model, and gives them rank 0's values."""
        named = self._named_state(with_buffers)
        settings = (
            f"find_unused_parameters={self.find_unused_parameters}, bucket_cap_mb={self._bucket_cap_mb}, "
            f"forward_sync_buffers={self.forward_sync_buffers}, bucket_cap_mb_list={self._bucket_cap_mb_list}, "
            f"static_graph={self.static_graph}, gradient_as_bucket_view={self.gradient_as_bucket_view}, "
            f"batched_grad_copy={self.batched_grad_copy}, "
            f"skip_all_reduce_unused_params={self.skip_all_reduce_unused_params}, device_type={self.device_type}, "
            f"mixed_precision={self.mixed_precision}"
        )
        lines = [settings, *describe_layout(named, _details)]
        check_same_on_all_ranks(self.communicator, f"{self._name()} differs", lines)
        if self._reduces:
            self._number = self._reserve_slots()
        tensors = [tensor for _, tensor in named if tensor not in common]  # these are the same
        TensorBroadcast(self.communicator, tensors, self.device)(tensors, 0)

    def __getstate__(self) -> dict[str, Any]:
        if self.communicator is not default_communicator():
            raise InvalidUsage(
                "Parallel can only be pickled with the default communicator: the copy would not know which one to use. "
                "Save model.module.state_dict() instead"
            )
        if self._delayed is not None:
            raise InvalidUsage(
                "Parallel with delay_all_reduce_named_params can't be pickled: save model.module instead"
            )
        if any(hook is not getattr(self._mixed_precision, "compress", None) for hook, _ in self._comm_hooks):
            warnings.warn(
                "the copy of a Parallel has no communication hook: register it again", UserWarning, stacklevel=2
            )
        state = self.__dict__.copy()
        for name in ("process_group", "communicator", "reducer", "logger", "_planner", "_buffers_of_ranks"):
            del state[name]
        state.pop("_weight", None)  # on its way
        for name in ("_backward_steps", "_adopted", "_looked_for_optimizers"):
            state.pop(name, None)  # parameters' hooks are not pickled either
        state["_comm_hooks"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)
        self.communicator, self.process_group = resolve_group(None, None, together=False)
        self.logger = Logger(self)
        if self._mixed_precision is not None:
            self._mixed_precision.go_with(self)
        self._build_reducer()

    # --- Forward

    @not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module; whether its backward will synchronize is decided here, as in DDP."""
        if torch.autograd._profiler_enabled():
            with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):  # what tools look for
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        adopt_optimizers(self)
        for watcher in forward_watchers:
            watcher(self)
        if self._delayed is not None and not self._delayed_checked:
            self._delayed_checked = True
            if self.communicator.size > 1:
                self._delayed.check_hooks()
        if self._delayed is not None:
            self._delayed.begin_forward(self.require_backward_grad_sync)
        if self.device_ids:
            inputs, kwargs = move_inputs(inputs, kwargs, self.device)
        if self._mixed_precision is not None:
            inputs, kwargs = self._mixed_precision.cast_inputs(inputs, kwargs)
        if not self._reduces:
            return call_module(self, inputs, kwargs)
        synchronize = _is_recorded() and self.require_backward_grad_sync
        sync_buffers_after = self._check_sync_bufs_post_fwd()
        if synchronize:
            self.logger.note_forward()
        try:
            self._begin_forward(synchronize)
        except Exception as error:
            self.logger.set_error_and_log(f"{type(error).__name__}: {error}")
            raise
        # As in DDP: after a forward that will not synchronize, buffers stay as they are for one more.
        self.require_forward_param_sync = synchronize
        if not synchronize and not sync_buffers_after:
            return self._local(call_module(self, inputs, kwargs))
        weights = self._take_weights() if synchronize else None
        try:
            output = call_module(self, inputs, kwargs)
        except _StopRecomputationError:  # how checkpointing ends a forward early, in backward
            raise
        except BaseException as error:
            text = f"raised in forward: {type(error).__name__}: {error}"
            if synchronize and not sync_buffers_after:
                self.reducer.abandon_forward(text)
            else:  # the others wait for its buffers
                self.communicator.abort(f"rank {self.communicator.global_ranks[self.communicator.rank]} {text}")
            raise
        if sync_buffers_after:
            self._sync_buffers()
        if synchronize and not self.require_backward_grad_sync:
            # The module has switched it off: Lightning's manual optimization.
            self.require_forward_param_sync = synchronize = False
            self.reducer.begin_forward(False)
        if not synchronize:
            return self._local(output)
        if weights is not None:
            self._average_with(weights.wait())
        if strangers := Reducer.prepare_for_backward(self.reducer, _outputs(output)):
            check_not_replaced(self.communicator, self.module, self._parameter_names, strangers)
        if self.find_unused_parameters and not self.static_graph:
            return through_sink(output, self._ddp_sink_clone)
        return output

    def _local(self, output: Any) -> Any:
        """The output of a forward whose backward will not average."""
        if _is_recorded():
            self.reducer.prepare_for_local_backward(_outputs(output))
        return output

    def _begin_forward(self, synchronize: bool) -> None:
        needs_plan = _is_recorded() and (self.reducer.begin_forward(synchronize) or self._plan is None)
        plans, sends_buffers = needs_plan and synchronize, self._check_sync_bufs_pre_fwd()
        if plans and self.device_type == "cuda":
            check_not_capturing(self._name())
        current = self._tell_joined(synchronize, plans, sends_buffers) if self._join_config.enable else None
        if plans:
            self._plan_buckets(current)
        if sends_buffers:
            root = None if current is None else current.buffers_from
            self._sync_buffers(root or 0)
        if current is not None and synchronize:
            self._set_average(current)

    def _sync_buffers(self, root: int = 0) -> None:
        self._assign_modules_buffers()  # modules may have replaced theirs
        if hasattr(self, "buffer_hook"):
            self._run_buffer_hook()
            return
        self._buffers_of_ranks.synchronize(self.named_module_buffers, root)


def _is_recorded() -> bool:
    """Whether what is called now can have a backward; in inference mode nothing has, whatever enable_grad() says."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _outputs(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))


def _details(tensor: torch.Tensor) -> str:
    """What ranks must have in common of a parameter besides its shape and dtype; as DDP, nothing of a buffer."""
    if not isinstance(tensor, torch.nn.Parameter):
        return ""
    return f" strides {tensor.stride()}{', trained' if tensor.requires_grad else ''}"
