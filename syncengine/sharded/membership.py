"""Which of an optimizer's parameters are shared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from syncengine.sharded.block import Block
from syncengine.sharded.shard import Member, members_of

Groups = list[dict[str, Any]]
_parameters = itemgetter("params")


class Membership:
    """Looks for them anew where parameter groups have changed since."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self.names: Any = WeakIdKeyDictionary()  # of the parameters of the models that it updates
        self._sizes: list[int] | None = None  # of the groups when it looked; None: look again
        self._parameters: list[torch.Tensor] = []
        self._unshared: list[Member] = []  # the same list while they are the same
        self.strays: list[torch.Tensor] = []  # shared, but not in the group any more that they were in then

    def look_again(self) -> None:
        """There are more blocks."""
        self._sizes = None

    def unshared(self, groups: Groups) -> list[Member]:
        """The parameters that are not, or not yet; the same list while they are the same."""
        lists = list(map(_parameters, groups))
        sizes, parameters = list(map(len, lists)), list(chain.from_iterable(lists))
        if self._sizes == sizes and all(map(is_, parameters, self._parameters)):
            return self._unshared
        self._sizes, self._parameters = sizes, parameters
        members = members_of(groups)
        shared = [member for block in self._blocks for member in block.shard.members]
        ids = {id(parameter) for parameter, _ in shared}
        self._unshared = [member for member in members if id(member.parameter) not in ids]
        groups_of = {id(parameter): group for parameter, group in members}
        self.strays = [parameter for parameter, group in shared if groups_of.get(id(parameter)) != group]
        return self._unshared

    def late(self, groups: Groups) -> list[Member]:
        """Parameters that were frozen, and have a gradient now."""
        found = []
        for member in self.unshared(groups):
            if member.parameter.grad is not None and member.parameter in self.names:
                found.append(member)
        return found

    def edited(self) -> str:
        """Says which shared parameter was not where it had been when this rank last looked; there is one."""
        return (
            f"parameter {self.names[self.strays[0]]} is not in the group any more in which it was shared: to "
            "change groups, release() this ShardedOptimizer and make another one"
        )
