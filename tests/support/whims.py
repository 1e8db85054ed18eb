"""Disturbances of a training in which nobody dies: Python's collector at any place, and errors that somebody keeps."""

import gc
import random
from typing import Any


class Leaving(Exception):
    """The error by which a step is left."""


class Whim:
    """The collector, at places drawn by a seed; and errors that somebody keeps for a while."""

    def __init__(self, seed: object) -> None:
        self.random = random.Random(str(seed))
        self.kept: list[Any] = []

    def __call__(self) -> None:
        draw = self.random.random()
        if draw < 0.1:
            self.kept.clear()
        if draw < 0.4:
            gc.collect()
