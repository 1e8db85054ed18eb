"""Parameters in memory that all ranks of a host have in common: how they get there, and whether somebody writes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from syncengine._C import CommonMemory, WatchedWeights, return_free_memory
from syncengine.errors import to_utf8
from syncengine.parallel.watchers import common
from syncengine.sharded.agreement import agree
from syncengine.sharded.memory import FreedMemory, Host, Layout, create_common, flat, size_of, tensors_in

_LOOK = "Give them the same values on every rank before the first step."


class Named(NamedTuple):
    """A parameter, and what messages call it."""

    name: str
    parameter: torch.nn.Parameter


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the elements in the order in which they lie in memory."""
    values = tensor.detach().resolve_conj().resolve_neg()
    return zlib.crc32(flat(values).view(torch.uint8).numpy().data)


class SharedWeights:
    """Parameters in common memory; what they were like when this rank last looked, so that it sees who has written."""

    def __init__(self, host: Host, named: Sequence[Named], memories: list[CommonMemory]) -> None:
        """``memories``: those in which parameters lie, which a failure is to make private; it is added to them."""
        self._host = host
        self._memories = memories
        self.named = list(named)
        self.parameters = [parameter for _, parameter in named]
        self.loaded = False  # load_state_dict() has put them into private memory, for the next step to share
        self.watched = WatchedWeights(self.parameters)
        self._layouts = [Layout.of(parameter) for parameter in self.parameters]
        self.memory = create_common(host, "ShardedOptimizer: the weights", size_of(self._layouts))
        self._common = tensors_in(self.memory, self._layouts)
        self._addresses = [memory.data_ptr() for memory in self._common]
        self.give()
        self.take()

    def give(self) -> None:
        """The common memory gets the values that parameters have now; only the host's first rank moves. Collective.

        Raises ``Mismatch`` on all ranks, naming the parameter, where they have different ones.
        """
        self._renew()
        sums = [checksum(parameter) for parameter in self.parameters]
        lines = [
            f"{name}: {str(p.dtype).removeprefix('torch.')} {tuple(p.shape)} strides {p.stride()}, CRC-32 {value:08x}"
            for (name, p), value in zip(self.named, sums, strict=True)
        ]
        communicator = self._host.communicator
        what = "a parameter of ShardedOptimizer differs"
        agree(communicator, what, to_utf8("\n".join(lines)), lambda: lines, "", lambda: _LOOK)
        if self.memory not in self._memories:
            self._memories.append(self.memory)
        freed_memory = FreedMemory()
        if self._host.rank == 0:
            for memory, parameter in zip(self._common, self.parameters, strict=True):
                parameter.data = memory.copy_(parameter.detach())  # at once: else there were two of all for a moment
                freed_memory.add(memory.nbytes)
        freed_memory.end()
        communicator.barrier()

    def take(self) -> None:
        """All parameters move there: the second half of that, which nothing interrupts."""
        for memory, parameter in zip(self._common, self.parameters, strict=True):
            parameter.data = memory
            common[parameter] = True
        return_free_memory()
        self.loaded = False
        self.watched = WatchedWeights(self.parameters)

    def unload(self) -> None:
        """What load_state_dict() is about to write goes into memory of this rank alone."""
        if self.loaded:
            return
        for parameter in self.parameters:
            parameter.data = parameter.detach().clone()
            common.pop(parameter, None)
        self.loaded = True

    def _renew(self) -> None:
        """``share_memory_()``, or sending a tensor to a process, moves what its storage holds, and all that have it."""
        if any(memory.data_ptr() != at for memory, at in zip(self._common, self._addresses, strict=True)):
            self._common = tensors_in(self.memory, self._layouts)

    def note_update(self, written: bytes | None = None) -> None:
        """All ranks have updated those that are ``written``, by their numbers, or all.

        Graphs that hold them as they were must not be used any more.
        """
        if written is None or all(written):
            self.watched.note_update()
        elif any(written):
            torch.autograd.graph.increment_version(itertools.compress(self.parameters, written))
            self.watched.note()

    def written_by_this_rank(self) -> str:
        """Says which parameter was written to, or moved, by other code than an update; or an empty text."""
        if self.loaded:
            return ""
        if (index := self.watched.moved()) is not None:
            return (
                f"parameter {self.named[index].name} lies in other memory than the other ranks', or has another shape "
                "or strides there (by p.data = ..., .half().float(), share_memory_() or the like), so they do not see "
                "what becomes of it"
            )
        if (index := self.watched.written()) is not None:
            return (
                f"parameter {self.named[index].name} was written to outside of ShardedOptimizer.step(), in memory that "
                "all ranks share: the weights are void. Continue from a checkpoint; to change weights, call "
                "load_state_dict() of the module on all ranks"
            )
        return ""
