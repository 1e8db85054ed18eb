"""The buffers of a model: copies one rank's values to all ranks, whenever a forward requires it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage, Mismatch
from syncengine.parallel.broadcast import TensorBroadcast, describe_layout
from syncengine.parallel.replication import check_same_on_all_ranks


class Buffers:
    """Copies one rank's buffers of a model to all ranks.

    Holds what all ranks have agreed on (names, dtypes, shapes), and the memory for the message, but none of the
    tensors, only where they were: modules may replace them and their memory, also on one rank alone. If names, dtypes
    or shapes are no longer as agreed, a stamp in the message says so: then all ranks agree anew; if only this rank's
    have changed, it raises an error. On CUDA the host does not wait for the message in order to read it; there the
    calls that carry it are compared.
    """

    def __init__(self, communicator: Communicator, model: str, device: torch.device) -> None:
        self._communicator = communicator
        self._what = f"the buffers of {model}"
        self._device = device
        self._places: list[Any] = []  # of the buffers, when they were last looked at
        self._lines: Sequence[str] = []  # that describe these
        self._agreed: Sequence[str] | None = None
        self._stamp, self._layout = 0, ""  # of what is agreed
        self._broadcast: TensorBroadcast

    def synchronize(self, named: Mapping[str, torch.Tensor], root: int) -> None:
        """Copies the values of rank ``root``. Collective.

        Their version counters do not change: a backward may need a buffer as it was. Raises ``Mismatch`` on all ranks,
        naming a buffer and both sides, where names, dtypes, shapes, or which of them share memory, differ between
        ranks.
        """
        tensors = list(named.values())
        counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
        with torch.autograd._unsafe_preserve_version_counter(counted), torch.inference_mode():
            self._look_at(named)
            if self._agreed is None:
                self._agree(tensors)
            if self._device.type == "cpu":
                self._send(tensors, root)
            else:
                self._send_on_device(tensors, root)
            self._broadcast.deliver(tensors, root)

    def _look_at(self, named: Mapping[str, torch.Tensor]) -> None:
        places = [(name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in named.items()]
        if places == self._places:
            return
        try:
            self._lines = describe_layout(list(named.items()))
        except InvalidUsage as error:  # the others would wait
            self._communicator.abort(f"{self._me()}: {error}", "InvalidUsage")
            raise
        self._places = places

    def _send(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        as_agreed = self._lines == self._agreed
        if self._communicator.rank == root:
            if as_agreed:
                self._broadcast.pack(tensors)
            else:
                self._broadcast.stamp.zero_()
        self._broadcast.send(root)
        if self._broadcast.stamp.item() != self._stamp:
            self._agree(tensors)
            self._send(tensors, root)
        elif not as_agreed:
            self._refuse(root)

    def _send_on_device(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        if self._lines != self._agreed:  # perhaps here alone: nothing collective, so no memory of the engine
            self._broadcast = TensorBroadcast(self._communicator, tensors, self._device, shared=False)
            self._note_agreement()
        if self._communicator.rank == root:
            self._broadcast.pack(tensors)
        self._broadcast.send(root, self._layout)

    def _agree(self, tensors: Sequence[torch.Tensor]) -> None:
        """Collective."""
        check_same_on_all_ranks(self._communicator, f"{self._what} differ", self._lines)
        self._broadcast = TensorBroadcast(self._communicator, tensors, self._device)
        self._note_agreement()
        self._broadcast.stamp.fill_(self._stamp)

    def _note_agreement(self) -> None:
        old = set(self._agreed or ())
        new = [line for line in self._lines if line not in old]  # which an error, if it comes, should begin with
        self._layout = f"{self._what} ({', '.join([*new, *(line for line in self._lines if line in old)])})"
        self._stamp = 1 + int.from_bytes(hashlib.sha256("\n".join(self._lines).encode()).digest()[:7], "little")
        self._agreed = self._lines

    def _refuse(self, root: int) -> None:
        """The sender's buffers are still as agreed, but not this rank's."""
        agreed = self._agreed or ()
        count = max(len(agreed), len(self._lines))
        theirs, ours = ([*lines, *["nothing"] * (count - len(lines))] for lines in (agreed, self._lines))
        there, here = next((a, b) for a, b in zip(theirs, ours, strict=True) if a != b)
        text = (
            f"{self._what} differ between ranks since the last forward: rank {self._communicator.global_ranks[root]} "
            f"has [{there}], {self._me()} has [{here}]. Give them the same dtypes and shapes on every rank."
        )
        self._communicator.abort(text, "Mismatch")
        raise Mismatch(text)

    def _me(self) -> str:
        return f"rank {self._communicator.global_ranks[self._communicator.rank]}"
