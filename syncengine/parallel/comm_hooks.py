"""Communication hooks: what averages gradients in the place of the engine."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from syncengine._C import Reducer
from syncengine.hooks import Compress
from syncengine.parallel.planning import Planning

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

# As types, or as text: with `from __future__ import annotations`.
_BUCKET_ANNOTATIONS = (inspect.Parameter.empty, dist.GradBucket, "dist.GradBucket", "GradBucket")
_RETURN_ANNOTATIONS = (
    inspect.Signature.empty,
    torch.futures.Future[torch.Tensor],
    "torch.futures.Future[torch.Tensor]",
    "Future[torch.Tensor]",
)


@dataclass(eq=False)
class CommHooks:
    """Those of one model, on gradients: at most one."""

    reducer: Reducer
    planning: Planning
    installed: list[tuple[Any, Any]] = field(default_factory=list)  # hook and state

    def install(self, state: Any, hook: Hook | dist.BuiltinCommHookType) -> None:
        """From now on buckets go through ``hook``; the engine does itself what it can."""
        if hook == dist.BuiltinCommHookType.ALLREDUCE:
            self.reducer.set_all_reduce_hook()
        elif hook == dist.BuiltinCommHookType.FP16_COMPRESS:
            self.reducer.set_compression(torch.float16)
        elif isinstance(hook, Compress):
            self.reducer.set_compression(hook.dtype, hook.divides_first)
        else:
            self.reducer.set_comm_hook(state, hook)
            self.planning.start_over(follows_ddp=True)  # the hook sees the buckets
        self.installed.append((hook, state))


def check_hook(hook: Hook, refuse: Callable[[type[Exception], str], NoReturn]) -> None:
    """As DDP's, but that bfloat16 needs no GPU: calls ``refuse`` with an error and its text."""
    if not callable(hook):
        refuse(TypeError, "Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in _BUCKET_ANNOTATIONS:
        refuse(ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
    if signature.return_annotation not in _RETURN_ANNOTATIONS:
        refuse(ValueError, "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
