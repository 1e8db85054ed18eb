"""The optimizer's state in memory that all ranks of a host have in common.

torch's optimizers make their state when they first need it. So after an update each rank looks for what is new in its
pieces; the ranks tell each other of it, make memory for all of it, and move it there. Each rank then sees the whole
state of each parameter as tensors of the parameter's shape.

A value that the user puts in the place of such an entry between steps is loaded, as from a state dict. Writing to an
entry is refused, since all ranks would have written to the same memory, one after another.
"""

import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from syncengine._C import CommonMemory, WatchedWeights, return_free_memory
from syncengine.errors import InvalidUsage, SyncError
from syncengine.sharded.agreement import gather_json
from syncengine.sharded.memory import FreedMemory, Host, Layout, create_common, size_of, tensors_in
from syncengine.sharded.shard import Piece, Shard

State = MutableMapping[torch.Tensor, dict[str, Any]]
Place = tuple[int, str]  # the parameter's number, and the key in its state

_NUMBERS: dict[str, type] = {"bool": bool, "int": int, "float": float}


class Entry(NamedTuple):
    """One item of one parameter's state, as all ranks have agreed on it."""

    kind: str  # "elements" with one for each of the parameter's, "tensor", "none", or one of _NUMBERS
    common: torch.Tensor  # the place of the item; for "none", its layout
    owner: int  # the first rank of the host that has a piece


class SharedState:
    """The state of one shard's parameters. ``whole`` is the optimizer's own. Lists its memory in ``memories``."""

    def __init__(
        self, host: Host, shard: Shard, names: Sequence[str], whole: State, memories: list[CommonMemory]
    ) -> None:
        self._host = host
        self._shard = shard
        self._names = names
        self._parameters = [parameter for parameter, _ in shard.members]
        self.whole = whole
        self.loaded = False  # whether there are other entries in it, for the next step to share
        self._problem = ""  # why this rank can't share what is in it
        self._entries: dict[Place, Entry] = {}
        self._numbers: list[Place] = []  # the entries that are no tensors
        self._installed: list[dict[str, Any]] = [{} for _ in shard.pieces]  # the pieces' state as it should be
        self._memories = memories
        self._own: list[CommonMemory] = []
        self._left = 0  # free bytes in the last one
        # Whether the class makes the state in its constructor, so only once; most classes make it in steps.
        self._is_made_once = any(shard.optimizer.state[piece.tensor] for piece in shard.pieces)
        self._note_whole()

    def digest(self) -> int:
        """CRC-32 of this state's entries in ``whole``."""
        value = 0
        for parameter in self._parameters:
            value = digest(self.whole.get(parameter, {}), value)
        return value

    # --- The functions below follow changes that the user's code makes to the state.

    def _note_whole(self) -> None:
        """Notes the entries in ``whole`` as they should be from now on."""
        self._states = list(map(self.whole.get, self._parameters))
        self._keys = [key for _, key in self._entries]  # each entry's key; below the dict that has it, and its value
        self._dicts = [self.whole[self._parameters[index]] for index, _ in self._entries]
        self._values = list(map(dict.get, self._dicts, self._keys))
        self._watched = WatchedWeights([value for value in self._values if isinstance(value, torch.Tensor)])

    def look(self, whole: State) -> str:
        """Notes values that the user has replaced in ``whole``. Returns a text about one written to or moved; or ""."""
        self.whole = whole
        if self.loaded:
            return ""
        if (index := self._watched.moved()) is not None:
            what = "lies in other memory than the other ranks' (by .data = ..., share_memory_(), or as it was sent)"
        elif (index := self._watched.written()) is not None:
            what = "was written to, in memory that all ranks share"
        else:
            pairs = zip(map(whole.get, self._parameters), self._states, strict=True)
            others = [here for here, before in pairs if here is not before and (here or before)]  # {}: was read
            self.loaded = bool(others) or not all(map(is_, map(dict.get, self._dicts, self._keys), self._values))
            return ""
        entries = zip(self._entries, self._values, strict=True)
        parameter, key = [place for place, value in entries if isinstance(value, torch.Tensor)][index]
        return (
            f"the state's {key!r} of parameter {self._names[parameter]} {what}: it is void. Load a checkpoint; "
            "next time put another value in its place, the same on all ranks, and send a clone()"
        )

    # --- Changes of the state by the optimizer

    def has_news(self) -> bool:
        """Whether this rank's pieces have state that is not common yet. Copies new values of common entries to them."""
        news, states = False, self._shard.optimizer.state
        for piece, installed in zip(self._shard.pieces, self._installed, strict=True):
            state = states[piece.tensor]
            if state.keys() == installed.keys() and all(map(is_, state.values(), installed.values())):
                continue  # the usual case
            for key, value in state.items():
                if key not in installed:
                    news = True
                elif value is not installed[key]:
                    if (followed := self._follow(piece, key, value, installed[key])) is None:
                        del installed[key]  # the value has another kind now, as a buffer that was None
                        news = True
                    else:
                        state[key] = installed[key] = followed
            if len(state) < len(installed):
                gone = next(key for key in installed if key not in state)
                self._problem, news = f"the optimizer has removed {gone!r} from its state: that can't be sharded", True
        return news

    def _follow(self, piece: Piece, key: str, value: Any, installed: Any) -> Any:
        """Copies ``value``, which the optimizer has put in the place of ``installed``, into common memory if it fits.

        Returns the value with which the optimizer is to go on; None if it needs other memory.
        """
        entry = self._entries[piece.index, key]
        if isinstance(value, torch.Tensor):
            like = isinstance(installed, torch.Tensor) and value.shape == installed.shape
            if like and value.dtype == installed.dtype and value.layout is installed.layout:
                return installed.copy_(value)
        elif type(value).__name__ == entry.kind:
            if entry.owner == self._host.rank:
                entry.common.fill_(value)
            return value
        return None

    def share(self) -> None:
        """Moves new entries into common memory. The ranks of all hosts call it; ``InvalidUsage`` is raised on all."""
        self.give()
        self.take()

    def give(self) -> None:
        """Copies new entries into common memory, and leaves ``whole`` as it is. All ranks call it."""
        mine: dict[str, Any] = {}
        error = self._problem
        try:
            mine = {} if error else self._describe_news()
        except InvalidUsage as problem:
            error = str(problem)
        answers = gather_json(self._host.communicator, {"error": error, "news": mine})
        for rank, answer in enumerate(answers):
            if answer["error"]:
                raise InvalidUsage(f"rank {self._host.communicator.global_ranks[rank]}: {answer['error']}")
        entries: dict[Place, tuple[str, Layout, int]] = {}
        for owner, rank in enumerate(self._host.members):
            for name, (kind, sizes, strides, dtype) in answers[rank]["news"].items():
                index, _, key = name.partition(" ")
                layout = Layout(tuple(sizes), tuple(strides), getattr(torch, dtype))
                entries.setdefault((int(index), key), (kind, layout, owner))
        tensors = self._tensors({place: layout for place, (_, layout, _) in entries.items()})
        for place, (kind, _, owner) in entries.items():
            self._entries[place] = Entry(kind, tensors[place], owner)
        self._numbers = [place for place, entry in self._entries.items() if entry.kind in _NUMBERS]
        self._move()
        self._host.communicator.barrier()

    def take(self) -> None:
        """Finishes give(): puts the entries into ``whole``. Neither raises nor waits."""
        self._show(self._entries)
        self.loaded = False
        self._note_whole()
        return_free_memory()  # a state that was loaded leaves some

    def _tensors(self, wanted: dict[Place, Layout]) -> dict[Place, torch.Tensor]:
        """Makes tensors in common memory for the wanted entries. All ranks call it.

        If the last memory has no room for them, a new one is larger by as much as all memories before it. Otherwise
        each step in which some parameter first has state would map another. Pages that nobody touches take no memory.
        """
        size = size_of(wanted.values())
        flag = torch.tensor([size > self._left], dtype=torch.int64, device="cpu")  # another host may need one
        self._host.communicator.all_reduce(flag, "max")
        if flag.item():
            what, more = "ShardedOptimizer: the state", sum(memory.bytes for memory in self._own)
            try:
                memory = create_common(self._host, what, size + more)
            except SyncError:
                if self._host.communicator.exception() is not None:
                    raise
                memory = create_common(self._host, what, size)  # memory is short on some rank
            self._memories.append(memory)
            self._own.append(memory)
            self._left = memory.bytes
        if not wanted:
            return {}
        memory, begin = self._own[-1], self._own[-1].bytes - self._left
        self._left -= size
        return dict(zip(wanted, tensors_in(memory, list(wanted.values()), begin), strict=True))

    def _describe_news(self) -> dict[str, tuple[str, Sequence[int], Sequence[int], str]]:
        news = {}
        for piece, installed in zip(self._shard.pieces, self._installed, strict=True):
            for key, value in self._shard.optimizer.state[piece.tensor].items():
                if key not in installed:
                    kind, layout = _describe(piece, key, value)
                    news[f"{piece.index} {key}"] = (kind, *layout[:2], str(layout.dtype).removeprefix("torch."))
        return news

    def _move(self) -> None:
        """Moves this rank's new values into common memory, and makes the optimizer go on with them there."""
        freed_memory = FreedMemory()
        for piece, installed in zip(self._shard.pieces, self._installed, strict=True):
            state = self._shard.optimizer.state[piece.tensor]
            for key in [key for key in state if key not in installed]:
                value = state[key]
                entry = self._entries[piece.index, key]
                owns = entry.owner == self._host.rank
                if entry.kind == "elements":
                    state[key] = piece.cut(entry.common)
                    state[key].copy_(value)
                elif entry.kind == "tensor" and owns:
                    state[key] = entry.common.copy_(value)
                elif entry.kind in _NUMBERS and owns:
                    entry.common.fill_(value)
                installed[key] = state[key]
                if isinstance(value, torch.Tensor):
                    nbytes = value.nbytes
                    del value
                    freed_memory.add(nbytes)
        freed_memory.end()

    def _show(self, places: Any) -> None:
        for index, key in places:
            entry = self._entries[index, key]
            whole = self.whole[self._parameters[index]]
            if entry.kind in ("elements", "tensor"):
                whole[key] = entry.common
            else:
                whole[key] = _NUMBERS[entry.kind](entry.common.item()) if entry.kind in _NUMBERS else None

    def note_update(self) -> None:
        """Notes an update by all ranks. Reads numbers in the state anew, since other ranks have changed some."""
        if self._numbers:
            self._show(self._numbers)
            self._note_whole()
        else:
            self._watched.note()

    def load(self) -> None:
        """Cuts ``whole``, which the user has filled, into this rank's pieces, for ``give`` to move to common memory."""
        self._problem, self.loaded = "", True  # until take(), so that a problem is told in each step
        self._shard.added_later -= {index for index, _ in self._entries}
        self._entries.clear()
        self._numbers.clear()
        self._note_whole()  # so nothing of the former entries stays alive
        for memory in self._own:
            self._memories.remove(memory)
        self._own.clear()
        self._left = 0
        self._installed = [{} for _ in self._shard.pieces]
        for piece in self._shard.pieces:
            state, here = {}, self.whole.get(piece.parameter, {})
            if not here and piece.index in self._shard.added_later:
                continue  # the class has made this state, or makes it when needed
            if self._is_made_once and not here:
                self._problem = (
                    f"the state of parameter {self._names[piece.index]} was removed, which this optimizer makes but "
                    "once: put other values in the place of its entries, the same on all ranks, or load_state_dict()"
                )
            for key, value in here.items():
                if isinstance(value, torch.Tensor):
                    if value.shape == piece.parameter.shape and value.dim() > 0:
                        value = piece.cut(piece.laid_out(value))
                    elif value.dim() > 0 and not piece.is_whole:
                        self._problem = _not_elementwise(key, value)
                    value = value.detach().clone()
                state[key] = value
            self._shard.optimizer.state[piece.tensor] = state


def digest(entries: Mapping[str, Any], start: int = 0) -> int:
    """CRC-32 of one parameter's state, continued from ``start``, the CRC-32 of others."""
    for value in entries.values():
        if isinstance(value, torch.Tensor):
            start = zlib.crc32(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data, start)
        else:
            start = zlib.crc32(repr(value).encode(), start)
    return start


def _describe(piece: Piece, key: str, value: Any) -> tuple[str, Layout]:
    if value is None or type(value).__name__ in _NUMBERS:
        kind = "none" if value is None else type(value).__name__
        return kind, Layout((), (), torch.float64 if kind == "float" else torch.int64)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        raise InvalidUsage(
            f"the optimizer keeps {key!r}, a {type(value).__name__}, which can't be shared between ranks"
        )
    if piece.is_whole:
        return "tensor", Layout.of(torch.empty_like(value, device="meta"))
    if value.dim() == 0:
        return "tensor", Layout.of(value)
    if value.shape == piece.tensor.shape:
        parameter = piece.parameter
        return "elements", Layout(tuple(parameter.shape), tuple(parameter.stride()), value.dtype)
    raise InvalidUsage(_not_elementwise(key, value))


def _not_elementwise(key: str, value: torch.Tensor) -> str:
    return (
        f"the optimizer keeps {key!r} of shape {tuple(value.shape)}, which is not one number for each element of a "
        "parameter: pass elements=False to ShardedOptimizer"
    )
