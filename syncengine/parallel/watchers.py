"""All ``Parallel``s of this process. Sharded optimizers, a layer above, register to be told of their forwards."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from syncengine.parallel.model import Model
from syncengine.parallel.rounds import Round

models: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # as they were made
model_numbers = itertools.count()  # gives each model its key in ``models``
forward_watchers: list[Callable[[Any], None]] = []  # called before each forward, and at the begin of join(); may raise
common: Any = WeakIdKeyDictionary()  # parameters that lie in memory that all ranks share
_followers: weakref.WeakKeyDictionary[Model, list[weakref.WeakMethod[Callable[[Round], None]]]] = (
    weakref.WeakKeyDictionary()
)


def take_part(model: Model, follow: Callable[[Round], None]) -> int:
    """Registers ``follow``, which steps an optimizer on a rank without a batch. Returns the optimizer's number."""
    followers = _followers.setdefault(model, [])
    followers.append(weakref.WeakMethod(follow))
    return len(followers)


def follow_step(model: Model, current: Round) -> None:
    """Takes part, on a rank without a batch, in the optimizer's step that the others announced in ``current``."""
    follow = _followers[model][current.steps - 1]()
    if follow is not None:
        follow(current)
