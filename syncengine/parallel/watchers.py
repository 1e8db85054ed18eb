"""All ``Parallel``s of this process, and who is told of their forwards: optimizers, which are a layer above."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

from syncengine.parallel.model import Model

_numbers = itertools.count()
models: weakref.WeakValueDictionary[int, Model] = weakref.WeakValueDictionary()  # in the order of their making
forward_watchers: list[Callable[[Model], None]] = []  # called before each forward; may raise


def register(model: Model) -> None:
    """From now on it is among ``models``."""
    models[next(_numbers)] = model
