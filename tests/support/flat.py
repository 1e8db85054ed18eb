"""Flat buckets, as on a device, but in host memory: for a rank's body, or for a whole test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import syncengine


@contextlib.contextmanager
def flat_buckets() -> Iterator[None]:
    syncengine.Parallel._flat_buckets = True
    try:
        yield
    finally:
        syncengine.Parallel._flat_buckets = False


def flat(body: Callable[..., Any], *arguments: Any) -> Any:
    """`body` on a rank, every Parallel in it with flat buckets."""
    with flat_buckets():
        return body(*arguments)
