"""Flat buckets, as on a device, but in host memory: for a rank's body, or for a whole test."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from pool import RankPool

import syncengine
from syncengine._C import ReducerOptions


class Parallel(syncengine.Parallel):
    """With flat buckets, whatever its device."""

    def _reducer_options(self) -> ReducerOptions:
        options = super()._reducer_options()
        options.flat_buckets = True
        return options


@contextlib.contextmanager
def flat_buckets() -> Iterator[None]:
    """What makes a syncengine.Parallel makes this one."""
    with mock.patch.object(syncengine, "Parallel", Parallel):
        yield


def numerics_of(pool: RankPool) -> str:
    """One of them for each kind of buckets, in a test that runs with both: two ranks have the same bits in all."""
    return "rank_order" if pool.through is None else "ring"


def flat(body: Callable[..., Any], *arguments: Any) -> Any:
    """`body` on a rank, every Parallel in it with flat buckets."""
    with flat_buckets():
        return body(*arguments)
