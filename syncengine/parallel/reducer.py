"""``model.reducer``: the engine's reducer, with the private methods of DDP's that other tools call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from syncengine._C import Reducer


class NoReducer:
    """In the place of a reducer where nothing is reduced, as with one rank: what tools call does nothing."""

    def statistics(self) -> dict[str, Any]:
        """As of a reducer that has done nothing."""
        return {"backwards": 0, "buckets": 0, "reduced_bytes": 0, "copied_bytes": {}}

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Nothing."""

    def _check_reducer_finalized(self) -> None:
        pass

    def _remove_autograd_hooks(self) -> None:
        pass

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        pass


class ModelReducer(Reducer):
    """The reducer of one ``Parallel``."""

    def __init__(self, model: DistributedDataParallel, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._model = weakref.ref(model)

    def _rebuild_buckets(self) -> bool:
        """Plans new buckets if it is time to; returns whether it was. Collective."""
        model = self._model()
        needed = self.begin_forward(True) or model._plan is None
        if needed:
            model._plan_buckets()
        return needed

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """The next backward will average, whatever the forward before it was told. Collective."""
        self._rebuild_buckets()
        super().prepare_for_backward(outputs)

    def _check_reducer_finalized(self) -> None:
        self.check_finalized()

    def _remove_autograd_hooks(self) -> None:
        self.remove_hooks()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.set_sample_rate(rate)
