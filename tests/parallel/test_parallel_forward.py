"""The way of a forward through Python, which every step pays for: how many calls it makes."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from parallel_models import data, small
from pool import run_on_ranks

import syncengine

MOST = 10
# Modules that a forward calls only where an earlier test of the same process has made a ShardedOptimizer, or has
# imported torch's optimizers in backward.
BY_EARLIER_TESTS = ("syncengine.sharded.", "syncengine.parallel.optimizers.")


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
@run_on_ranks()
def test_a_forward_makes_few_calls(options: dict[str, bool]):
    """Functions of syncengine that are called in a forward, in turn; torch's, and the module's own, are not counted."""
    model = syncengine.Parallel(small(), **options)
    for i in range(4):
        model(data(i)).sum().backward()
    calls, batch = [], data(5)

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and f"{name}.".startswith("syncengine.") and not f"{name}.".startswith(BY_EARLIER_TESTS):
            calls.append(f"{name}.{frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        output = model(batch)
    finally:
        sys.setprofile(before)
    output.sum().backward()
    assert len(calls) <= MOST, calls
    assert "syncengine.parallel.steps.forward" in calls
