"""The optimizer's state in memory that all ranks of a host have in common.

torch's optimizers make their state when they first need it. So after an update each rank looks for what is new in its
pieces; the ranks tell each other of it, make memory for all of it, and move it there. Each rank then sees the whole
state of each parameter as tensors of the parameter's shape.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from syncengine._C import CommonMemory, WatchedWeights, return_free_memory
from syncengine.errors import InvalidUsage, SyncError
from syncengine.sharded.agreement import gather_texts
from syncengine.sharded.memory import FreedMemory, Host, Layout, create_common, size_of, tensors_in
from syncengine.sharded.shard import Piece, Shard

State = MutableMapping[torch.Tensor, dict[str, Any]]
Place = tuple[int, str]  # the parameter's number, and the key in its state

_NUMBERS: dict[str, type] = {"bool": bool, "int": int, "float": float}


class Entry(NamedTuple):
    """One item of one parameter's state, as all ranks have agreed on it."""

    kind: str  # "elements", one for each of the parameter's; "tensor"; "none"; or of _NUMBERS
    common: torch.Tensor  # where it lies; what it is like, of "none"
    owner: int  # the first rank of the host that has a piece


class SharedState:
    """The state of one shard's parameters. ``whole`` is the sharded optimizer's own ``state``.

    ``memories``: a list of what is shared, which it keeps up to date.
    """

    def __init__(self, host: Host, shard: Shard, whole: State, memories: list[CommonMemory]) -> None:
        self._host = host
        self._shard = shard
        self.whole = whole
        self._entries: dict[Place, Entry] = {}
        self.numbers: list[Place] = []  # of these, what are no tensors
        self._installed: list[dict[str, Any]] = [{} for _ in shard.pieces]  # what this rank's pieces should have
        self._before: WatchedWeights | None = None  # of this rank's pieces and their state
        self._memories = memories
        self._own: list[CommonMemory] = []
        self._left = 0  # bytes of the last one
        self.is_made_in_steps = not any(map(shard.state_of, shard.pieces))  # as by most; else at first

    def keys(self) -> list[list[str]]:
        """Of the entries of each parameter."""
        found: list[list[str]] = [[] for _ in self._shard.members]
        for index, key in self._entries:
            found[index].append(key)
        return found

    def digest(self, start: int) -> int:
        """Of what ``whole`` has of it; continues that of others."""
        for member in self._shard.members:
            start = digest(self.whole.get(member.parameter, {}), start)
        return start

    def note(self) -> None:
        """This rank's pieces are about to be updated."""
        if self._before is not None:
            self._before.note()
            return
        entries = [value for installed in self._installed for value in installed.values()]
        tensors = [value for value in entries if isinstance(value, torch.Tensor)]
        self._before = WatchedWeights([*(piece.tensor for piece in self._shard.pieces), *tensors])

    def is_as_noted(self) -> bool:
        """Whether neither these pieces nor their state were written to; there may be more state, as it was made."""
        if self._before is None or self._before.written() is not None:
            return False
        for piece, installed in zip(self._shard.pieces, self._installed, strict=True):
            state = self._shard.state_of(piece)
            if any(state.get(key, self) is not value for key, value in installed.items()):
                return False
            more = [value for key, value in state.items() if key not in installed]
            if any(isinstance(value, torch.Tensor) and value._version for value in more):
                return False
        return True

    def has_news(self) -> bool:
        """Whether this rank's pieces have state that is not common yet. Follows what the optimizer has replaced."""
        news, states = False, self._shard.optimizer.state
        for piece, installed in zip(self._shard.pieces, self._installed, strict=True):
            state = states[piece.tensor]
            if state.keys() == installed.keys() and all(map(is_, state.values(), installed.values())):
                continue  # as in most steps
            for key, value in state.items():
                if key not in installed:
                    news = True
                elif value is not installed[key]:
                    if (followed := self._follow(piece, key, value, installed[key])) is None:
                        del installed[key]  # it has another kind now, as a buffer that was None
                        news = True
                    else:
                        state[key] = installed[key] = followed
            if len(state) < len(installed):
                gone = next(key for key in installed if key not in state)
                raise InvalidUsage(f"the optimizer has removed {gone!r} from its state: that can't be sharded")
        return news

    def _follow(self, piece: Piece, key: str, value: Any, installed: Any) -> Any:
        """The optimizer has put ``value`` in the place of ``installed``: the common memory gets it, if it has room.

        Returns what the optimizer is to go on with; None if it needs other memory.
        """
        entry = self._entries[piece.index, key]
        if isinstance(value, torch.Tensor):
            if isinstance(installed, torch.Tensor) and _is_like(value, installed):
                return installed.copy_(value)
        elif type(value).__name__ == entry.kind:
            if entry.owner == self._host.rank:
                entry.common.fill_(value)
            return value
        return None

    def share(self, error: str = "") -> None:
        """Moves what is new into common memory. Collective over all hosts: raises ``InvalidUsage`` on all of them.

        ``error``: why this rank can't.
        """
        self.give(error)
        self.take()

    def give(self, error: str = "") -> None:
        """The first half: the common memory has all of it, ``whole`` is as it was. Collective."""
        mine: dict[str, Any] = {}
        try:
            mine = {} if error else self._describe_news()
        except InvalidUsage as problem:
            error = str(problem)
        texts = gather_texts(self._host.communicator, json.dumps({"error": error, "news": mine}))
        answers = [json.loads(text) for text in texts]
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
        self.numbers = [place for place, entry in self._entries.items() if entry.kind in _NUMBERS]
        self._move()
        self._host.communicator.barrier()

    def take(self) -> None:
        """The second half, which nothing interrupts."""
        self._show(self._entries)
        return_free_memory()  # of a state that was loaded

    def _tensors(self, wanted: dict[Place, Layout]) -> dict[Place, torch.Tensor]:
        """Common memory for these. Collective. Where the last one has no room for them, the next has as much again as
        all before it: else each step in which some parameter first has state would map more. What nobody touches takes
        none.
        """
        size = size_of(wanted.values())
        flag = torch.tensor([size > self._left], dtype=torch.int64, device="cpu")  # on another host, perhaps
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
            for key, value in self._shard.state_of(piece).items():
                if key not in installed:
                    kind, layout = _describe(piece, key, value)
                    news[f"{piece.index} {key}"] = (kind, *layout[:2], str(layout.dtype).removeprefix("torch."))
        return news

    def _move(self) -> None:
        """This rank's new values go where they belong, and the optimizer goes on with them there."""
        self._before = None
        freed_memory = FreedMemory()
        for piece, installed in zip(self._shard.pieces, self._installed, strict=True):
            state = self._shard.state_of(piece)
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
            whole = self.whole[self._shard.members[index].parameter]
            if entry.kind in ("elements", "tensor"):
                whole[key] = entry.common
            else:
                whole[key] = _NUMBERS[entry.kind](entry.common.item()) if entry.kind in _NUMBERS else None

    def read_numbers(self) -> None:
        """Brings the numbers of parameters that other ranks update. After an update."""
        self._show(self.numbers)

    def load(self) -> None:
        """Gives this rank's pieces their part of ``whole``, which somebody has filled; to be shared then."""
        self._before = None
        self._entries.clear()
        self.numbers.clear()
        for memory in self._own:
            self._memories.remove(memory)
        self._own.clear()
        self._left = 0
        self._installed = [{} for _ in self._shard.pieces]
        for piece in self._shard.pieces:
            state = {}
            for key, value in self.whole.get(piece.parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    if value.shape == piece.parameter.shape and value.dim() > 0:
                        value = piece.cut(piece.laid_out(value))
                    elif value.dim() > 0 and not piece.is_whole:
                        raise InvalidUsage(_not_elementwise(key, value))
                    value = value.detach().clone()
                state[key] = value
            self._shard.set_state_of(piece, state)


def digest(entries: Mapping[str, Any], start: int = 0) -> int:
    """CRC-32 of one parameter's state; continues that of others."""
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


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.layout is other.layout


def _not_elementwise(key: str, value: torch.Tensor) -> str:
    return (
        f"the optimizer keeps {key!r} of shape {tuple(value.shape)}, which is not one number for each element of a "
        "parameter: pass elements=False to ShardedOptimizer"
    )
