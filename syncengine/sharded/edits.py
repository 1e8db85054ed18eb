"""What the user does to the optimizer's ``state`` between steps, seen by each rank for itself.

What is put in the place of an entry is loaded, as from a state dict. What is written to an entry is refused: all ranks
have written to the same memory, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from syncengine._C import WatchedWeights
from syncengine.sharded.block import Block
from syncengine.sharded.state import State

_INSTEAD = "put another value in its place, the same on all ranks, or load_state_dict()"


class WatchedState:
    """What the state of ``blocks`` was like when this rank last looked."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._stale, self._has_numbers = True, False
        self.forget()

    def forget(self) -> None:
        """Keeps nothing of it alive."""
        self._all: list[Any] = []
        self._dicts: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._shown: list[tuple[str, torch.Tensor, dict[str, Any]]] = []
        self._tensors = WatchedWeights([])
        self._names: list[str] = []  # of these tensors

    def expect_more(self) -> None:
        """Entries come or go in this update."""
        self._stale = True

    def note(self, state: State) -> None:
        """It is as it should be."""
        if not self._stale and not self._has_numbers:
            self._tensors.note()
            return
        self.forget()
        self._all = list(state.values())
        tensors = []
        for block in self._blocks:
            for (name, parameter), keys in zip(block.weights.named, block.state.keys(), strict=True):
                entries = {key: state[parameter][key] for key in keys}
                self._shown.append((name, parameter, entries))
                if entries:
                    self._dicts.append(state[parameter])
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        tensors.append(value)
                        self._names.append(f"{key!r} of parameter {name}")
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._tensors = WatchedWeights(tensors)
        self._stale, self._has_numbers = False, any(block.state.numbers for block in self._blocks)

    def written(self) -> str:
        """Says which entry was written to; or an empty text."""
        if (index := self._tensors.moved()) is not None:
            return (
                f"the state's {self._names[index]} lies in other memory than the other ranks' (by .data = ..., "
                "share_memory_(), or as it was sent to a process), so it is void. Continue from a checkpoint; in place "
                f"of moving it, clone() it to send it, or {_INSTEAD}"
            )
        if (index := self._tensors.written()) is None:
            return ""
        return (
            f"the state's {self._names[index]} was written to, in memory that all ranks share: it is void. Continue "
            f"from a checkpoint; in place of writing to it, {_INSTEAD}"
        )

    def replaced(self, state: State) -> bool:
        """Whether something else is in the place of entries, or nothing."""
        if (
            len(state) == len(self._all)
            and all(map(is_, state.values(), self._all))
            and sum(map(len, self._dicts)) == len(self._values)
            and all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._values))
        ):
            return False  # as in most steps
        for _, parameter, entries in self._shown:
            here = state.get(parameter, {})
            if any(here.get(key, self) is not value for key, value in entries.items()) or (here and not entries):
                return True
        return False

    def unusable(self, state: State) -> str:
        """Says what in the place of an entry would not do; or an empty text."""
        for name, parameter, entries in self._shown:
            here = state.get(parameter, {})
            for key, value in entries.items() if here else ():
                if key not in here:
                    return (
                        f"the state's {key!r} of parameter {name} was removed: remove all of its state, or {_INSTEAD}"
                    )
                if _kind(here[key]) != _kind(value):
                    return (
                        f"the state's {key!r} of parameter {name} was replaced by {_kind(here[key])}, but it is "
                        f"{_kind(value)}"
                    )
            if entries and not here and not all(block.state.is_made_in_steps for block in self._blocks):
                return f"the state of parameter {name} was removed, which this optimizer makes but once: {_INSTEAD}"
        return ""


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
