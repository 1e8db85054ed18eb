"""What ``writing()`` gives all ranks besides shared weights: what rank 0 writes to its own parameters and buffers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from syncengine._C import Communicator
from syncengine.parallel import Parallel
from syncengine.parallel.broadcast import TensorBroadcast, describe_layout
from syncengine.parallel.replication import check_same_on_all_ranks
from syncengine.parallel.watchers import common
from syncengine.sharded.agreement import gather_texts
from syncengine.sharded.state import digest


class _Noted(NamedTuple):
    version: int
    digest: int


class PrivateTensors:
    """Parameters and buffers of ``models``, by number, that lie in each rank's own memory, and what they were like.

    Not those that a module names in ``_ddp_params_and_buffers_to_ignore``.
    """

    def __init__(self, models: Sequence[Callable[[], Parallel | None]], writes: bool) -> None:
        """``writes``: this rank may; it reads all of them, as versions do not see every write."""
        self._models = models
        self._noted = {key: _note(tensor) for key, tensor in self._find().items()} if writes else {}

    def written(self) -> list[str]:
        """Which of them this rank has written to since, or put others in their place."""
        found = self._find()
        return [key for key, noted in self._noted.items() if key in found and _note(found[key]) != noted]

    def spread(self, communicator: Communicator, written: list[str]) -> None:
        """Gives all ranks those that rank 0 has ``written``. Collective.

        Raises ``Mismatch`` on all ranks, naming one, where shapes or dtypes differ.
        """
        keys = json.loads(gather_texts(communicator, json.dumps(written))[0])
        if not keys:
            return
        found = self._find()
        named = [(key.partition(" ")[2], found[key]) for key in keys if key in found]
        lines = describe_layout(named) + [f"{key.partition(' ')[2]}: nothing" for key in keys if key not in found]
        what = "what rank 0 has written in writing() differs"
        check_same_on_all_ranks(communicator, what, lines, "Leave shapes and dtypes as they are.")
        tensors = [tensor for _, tensor in named]
        TensorBroadcast(communicator, tensors, torch.device("cpu"))(tensors, 0)
        for tensor in tensors:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # graphs that hold it as it was can't be used

    def _find(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for number, known in enumerate(self._models):
            if (model := known()) is None:
                continue
            ignored = getattr(model.module, "_ddp_params_and_buffers_to_ignore", ())
            for name, tensor in itertools.chain(model.module.named_parameters(), model.module.named_buffers()):
                if name not in ignored and tensor not in common and tensor.layout is torch.strided:
                    found[f"{number} {name}"] = tensor
        return found


def _note(tensor: torch.Tensor) -> _Noted:
    return _Noted(-1 if tensor.is_inference() else tensor._version, digest({"": tensor}))
