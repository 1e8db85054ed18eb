"""``Parallel``, the wrapper around a model: its face (wrapper.py), and what it is made of."""

from syncengine.parallel.wrapper import Parallel

__all__ = ["Parallel"]
