"""DDP's names on ``Parallel``, for torch and other tools, each forwarded to the part that it belongs to."""

import inspect
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage
from syncengine.hooks import Compress
from syncengine.parallel.broadcast import broadcast_named
from syncengine.parallel.buffers import Buffers
from syncengine.parallel.compiled import is_active
from syncengine.parallel.groups import Group, check_group, resolve_group
from syncengine.parallel.join import JoinContext, ParallelJoinHook
from syncengine.parallel.optimizers import BackwardOptimizers
from syncengine.parallel.planning import Planning
from syncengine.parallel.reducer import ModelReducer
from syncengine.parallel.refusal import refuse, warn_of_find_unused
from syncengine.parallel.steps import Steps
from syncengine.parallel.summary import stats_of, stragglers_of
from syncengine.parallel.uneven import UnevenInputs
from syncengine.stragglers import Stragglers
from syncengine_autoload import SERVED_BY

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

# The annotations that a hook may have: types, or text, by `from __future__ import annotations`.
_BUCKET_ANNOTATIONS = (inspect.Parameter.empty, dist.GradBucket, "dist.GradBucket", "GradBucket")
_RETURN_ANNOTATIONS = (
    inspect.Signature.empty,
    torch.futures.Future[torch.Tensor],
    "torch.futures.Future[torch.Tensor]",
    "Future[torch.Tensor]",
)

_no_sync = DistributedDataParallel.no_sync


def _of(part: str, name: str) -> Any:
    """Makes a property of ``Parallel`` that reads and sets the attribute ``name`` of its attribute ``part``."""
    value = attrgetter(f"{part}.{name}")
    return property(lambda self: value(self), lambda self, new: setattr(getattr(self, part), name, new))


class _Kind(ABCMeta):
    """Metaclass of ``Parallel``: a DistributedDataParallel that ``Parallel`` serves (patch.py) is an instance, too."""

    def __instancecheck__(cls, model: Any) -> bool:
        served_by = getattr(model, "__dict__", {}).get(SERVED_BY)
        return super().__instancecheck__(model) or (served_by is not None and issubclass(served_by, cls))


class ForTools(DistributedDataParallel, metaclass=_Kind):
    """The base class of ``Parallel`` that has DDP's names."""

    communicator: Communicator
    process_group: Group  # type: ignore[assignment] # of torch's only where there is one
    module: torch.nn.Module
    device: torch.device
    output_device: int | None
    logger: Any  # logging.Logger, which is made of this
    reducer: ModelReducer  # type: ignore[assignment] # in the place of torch's own; a NoReducer unless `_reduces`
    _planning: Planning
    _buffer_sync: Buffers
    _optimizers: BackwardOptimizers
    _uneven: UnevenInputs
    _steps: Steps

    _compose: Callable[..., None]  # of Parallel: (hooks: Sequence = (), number: int | None = None)
    _log_and_throw: Callable[[type[Exception], str], NoReturn]  # DDP's own method, which has no annotations

    is_multi_device_module = False
    use_side_stream_for_tensor_copies = False
    broadcast_bucket_size = 250 * 1024 * 1024  # nothing depends on it

    require_backward_grad_sync = _of("_switches", "require_backward_grad_sync")
    require_forward_param_sync = _of("_switches", "require_forward_param_sync")
    forward_sync_buffers = _of("_switches", "forward_sync_buffers")
    broadcast_buffers = _of("_switches", "forward_sync_buffers")
    buffer_hook = _of("_switches", "buffer_hook")
    _ddp_sink_clone = _of("_switches", "sink_clone")
    modules_buffers: Any = property(lambda self: [*self.named_module_buffers.values()])
    named_module_buffers = _of("_buffer_sync", "named")
    bucket_bytes_cap = _of("_planning", "bucket_bytes_cap")
    bucket_bytes_cap_list = _of("_planning", "bucket_bytes_cap_list")
    bucket_bytes_cap_default = _of("_planning", "bucket_bytes_cap_default")
    _has_rebuilt_buckets = _of("_planning", "has_rebuilt")
    # The number of the step begun last, by a text on its micro-batches: now; when elastic() called its function anew.
    _begun_steps: dict[str, int]
    _left_steps: dict[str, int]
    _module_parameters = _of("_model", "parameters")
    _comm_hooks = _of("reducer", "hooks")
    _distributed_rank = _of("communicator", "rank")
    _reduces = _of("reducer", "reduces")
    _assign_modules_buffers = _of("_buffer_sync", "look_up")
    _sync_buffers = _of("_buffer_sync", "synchronize")
    _sync_final_model = _of("_uneven", "sync_final_model")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of forwards in this context accumulate this rank's own gradients.

        Within the module's forward it is for backwards that run wholly in it, as in Lightning's manual optimization.
        """
        with _no_sync(self):
            if is_active(self):
                self.reducer.begin_forward(False)
            yield

    def sync_stats(self) -> dict[str, Any]:
        """Counts of the last synchronized backward.

        ``backwards`` (so far), ``buckets``, ``reduced_bytes``, ``copied_bytes`` by the reason for which gradients could
        not be reduced where autograd left them, ``staged_bytes`` by the reason for which this rank's gradients did not
        lie where peers reduce them in place, and ``shortage``: why there was no more memory for them, with the numbers,
        or "".
        """
        return self.reducer.statistics()

    def stats(self) -> dict[str, float]:
        """Numbers for a logger (``self.log_dict(model.stats())``); the same keys at any time, 0 for what is not known.

        ``steps``: synchronized backwards that ended well. Medians of the last 1024, in milliseconds: ``step_ms``, from
        the end of one backward to the end of the next, and ``exposed_sync_ms``, how long the host waited at its end for
        averages (on CUDA streams wait, not the host); ``exposed_sync_percent`` of a step. ``late_ms`` is this rank's
        lateness as in ``stragglers()``, by phase ``late_input_ms``, ``late_forward_ms``, ``late_backward_ms`` and
        ``late_optimizer_ms``; ``latest_rank`` is the latest rank, by ``latest_rank_ms``. ``total_reduced_bytes`` is the
        sum over all steps; ``reduced_bytes``, ``copied_bytes``, ``staged_bytes`` and ``buckets`` are those of the last
        step, as in ``sync_stats``. All numbers are this rank's own; nothing is communicated.
        """
        return stats_of(self.reducer, self.communicator.global_ranks, self.communicator.rank)

    def stragglers(self) -> Stragglers:
        """Which rank is late in the last 100 steps: the same on all ranks, but for noise. Does not communicate.

        A rank's lateness in a step is its own time, from the end of the last synchronization to that of its backward,
        less that of the fastest rank: time that it waits for other ranks is not its own.

        ``steps``: how many were compared; ``step_ms``: how long one takes; ``ranks``: for each rank, medians in
        milliseconds: ``late_ms``, and of that ``input_ms`` (the rest), ``forward_ms`` (with the loss), ``backward_ms``
        and ``optimizer_ms``; and ``late_percent``, in how many steps it took over a tenth of a step longer than the
        middle rank. ``verdict``: None, or the ``rank`` that does so in over two thirds of the steps, its main
        ``phase``, ``late_ms`` and ``late_percent``; rank 0 warns of it, once in 100 steps at most.

        A rank is late in no step in which it has no batch. Nothing is compared on CUDA.
        """
        return stragglers_of(self.reducer, self.communicator.global_ranks)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> JoinContext:
        """A context in which ranks may have different numbers of batches, as in DDP.

        A rank that leaves it takes part in the others' steps until they leave, too: it contributes zeros to their
        averages. These are divided by the number of all ranks, or, without ``divide_by_initial_world_size``, of the
        ranks that have a batch; with ``weight()``, by the weights of those ranks. Then all ranks get the model of the
        last one. ``throw_on_early_termination``: all raise instead as soon as one has no batch.

        An error that ends the context on one rank ends it on all: the others raise ``Aborted`` with its text. Several
        models, or a ``ZeroRedundancyOptimizer``, need ``torch.distributed.algorithms.Join``.
        """
        self._expect_join(divide_by_initial_world_size)
        return JoinContext(self, self._steps, enable, throw_on_early_termination)

    def join_hook(self, **kwargs: Any) -> ParallelJoinHook:
        """The hook for torch's ``Join``; takes ``divide_by_initial_world_size``."""
        if not isinstance(self.process_group, dist.ProcessGroup):  # over which torch's Join communicates
            raise InvalidUsage(
                "torch's Join needs a torch process group: pass one as process_group (or None, with torch.distributed "
                "initialized first), or use model.join(), which needs none"
            )
        self._expect_join(kwargs.get("divide_by_initial_world_size", True))
        return ParallelJoinHook(self._steps)

    def _expect_join(self, divide_by_initial_world_size: bool) -> None:
        self._uneven.divide_by_initial_world_size = divide_by_initial_world_size
        self.logger.numbers["join_uneven_inputs"] = 1

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Calls ``hook(state, bucket)`` instead of the all-reduce, as in DDP; torch's own hooks work.

        Each ``bucket`` is a ``torch.distributed.GradBucket`` with this rank's gradients in one flat tensor; the hook
        returns a future of the values that take their place. It is called on every rank in the same order of buckets.
        Backward raises its errors, and the other ranks raise them as ``Aborted``. ``syncengine.hooks`` has hooks that
        need no ``torch.distributed``. A hook is registered once, and not in the middle of a backward.
        """
        self._check_comm_hook(hook)
        if isinstance(hook, Compress) and state is not None and state is not self.communicator:
            raise InvalidUsage(
                f"{hook!r} goes over the communicator of the model: register it with state None, not {state!r}"
            )
        self._install_hook(state, hook)

    def _check_comm_hook(self, hook: Hook) -> None:
        """Checks a hook as DDP does, but bfloat16 needs no GPU."""
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
        signature = inspect.signature(hook)
        bucket = signature.parameters.get("bucket")
        if bucket is not None and bucket.annotation not in _BUCKET_ANNOTATIONS:
            self._log_and_throw(ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
        if signature.return_annotation not in _RETURN_ANNOTATIONS:
            text = "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
            self._log_and_throw(ValueError, text)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Registers one of DDP's two native hooks, whose work the engine does."""
        if not isinstance(comm_hook_type, dist.BuiltinCommHookType):
            raise TypeError(f"a dist.BuiltinCommHookType is needed, not {comm_hook_type!r}")
        self._install_hook(None, comm_hook_type)

    @contextmanager
    def _logging_refusals(self) -> Iterator[None]:
        """Notes an ``InvalidUsage`` in the logging data, as DDP's reducer does."""
        try:
            yield
        except InvalidUsage as error:
            self.logger.set_error_and_log(str(error))
            raise

    def _install_hook(self, state: Any, hook: Hook | dist.BuiltinCommHookType) -> None:
        if self._reduces:
            with self._logging_refusals():
                self.reducer.install_hook(state, hook)
        else:  # with one rank; but a hook may do more than to communicate
            self._compose(hooks=[(hook, state)])

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Iterable[torch.nn.Parameter] | None = None,
        **kwargs: Any,
    ) -> None:
        """Steps each parameter in backward, as soon as its gradient is averaged; not under ``no_sync``."""
        chosen = self._module_parameters if optim_params is None else optim_params
        self._optimizers.fuse(optim, chosen, *args, **kwargs)

    def _set_static_graph(self) -> None:
        """Makes the graph static, as ``static_graph=True`` does. Call it before the first backward."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", UserWarning, stacklevel=2)
            return
        with self._logging_refusals():
            self.reducer.set_static_graph()
        self.static_graph = self._planning.options.static_graph = True
        if self.find_unused_parameters:
            warn_of_find_unused(stacklevel=3)
        self._planning.start_over(self._planning.planner.follows_ddp)

    def _set_sparse_metadata(self, *_: Any, **__: Any) -> NoReturn:
        refuse("_set_sparse_metadata()", "indices are gathered in each backward: leave it out")

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Broadcasts tensors for hooks on buffers, as DDP's method does. ``buffer_size`` is ignored."""
        names = {id(buffer): name for name, buffer in self.named_module_buffers.items()}
        named = [(names.get(id(tensor), f"tensor {i}"), tensor) for i, tensor in enumerate(tensors)]
        broadcast_named(
            self.communicator, "the tensors of a hook on buffers differ", named, self.device, authoritative_rank
        )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Sets how often ``iteration`` in the logging data changes after step 10. Times are of the last 1024 steps."""
        if sample_rate < 1:
            self._log_and_throw(InvalidUsage, "DDP runtime logging sample rate should be equal or greater than 1")
        self.logger.sample_rate = sample_rate

    def _update_process_group(self, new_process_group: Any) -> None:
        """Averages gradients over another group from now on. Ranks that are not in it stay as they are."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        check_group(new_process_group)
        self.reducer._remove_autograd_hooks()
        self.communicator, self.process_group = resolve_group(new_process_group, None)
        self._compose(hooks=self._comm_hooks)
