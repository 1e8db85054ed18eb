"""Parameters in memory that all ranks of a host have in common: moves them there, and notices writes to them."""

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


class Named(NamedTuple):
    """A parameter, and its name in messages."""

    name: str
    parameter: torch.nn.Parameter


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the elements in the order in which they lie in memory."""
    values = tensor.detach().resolve_conj().resolve_neg()
    return zlib.crc32(flat(values).view(torch.uint8).numpy().data)


class SharedWeights:
    """Parameters in common memory. Keeps their versions as of this rank's last look, to notice writes to them since."""

    def __init__(self, host: Host, named: Sequence[Named], memories: list[CommonMemory]) -> None:
        """Makes common memory, for ``give()`` to fill and add to ``memories``, all of which a failure makes private."""
        self._host = host
        self._memories = memories
        self.named = list(named)
        self.parameters = [parameter for _, parameter in named]
        self.loaded = False  # load_state_dict() has put them into private memory, for the next step to share
        self._layouts = [Layout.of(parameter) for parameter in self.parameters]
        self.memory = create_common(host, "ShardedOptimizer: the weights", size_of(self._layouts))
        self._common = tensors_in(self.memory, self._layouts)
        self._addresses = [memory.data_ptr() for memory in self._common]

    def give(self) -> None:
        """Copies the parameters' values into common memory, from the host's first rank. All ranks call it.

        Raises ``Mismatch`` on all ranks, naming the parameter, if ranks have different values.
        """
        moved = [memory.data_ptr() != at for memory, at in zip(self._common, self._addresses, strict=True)]
        if any(moved):  # share_memory_(), or sending a tensor to a process, moves the storage, and all tensors of it
            self._common = tensors_in(self.memory, self._layouts)
        sums = [checksum(parameter) for parameter in self.parameters]
        lines = [
            f"{name}: {str(p.dtype).removeprefix('torch.')} {tuple(p.shape)} strides {p.stride()}, CRC-32 {value:08x}"
            for (name, p), value in zip(self.named, sums, strict=True)
        ]
        communicator = self._host.communicator
        what = "a parameter of ShardedOptimizer differs"
        remedy = "Give them the same values on every rank before the first step."
        agree(communicator, what, to_utf8("\n".join(lines)), lambda: lines, "", lambda: remedy)
        if self.memory not in self._memories:
            self._memories.append(self.memory)
        freed_memory = FreedMemory()
        if self._host.rank == 0:
            for memory, parameter in zip(self._common, self.parameters, strict=True):
                parameter.data = memory.copy_(parameter.detach())  # one by one: never two copies of all
                freed_memory.add(memory.nbytes)
        freed_memory.end()
        communicator.barrier()

    def take(self) -> None:
        """Finishes give(): makes all parameters use the tensors in common memory. Neither raises nor waits."""
        for memory, parameter in zip(self._common, self.parameters, strict=True):
            parameter.data = memory
            common[parameter] = True
        return_free_memory()
        self.loaded = False
        self.watched = WatchedWeights(self.parameters)

    def unload(self) -> None:
        """Moves the parameters into memory of this rank alone, for load_state_dict() to write to them."""
        if self.loaded:
            return
        for parameter in self.parameters:
            parameter.data = parameter.detach().clone()
            common.pop(parameter, None)
        self.loaded = True

    def note_update(self, written: bytes) -> None:
        """Notes that all ranks have updated the parameters that are ``written``, a byte for each.

        It raises their versions, so that autograd refuses graphs that hold the old values.
        """
        if all(written):
            self.watched.note_update()
        elif any(written):
            torch.autograd.graph.increment_version(itertools.compress(self.parameters, written))
            self.watched.note()

    def written_by_this_rank(self) -> str:
        """A text that names a parameter that other code than an update has written to, or moved; or an empty text."""
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
