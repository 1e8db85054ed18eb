"""The buffers of a model: one rank's values are copied to all ranks, whenever a forward requires it."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from syncengine._C import Communicator, Reducer
from syncengine.errors import InvalidUsage, Mismatch
from syncengine.parallel.broadcast import TensorBroadcast, describe_layout
from syncengine.parallel.model import Model, Switches, not_ignored
from syncengine.parallel.replication import check_same_on_all_ranks, fail_all, own_name


class Buffers:
    """The buffers of a model, those that are not ``ignored``: which they are, when they are synchronized, and how."""

    def __init__(self, model: Model, switches: Switches, reducer: Reducer, ignored: Container[str]) -> None:
        self._module, self._ignored = model.module, ignored
        self._switches = switches
        self._reducer = reducer
        self._copy = BufferCopy(model.communicator, str(model), model.device)
        self.look_up()

    def look_up(self) -> None:
        """Modules may have replaced theirs."""
        self.named = not_ignored(self._module.named_buffers(), self._ignored)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of the last look."""
        return list(self.named.values())

    def due(self) -> _BufferCommHookLocation | None:
        """Where the next forward synchronizes them, before or after the module is called; None if it does not."""
        switches = self._switches
        if not (switches.require_forward_param_sync and switches.forward_sync_buffers and self.named):
            return None
        hook = self._hook()
        return _BufferCommHookLocation.PRE_FORWARD if hook is None else hook.buffer_comm_hook_location

    def begin_step(self) -> None:
        """Synchronizes them before a step of several forwards, which then do not. Collective."""
        if self._switches.forward_sync_buffers and self.named:
            self.synchronize()
        self._switches.require_forward_param_sync = False

    def synchronize(self, root: int = 0) -> None:
        """Calls the hook, or copies the values of rank ``root``. Collective."""
        self.look_up()
        hook = self._hook()
        if hook is None:
            self._copy(self.named, root)
            return
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.tensors)):
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named)
        if futures is not None:
            self._reducer.install_futures(futures)

    def _hook(self) -> _BufferCommHook | None:
        return getattr(self._switches, "buffer_hook", None)


class BufferCopy:
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

    def __call__(self, named: Mapping[str, torch.Tensor], root: int) -> None:
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
        places = []
        with contextlib.suppress(RuntimeError):  # one has no memory: below it is said which
            places = [(name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in named.items()]
        if places and places == self._places:
            return
        try:
            self._lines = describe_layout(list(named.items()))
        except InvalidUsage as error:  # the others would wait
            fail_all(self._communicator, error, f"{own_name(self._communicator)}: {error}")
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
            f"has [{there}], {own_name(self._communicator)} has [{here}]. Give them the same dtypes and shapes on "
            "every rank."
        )
        fail_all(self._communicator, Mismatch(text))


def named_state(model: Model, buffers: Buffers | None) -> list[tuple[str, torch.Tensor]]:
    """What is to be the same on all ranks: parameters, and ``buffers`` if any."""
    named: list[tuple[str, torch.Tensor]] = list(zip(model.names, model.parameters, strict=True))
    return named if buffers is None else [*named, *buffers.named.items()]


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are copied at forwards, and at construction. As DDP since 2.13."""
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, which still copies rank 0's "
            "buffers at construction.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    chosen = True if broadcast_buffers is None else broadcast_buffers
    return chosen, chosen
