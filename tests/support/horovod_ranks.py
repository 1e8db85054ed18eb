"""Tests of syncengine.horovod on ranks."""

import functools
from collections.abc import Callable
from typing import Any

from pool import run_on_ranks

import syncengine.horovod as hvd


def run_with_hvd(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """`run_on_ranks`, which has these options, with hvd.init() before the function."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def initialized(**arguments: Any) -> Any:
            hvd.init()
            return function(**arguments)

        return run_on_ranks(**options)(initialized)

    return decorate
