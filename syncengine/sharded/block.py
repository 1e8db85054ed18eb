"""A block: parameters that came into shared memory together, with the shard and the state that update them."""

import contextlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from syncengine._C import CommonMemory
from syncengine.errors import InvalidUsage
from syncengine.sharded.agreement import agree
from syncengine.sharded.claims import Claim, claim, stop_forwards
from syncengine.sharded.memory import Host
from syncengine.sharded.shard import Member, Shard, cut_elements, deal_whole
from syncengine.sharded.state import SharedState
from syncengine.sharded.weights import Named, SharedWeights


class Block:
    """Weights, this rank's shard of them, and its state. All ranks make a block together, of the same parameters.

    ``make_shard`` calls the user's class. If that raises on one rank, all raise, and the weights are private again.
    """

    def __init__(
        self,
        host: Host,
        make_shard: Callable[..., Shard],
        cuts: bool,
        groups: Sequence[Mapping[str, Any]],
        members: Sequence[Member],
        named: Sequence[Named],
        state: MutableMapping[torch.Tensor, dict[str, Any]],
        memories: list[CommonMemory],
    ) -> None:
        with contextlib.ExitStack() as undoing:  # also for Ctrl-C: all could write to shared weights that none claims
            undoing.callback(memories.__delitem__, slice(len(memories), None))
            self.weights = SharedWeights(host, named, memories)
            undoing.callback(self.weights.unload)
            self.weights.give()
            self.weights.take()
            sizes = [(member.parameter.numel(), member.parameter.element_size()) for member in members]
            slices = (cut_elements if cuts else deal_whole)(sizes, host.size)[host.rank]
            error = ""
            try:
                self.shard = make_shard(groups, members, slices, is_common=True)
            except InvalidUsage as failure:
                error = str(failure)
            agree(host.communicator, "", b"", list, error, str)
            self.state = SharedState(host, self.shard, [one.name for one in named], state, memories)
            if any(state.get(member.parameter) for member in members):
                self.state.load()
            self.claims: list[Claim] = [claim(one.parameter, one.name, self.weights) for one in named]
            undoing.pop_all()

    def give_loaded(self) -> None:
        """Copies loaded weights and state into the common memory. All ranks call it; ``Mismatch`` if weights differ."""
        if self.weights.loaded:
            self.weights.give()
        if self.state.loaded:
            self.state.load()
            self.state.give()

    def take_loaded(self) -> None:
        """Finishes give_loaded(): switches to the loaded tensors in common memory. Neither raises nor waits."""
        if self.weights.loaded:
            self.weights.take()
            self.shard.follow()
        if self.state.loaded:
            self.state.take()


def part(memories: Sequence[CommonMemory], claims: Sequence[Claim], torn: str = "") -> bool:
    """Makes ``memories`` private to this rank; False if memory is short. ``torn``: why weights are void, if so."""
    parted = True
    for memory in memories:
        try:
            parted &= memory.detach()
        except MemoryError:
            parted = False
    for one in claims:
        if torn:
            one.tear(torn)
        if parted:
            one.give_up()
    if torn:
        stop_forwards()
    return parted
