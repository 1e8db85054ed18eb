"""Every process maps the arenas of all ranks of its host: they have to fit into its addresses."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
import torch
from pool import RankPool

import syncengine
from syncengine.errors import InvalidUsage


def train_below(addresses: int) -> int:
    """With so many more bytes of addresses than are mapped already."""
    mapped = int(re.search(r"VmSize:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (mapped + addresses, mapped + addresses))
    syncengine.init(timeout=30)
    tensor = syncengine.empty(1000).fill_(1)
    syncengine.all_reduce(tensor)
    model = syncengine.Parallel(torch.nn.Linear(256, 256))
    model(torch.ones(1, 256)).sum().backward()
    return int(tensor[0])


def test_default_arenas_leave_room_below_a_limit(pool: RankPool):
    with pool.spawn_ranks(train_below, 8 * 2**30, world=3, settings=None) as ranks:
        assert [rank.result() for rank in ranks] == [3] * 3


def init_with_too_much() -> str:
    with pytest.raises((InvalidUsage, syncengine.errors.Aborted)) as caught:
        syncengine.init(timeout=30, arena_bytes=2**46)
    return str(caught.value)


def test_too_many_addresses_are_an_error_that_says_what_to_set(pool: RankPool):
    with pool.spawn_ranks(init_with_too_much, world=3, settings=None) as ranks:
        for rank in ranks:
            text = rank.result()
            assert re.search(r"rank \d can't map the memory of rank \d", text)
            assert "lower SYNCENGINE_ARENA_BYTES on all ranks" in text
