"""The buffers of a model: one rank's values are copied to all ranks, whenever a forward requires it."""

import contextlib
import hashlib
import warnings
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from syncengine._C import Reducer
from syncengine.errors import InvalidUsage, error_text, to_utf8
from syncengine.parallel.broadcast import TensorBroadcast, describe_layout
from syncengine.parallel.model import Model, Switches, not_ignored
from syncengine.parallel.replication import check_same_on_all_ranks, fail_all, own_name, unwrapped

_MOST_SHOWN = 200  # letters of buffers in a message


class Buffers:
    """The buffers of a model that are not ``ignored``: finds them, and synchronizes them when a forward requires it.

    Modules may replace their buffers, and the memory of these, even on one rank alone. If names, dtypes or shapes
    differ between ranks, a copy raises ``Mismatch`` on all of them. The first copy compares them in a message of its
    own, and names what differs; later copies compare them by the broadcast's ``layout``.
    """

    def __init__(self, model: Model, switches: Switches, reducer: Reducer, ignored: Container[str]) -> None:
        self._model, self._ignored = model, ignored
        self._switches = switches
        self._reducer = reducer
        self._communicator = model.communicator
        self._what = f"the buffers of {model}"
        self._places: list[Any] = []  # addresses and layouts of the buffers at the last copy
        self._lines: Sequence[str] = []  # the descriptions of these buffers
        self._layout = ""  # a short form of them for calls; "" before the first copy
        self.look_up()

    def look_up(self) -> None:
        """Looks up the buffers again: modules may have replaced theirs."""
        self.named = not_ignored(self._model.module.named_buffers(), self._ignored)

    def due(self) -> _BufferCommHookLocation | None:
        """When the next forward synchronizes buffers: before or after the module is called; None if it does not."""
        switches = self._switches
        if not (switches.require_forward_param_sync and switches.forward_sync_buffers and self.named):
            return None
        hook = self._hook()
        return _BufferCommHookLocation.PRE_FORWARD if hook is None else hook.buffer_comm_hook_location

    def begin_step(self) -> None:
        """Synchronizes buffers before a step of several forwards, so none of these has to. All ranks call it."""
        if self._switches.forward_sync_buffers and self.named:
            self.synchronize()
        self._switches.require_forward_param_sync = False

    def synchronize(self, root: int = 0) -> None:
        """Calls the user's hook on buffers, or without one copies rank ``root``'s values to all. All ranks call it."""
        self.look_up()
        hook = self._hook()
        if hook is None:
            self._copy(root)
            return
        try:
            with torch.autograd._unsafe_preserve_version_counter(tuple(self.named.values())):
                futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named)
        except Exception as error:
            if self._communicator.exception() is None:  # the others may wait in their hooks
                rank = own_name(self._communicator)
                self._communicator.abort(f"{rank} raised in its buffer hook: {error_text(error)}")
            raise
        if futures is not None:
            self._reducer.install_futures(futures)

    def _hook(self) -> _BufferCommHook | None:
        return getattr(self._switches, "buffer_hook", None)

    def _copy(self, root: int) -> None:
        """Copies values without changing version counters: backward does not raise if a graph has saved a buffer."""
        tensors = [tensor for _, tensor in unwrapped(self.named.items())]
        counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
        with torch.autograd._unsafe_preserve_version_counter(counted), torch.inference_mode():
            self._look_at(tensors)
            self._broadcast(tensors, root, self._layout)

    def _look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        places = []
        with contextlib.suppress(RuntimeError):  # one has no memory: below it is said which
            places = [*self.named, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors)]
        if places and places == self._places:
            return
        try:
            lines = describe_layout(list(self.named.items()))
        except InvalidUsage as error:  # the others would wait
            fail_all(self._communicator, error, f"{own_name(self._communicator)}: {error}")
        if not self._layout:
            check_same_on_all_ranks(self._communicator, f"{self._what} differ", lines)
        if not self._layout or lines != self._lines:
            self._broadcast = TensorBroadcast(self._communicator, tensors, self._model.device)
            text = ", ".join(sorted(lines, key=self._lines.__contains__))  # first what has changed
            digest = hashlib.sha256(to_utf8("\n".join(lines))).hexdigest()[:16]
            self._layout = f"a copy of {self._what} ({text[:_MOST_SHOWN]}, digest {digest})"
            self._lines = lines
        self._places = places  # last: what has raised is looked at again


def named_state(model: Model, buffers: Buffers | None) -> list[tuple[str, torch.Tensor]]:
    """The tensors that are to be the same on all ranks: parameters, and ``buffers`` if any."""
    named: list[tuple[str, torch.Tensor]] = list(zip(model.names, model.parameters, strict=True))
    return named if buffers is None else [*named, *buffers.named.items()]


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Returns whether buffers are copied at forwards, and whether at construction, by DDP's arguments since 2.13."""
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
