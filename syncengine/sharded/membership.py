"""Which of an optimizer's parameters are shared."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from syncengine.sharded.block import Block
from syncengine.sharded.shard import Member, members_of

Groups = list[dict[str, Any]]


class Membership:
    """Looks for them anew where parameter groups have changed since."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self.names: Any = WeakIdKeyDictionary()  # of the parameters of the models that it updates
        self._sizes: list[int] | None = None  # of the groups when it looked; None: look again
        self._parameters: list[torch.Tensor] = []
        self._unshared: list[Member] = []
        self._strays: list[torch.Tensor] = []  # shared, but not in the group any more that they were in then

    def look_again(self) -> None:
        """There are more blocks."""
        self._sizes = None

    def unshared(self, groups: Groups) -> list[Member]:
        """The parameters that are not, or not yet; the same list while they are the same."""
        self._look(groups)
        return self._unshared

    def late(self, groups: Groups) -> list[Member]:
        """Parameters that were frozen, and have a gradient now."""
        return [m for m in self.unshared(groups) if m.parameter.grad is not None and m.parameter in self.names]

    def edited(self, groups: Groups) -> str:
        """Says which shared parameter is not where it was; or an empty text."""
        self._look(groups)
        if not self._strays:
            return ""
        return (
            f"parameter {self.names[self._strays[0]]} is not in the group any more in which it was shared: to "
            "change groups, release() this ShardedOptimizer and make another one"
        )

    def _look(self, groups: Groups) -> None:
        sizes = [len(group["params"]) for group in groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        if self._sizes == sizes and all(map(is_, parameters, self._parameters)):
            return
        self._sizes, self._parameters = sizes, parameters
        members = members_of(groups)
        shared = [member for block in self._blocks for member in block.shard.members]
        ids = {id(parameter) for parameter, _ in shared}
        self._unshared = [member for member in members if id(member.parameter) not in ids]
        groups_of = {id(parameter): group for parameter, group in members}
        self._strays = [parameter for parameter, group in shared if groups_of.get(id(parameter)) != group]
