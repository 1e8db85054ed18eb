"""The part of ``Parallel`` for hooks: on gradients and on buffers, and optimizers that step in backward."""

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from syncengine.errors import InvalidUsage
from syncengine.hooks import Compress
from syncengine.parallel.logging import Logger
from syncengine.parallel.model import Model
from syncengine.parallel.optimizers import fuse_optimizer
from syncengine.parallel.refusal import warn_of_find_unused

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

# As types, or as text: with `from __future__ import annotations`.
_BUCKET_ANNOTATIONS = (inspect.Parameter.empty, dist.GradBucket, "dist.GradBucket", "GradBucket")
_RETURN_ANNOTATIONS = (
    inspect.Signature.empty,
    torch.futures.Future[torch.Tensor],
    "torch.futures.Future[torch.Tensor]",
    "Future[torch.Tensor]",
)


class CommHooks(Model):
    """To be inherited from."""

    logger: Logger

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Calls ``hook(state, bucket)`` instead of the all-reduce, as in DDP; torch's own hooks work.

        Each ``bucket`` is a ``torch.distributed.GradBucket`` with this rank's gradients in one flat tensor; the hook
        returns a future of what they become. It is called on every rank in the same order of buckets. What it raises
        is raised by backward, and by the other ranks as ``Aborted``.

        ``syncengine.hooks`` has hooks that need no ``torch.distributed``. Once, and not in the middle of a backward.
        """
        self._check_comm_hook(hook)
        if isinstance(hook, Compress) and state is not None and state is not self.communicator:
            raise InvalidUsage(
                f"{hook!r} goes over the communicator of the model: register it with state None, not {state!r}"
            )
        self._install_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """DDP's two native hooks, done by the engine."""
        if not isinstance(comm_hook_type, dist.BuiltinCommHookType):
            raise TypeError(f"a dist.BuiltinCommHookType is needed, not {comm_hook_type!r}")
        self._install_hook(None, comm_hook_type)

    def _install_hook(self, state: Any, hook: Hook | dist.BuiltinCommHookType) -> None:
        if not self._reduces:  # with one rank; but a hook may do more than to communicate
            self._make_reducer()
        if hook == dist.BuiltinCommHookType.ALLREDUCE:
            self.reducer.set_all_reduce_hook()
        elif hook == dist.BuiltinCommHookType.FP16_COMPRESS:
            self.reducer.set_compression(torch.float16)
        elif isinstance(hook, Compress):
            self.reducer.set_compression(hook.dtype, hook.divides_first)
        else:
            self.reducer.set_comm_hook(state, hook)
            self._set_planner(True)  # the hook sees the buckets
        self._comm_hooks.append((hook, state))
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", str(hook)))

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Iterable[torch.nn.Parameter] | None = None,
        **kwargs: Any,
    ) -> None:
        """Steps each parameter in backward, as soon as its gradient is averaged; not under ``no_sync``."""
        fuse_optimizer(self, optim, optim_params, *args, **kwargs)

    def _check_comm_hook(self, hook: Hook) -> None:
        """As DDP's, but that bfloat16 needs no GPU."""
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
        signature = inspect.signature(hook)
        bucket = signature.parameters.get("bucket")
        if bucket is not None and bucket.annotation not in _BUCKET_ANNOTATIONS:
            self._log_and_throw(ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
        if signature.return_annotation not in _RETURN_ANNOTATIONS:
            self._log_and_throw(
                ValueError, "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
            )

    def _run_buffer_hook(self) -> None:
        hook = self.buffer_hook
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None:
            self.reducer.install_futures(futures)

    def _set_static_graph(self) -> None:
        """What ``static_graph=True`` does; before the first backward."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", UserWarning, stacklevel=2)
            return
        if self._reduces:
            self.reducer.set_static_graph()
        self.static_graph = True
        self.logger._set_static_graph()
        if self.find_unused_parameters:
            warn_of_find_unused(stacklevel=3)
        self._set_planner(self._planner.follows_ddp)

    def _has_averaged(self) -> bool:
        """In a hook on a parameter after its backward: whether its gradient is the average."""
        return self.reducer.has_averaged() if self._reduces else self.require_backward_grad_sync
