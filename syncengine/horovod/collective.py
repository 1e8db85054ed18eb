"""Calls that all ranks make together: where one raises before the others can have heard of its call, they hear why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from syncengine.horovod.process import calls

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def collective(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """For what begins by an announcement among the calls of the script, whatever it does before that."""

    @functools.wraps(call)
    def refusing(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with calls().refusing(call.__name__):
            return call(*args, **options)

    return refusing
