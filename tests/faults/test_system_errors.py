"""What the system refuses is told with why, and with the way out; and processes that were their only rank."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from pool import RankPool

import syncengine
from syncengine.errors import InvalidUsage
from syncengine.report import write_report
from syncengine.tracing.perfetto import write


def limit(which: int, most: int) -> None:
    resource.setrlimit(which, (most, most))


# --- A process that was its only rank


def average(pipe: int) -> None:
    """Of a rank that a process forks."""
    syncengine.init(timeout=50)
    model = syncengine.Parallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.tensor([[syncengine.rank() + 1.0]])).backward()
    os.write(pipe, json.dumps([syncengine.world_size(), model.module.weight.grad.item()]).encode() + b"\n")


def fork_ranks(shuts_down: bool) -> list[list[float]]:
    """As a notebook: a trial in a cell, then its launcher."""
    syncengine.init()
    model = syncengine.Parallel(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).backward()
    if shuts_down:
        syncengine.shutdown()
    read, write = os.pipe()
    for rank in range(2):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        if os.fork() == 0:
            status = 1
            try:
                average(write)
                status = 0
            finally:
                os._exit(status)
    assert [os.wait()[1] for _ in range(2)] == [0, 0]
    return [json.loads(line) for line in os.read(read, 1000).splitlines()]


@pytest.mark.parametrize("shuts_down", [True, False])
def test_who_was_the_only_rank_may_fork_ranks(pool: RankPool, shuts_down: bool):
    with pool.spawn_ranks(fork_ranks, shuts_down, world=1, settings=None) as ranks:
        assert ranks[0].result() == [[2, 1.5]] * 2


# --- Files


def write_where_no_room_is(folder: Path) -> None:
    syncengine.init()
    with syncengine.trace(folder):
        syncengine.Parallel(torch.nn.Linear(1, 1), nonfinite="raise")(torch.ones(1, 1)).backward()
    before = sorted(folder.iterdir())
    limit(resource.RLIMIT_FSIZE, 10)
    with pytest.raises(InvalidUsage, match=r"report.html can't be written: File too large: make room, or give"):
        write_report(folder)
    with pytest.raises(InvalidUsage, match=r"all.pftrace can't be written: File too large: make room, or give"):
        write(folder, folder / "all.pftrace")
    assert sorted(folder.iterdir()) == before


def test_what_has_no_room_is_named_and_leaves_no_part(pool: RankPool, tmp_path: Path):
    pytest.importorskip("perfetto")
    with pool.spawn_ranks(write_where_no_room_is, tmp_path, world=1, settings=None) as ranks:
        ranks[0].result()
