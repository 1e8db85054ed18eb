"""``Parallel``, the wrapper around a model: its interface (wrapper.py), and its parts."""

from syncengine.parallel.wrapper import Parallel

__all__ = ["Parallel"]
