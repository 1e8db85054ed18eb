"""Buffers and parameters whose memory was freed: named, where reading them would end the process by a signal."""

from __future__ import annotations

import pytest
import torch
from pool import run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import InvalidUsage, SyncError

SMALL, LARGE = 97, 40_000  # packed into a message; by itself


def net(elements: int) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4))
    made.register_buffer("before", torch.ones(3))
    made.register_buffer("cache", torch.ones(elements))
    return made


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("left", [0, 16])
@pytest.mark.parametrize("elements", [SMALL, LARGE])
@run_on_ranks()
def test_a_buffer_that_was_freed_on_one_rank_is_named(elements: int, left: int, alone: int):
    model = syncengine.Parallel(net(elements))
    model(torch.ones(2, 4)).sum().backward()
    if syncengine.rank() == alone:
        model.module.cache.untyped_storage().resize_(left)
    prefix = "" if syncengine.rank() == alone else f"rank {alone}: "
    with pytest.raises(SyncError, match=rf"{prefix}the memory of cache of shape \({elements},\) was freed"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("which", ["cache", "0.weight"])
@run_on_ranks()
def test_what_was_freed_before_wrapping_is_named(which: str):
    made = net(SMALL)
    made.state_dict(keep_vars=True)[which].untyped_storage().resize_(0)
    with pytest.raises(InvalidUsage, match=f"the memory of {which} of shape"):
        syncengine.Parallel(made)
