"""Steps while some ranks have run out of batches: these ranks still have their part of the weights to update.

Such ranks have no gradients of their own. A rank that trains sends them its gradients as they are when it steps, so
that clipping and the like count; and the options of its parameter groups, which a scheduler may have changed.
"""

from collections.abc import Callable

import torch
from torch.distributed.algorithms.join import JoinHook

from syncengine.errors import InvalidUsage
from syncengine.parallel import Parallel
from syncengine.parallel.rounds import Intent, Round, tell
from syncengine.sharded.agreement import gather_json
from syncengine.sharded.shard import Groups, members_of, options_of, plain_data, take_option
from syncengine.sharded.sharing import Sharing
from syncengine.sharded.state import State


def announce_step(sharing: Sharing, number: Callable[[Parallel], int], in_torch_join: bool) -> Round | None:
    """Tells ranks without a batch that a step comes. Returns the ``Round``; None outside of a join context."""
    for known in sharing.models:
        if (model := known()) is None or not model._join_config.enable or sharing.host is None:
            continue
        if model._join_config.is_first_joinable and not in_torch_join:
            raise InvalidUsage("torch's Join needs the ShardedOptimizer as well: Join([model, optimizer])")
        return model._steps.uneven.tell(Intent(1.0, steps=float(number(model))), model._join_config)
    return None


def catch_up(sharing: Sharing, groups: Groups, state: State, current: Round | None) -> None:
    """Prepares a step. All ranks call it. ``current`` is the result of ``announce_step``.

    Moves parameters that were frozen, and have a gradient now, into shared memory. Ranks that have run out of batches
    get the gradients and options of the first rank that trains.
    """
    late = sharing.registry.late(groups)
    if current is None and not late:
        return  # the usual case
    if current is None or sharing.host is None or len(current.training) == len(current.intents):
        sharing.share(late, groups, state)
        return
    communicator = sharing.host.communicator
    source, trains = current.training[0], communicator.rank in current.training
    members = members_of(groups)
    late_ones = {id(member.parameter) for member in late}
    sent = {
        "options": [{k: plain_data(v) for k, v in options_of(group).items()} for group in groups],
        "late": [place for place, member in enumerate(members) if id(member.parameter) in late_ones],
        "has": [member.parameter.grad is not None for member in members],
    }
    told = gather_json(communicator, sent if trains else None)[source]
    sharing.share(late if trains else [members[place] for place in told["late"]], groups, state)
    has_gradient = {id(m.parameter): has for m, has in zip(members, told["has"], strict=True)}
    for parameter in (parameter for block in sharing.blocks for parameter in block.weights.parameters):
        has = has_gradient[id(parameter)]
        if not trains:
            parameter.grad = torch.empty_like(parameter) if has else None
        if has:
            grad = parameter.grad
            if grad is None or grad.stride() != parameter.stride():
                same = torch.empty_like(parameter)
                parameter.grad = same if grad is None else same.copy_(grad)
            assert parameter.grad is not None
            communicator.broadcast(parameter.grad.detach(), source)
    if not trains:
        for group, theirs in zip(groups, told["options"], strict=True):
            for key, value in theirs.items():
                take_option(group, key, value)


class StepHook(JoinHook):
    """The hook that torch's ``Join`` calls on a rank that has run out of batches."""

    def __init__(self, sharing: Sharing, follow: Callable[[Round], None]) -> None:
        self._sharing, self._follow = sharing, follow

    def main_hook(self) -> None:
        """Takes part in a step of the other ranks."""
        if self._sharing.host is None:
            return
        current = tell(self._sharing.host.communicator, Intent(trains=0.0))
        current.check()
        if current.steps:
            self._follow(current)
