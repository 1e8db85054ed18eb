"""Which cases of a parametrized test stay in CI."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_nightly(values: Iterable[Any], *kept: int) -> list[Any]:
    """A parameter's `values`, those at the places `kept` as they are and all others marked `nightly`.

    A value of several parameters is a tuple.
    """
    cases = [value if isinstance(value, type(pytest.param())) else pytest.param(*_all(value)) for value in values]
    assert set(kept) <= set(range(len(cases))), f"there are {len(cases)} cases, and none at some of the places {kept}"
    return [
        case if place in kept else pytest.param(*case.values, marks=[*case.marks, pytest.mark.nightly], id=case.id)
        for place, case in enumerate(cases)
    ]


def _all(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


# For a test with `kinds_of_buckets`: CI tries those of CPUs alone. Its place is next to the function or run_on_ranks.
flat_at_night = pytest.mark.parametrize("kinds_of_buckets", mostly_nightly(["in place", "flat"], 0), indirect=True)
