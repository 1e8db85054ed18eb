"""``Parallel``, the wrapper around a model: its interface (wrapper.py), and a module for each of its parts."""

from syncengine.parallel.wrapper import Parallel

__all__ = ["Parallel"]
