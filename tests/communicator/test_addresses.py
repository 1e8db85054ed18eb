"""Every process maps the arenas of all ranks of its host: they have to fit into its addresses."""

import re
import resource
from pathlib import Path

import pytest
import torch
from pool import run_on_ranks

import syncengine
from syncengine.errors import InvalidUsage


@run_on_ranks(world=3, spawned=True, settings=None)
def test_default_arenas_leave_room_below_a_limit():
    """Of 8 GiB more than are mapped already."""
    mapped = int(re.search(r"VmSize:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 8 * 2**30, mapped + 8 * 2**30))
    syncengine.init(timeout=30)
    tensor = syncengine.empty(1000).fill_(1)
    syncengine.all_reduce(tensor)
    model = syncengine.Parallel(torch.nn.Linear(256, 256))
    model(torch.ones(1, 256)).sum().backward()
    assert tensor[0] == 3


@run_on_ranks(world=3, spawned=True, settings=None)
def test_too_many_addresses_are_an_error_that_says_what_to_set():
    with pytest.raises((InvalidUsage, syncengine.errors.Aborted)) as caught:
        syncengine.init(timeout=30, arena_bytes=2**46)
    assert re.search(r"rank \d can't map the memory of rank \d", str(caught.value))
    assert "lower SYNCENGINE_ARENA_BYTES on all ranks" in str(caught.value)
