"""``model.reducer``: the engine's reducer, with the private methods of DDP's that other tools call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from syncengine._C import Reducer
from syncengine.errors import InvalidUsage
from syncengine.parallel.model import Model


class NoReducer:
    """Instead of a reducer where nothing is reduced, as with one rank: the methods that tools call do nothing."""

    def statistics(self) -> dict[str, Any]:
        """As of a reducer that has done nothing."""
        return {
            "backwards": 0,
            "buckets": 0,
            "reduced_bytes": 0,
            "copied_bytes": {},
            "staged_bytes": {},
            "shortage": "",
        }

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Nothing."""
        return []

    def _check_reducer_finalized(self) -> None:
        pass

    def _remove_autograd_hooks(self) -> None:
        pass

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        pass


class ModelReducer(Reducer):
    """The reducer of one ``Parallel``."""

    def __init__(self, model: Model, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._model = weakref.ref(model)

    def _owner(self) -> Model:
        model = self._model()
        if model is None:
            raise InvalidUsage("the Parallel of this reducer is gone: keep the model as long as you use its reducer")
        return model

    def _rebuild_buckets(self) -> bool:
        """Plans new buckets if it is time to; returns whether it was. Collective."""
        model = self._owner()
        needed = self.begin_forward(True) or model._plan is None
        if needed:
            model._plan_buckets(None)
        return needed

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The next backward will average, whatever the forward before it was told. Collective."""
        self._rebuild_buckets()
        return super().prepare_for_backward(outputs)

    def _check_reducer_finalized(self) -> None:
        self.check_finalized()

    def _ddp_graph_static(self) -> bool:
        """Whether each backward on this rank used the same parameters, as far as unused ones are looked for."""
        model = self._owner()
        return not model.find_unused_parameters or model.static_graph or self.graph_is_static()

    def _get_local_used_map(self) -> torch.Tensor | None:
        """Of each parameter that requires a gradient: how many ranks the last synchronized backward used it on.

        None unless unused ones are looked for, as in DDP. Here collective.
        """
        model = self._owner()
        if not model.find_unused_parameters or model.static_graph:
            return None
        trainable = [i for i, parameter in enumerate(model._module_parameters) if parameter.requires_grad]
        used = set(self.ready_order())
        ranks = torch.tensor([int(i in used) for i in trainable], dtype=torch.int32, device="cpu")
        model.communicator.all_reduce(ranks)
        return ranks.to(model.device)

    def _remove_autograd_hooks(self) -> None:
        self.remove_hooks()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.set_sample_rate(rate)
