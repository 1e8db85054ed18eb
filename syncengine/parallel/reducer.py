"""``model.reducer``: the engine's reducer, with the private methods of DDP's that other tools call."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncengine._C import NodeNumber, Reducer, ReducerOptions, StepTimes
from syncengine.errors import InvalidUsage
from syncengine.hooks import Compress
from syncengine.parallel.model import Model, looks_for_unused


class NoReducer:
    """The reducer of a model of which nothing is reduced, as with one rank: methods that tools call do nothing."""

    reduces = False

    def __init__(self) -> None:
        self._synchronizes = True  # in the last forward
        self.hooks: list[tuple[Any, Any]] = []  # none

    def statistics(self) -> dict[str, Any]:
        """The statistics of a reducer that has done nothing."""
        counts = dict.fromkeys(("backwards", "buckets", "reduced_bytes"), 0)
        return {**counts, "copied_bytes": {}, "staged_bytes": {}, "shortage": ""}

    def step_times(self) -> StepTimes:
        """A record of no steps."""
        return StepTimes()

    def begin_forward(self, synchronize: bool) -> None:
        """Notes whether the forward synchronizes, and so whether its backward does."""
        self._synchronizes = synchronize

    def has_averaged(self) -> bool:
        """Whether gradients are averages: they are, with one rank, unless the forward was under ``no_sync``."""
        return self._synchronizes

    def backwards(self) -> int:
        """The number of backwards: none is seen."""
        return 0

    def wanted(self) -> list[int]:
        """The parameters that a plan is to cover: none."""
        return []

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Makes the next backward average, even after a forward under ``no_sync``. There is no parameter to prepare."""
        self._synchronizes = True
        return []

    def _nothing(self, *_: Any) -> None:
        pass

    drop_step = set_static_graph = _delay_all_reduce = _nothing
    _check_reducer_finalized = _remove_autograd_hooks = _nothing


class ModelReducer(Reducer):
    """The reducer of one ``Parallel``."""

    reduces = True
    _check_reducer_finalized, _remove_autograd_hooks = Reducer.check_finalized, Reducer.remove_hooks
    _delay_all_reduce = NoReducer._nothing  # Lightning's call after a static graph's first backward

    def __init__(self, model: Model, options: ReducerOptions, wrapper: Any) -> None:
        super().__init__(model.parameters, str(model), model.names, model.communicator, model.sparse, options)
        self.hooks: list[tuple[Any, Any]] = []  # on communication, each with its state: at most one
        self._options = options
        self._parallel = weakref.ref(wrapper)  # which refers to this

    def _wrapper(self) -> Any:
        wrapper = self._parallel()
        if wrapper is None:
            raise InvalidUsage("the Parallel of this reducer is gone: keep the model as long as you use its reducer")
        return wrapper

    def install_hook(self, state: Any, hook: Any) -> None:
        """Sends buckets through ``hook``. The engine itself does the work of hooks that it knows."""
        if hook == dist.BuiltinCommHookType.ALLREDUCE:
            self.set_all_reduce_hook()
        elif hook == dist.BuiltinCommHookType.FP16_COMPRESS:
            self.set_compression(torch.float16)
        elif isinstance(hook, Compress):
            self.set_compression(hook.dtype, hook.divides_first)
        else:
            self.set_comm_hook(weakref.ref(self), _call_hook)
            self._wrapper()._planning.start_over(follows_ddp=True)  # the hook sees the buckets
        self.hooks = [(hook, state)]

    def _rebuild_buckets(self) -> bool:
        """Plans new buckets if it is time to. Returns whether it was. All ranks call it."""
        planning = self._wrapper()._planning
        needed: bool = self.begin_forward(True) or planning.plan is None
        if needed:
            planning.renew()
        return needed

    def prepare_for_backward(
        self, outputs: Sequence[torch.Tensor], began: NodeNumber | None = None
    ) -> list[torch.Tensor]:
        """Makes the next backward average, even after a forward under ``no_sync``. All ranks call it."""
        self._rebuild_buckets()
        self._wrapper()._uneven.average_with_weights()
        return super().prepare_for_backward(outputs, began)

    def _ddp_graph_static(self) -> bool:
        """Whether each backward on this rank used the same parameters; True if unused ones are not looked for."""
        return not looks_for_unused(self._options) or self.graph_is_static()

    def _get_local_used_map(self) -> torch.Tensor | None:
        """The number of ranks on which the last synchronized backward used each parameter that requires a gradient.

        The result is None unless unused parameters are looked for, as in DDP. Unlike there, all ranks call this method.
        """
        model = self._wrapper()._model
        if not looks_for_unused(self._options):
            return None
        used = set(self.ready_order())
        ranks = [int(i in used) for i, parameter in enumerate(model.parameters) if parameter.requires_grad]
        counts = torch.tensor(ranks, dtype=torch.int32, device="cpu")
        model.communicator.all_reduce(counts)
        return counts.to(model.device)


def _call_hook(reducer: weakref.ref[ModelReducer], bucket: dist.GradBucket) -> Any:
    """Calls the reducer's communication hook. C++ holds this, not the hook: cycles through C++ would never be freed."""
    alive = reducer()
    if alive is None:
        raise InvalidUsage(
            "the Parallel is gone in the middle of its backward, and its communication hook with it: keep the model "
            "until its backward has ended"
        )
    hook, state = alive.hooks[0]
    del alive  # an error of the hook keeps this frame
    return hook(state, bucket)
