"""Horovod's timeline, as a trace."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from pool import RankPool

import syncengine.horovod as hvd
from syncengine.errors import InvalidUsage
from syncengine.tracing import Kind, read


def record(path: str) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    with pytest.raises(InvalidUsage, match="no cycles"):
        hvd.start_timeline(path, mark_cycles=True)
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(5), name="within")
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(7), name="after")


def sizes(directory: Path) -> list[set[int]]:
    """Bytes of the reductions that each rank has recorded."""
    return [
        {event.detail for event in of_rank.events if event.kind == Kind.REDUCED}
        for of_rank in read(directory).ranks.values()
    ]


def test_what_is_between_start_and_stop(pool: RankPool, tmp_path: Path):
    pool.run(record, str(tmp_path / "timeline.json"), settings=None)
    for of_rank in sizes(tmp_path / "timeline.json.rings"):
        assert 20 in of_rank and not {12, 28} & of_rank
    if find_spec("perfetto"):
        assert (tmp_path / "timeline.json").stat().st_size > 0


def reduce_once(path: str) -> None:
    os.environ["HOROVOD_TIMELINE"] = path
    for _ in range(2):
        hvd.init()
    hvd.allreduce(torch.ones(5), name="within")
    hvd.stop_timeline()


def test_by_variable(pool: RankPool, tmp_path: Path):
    pool.run(reduce_once, str(tmp_path / "t"), settings=None)
    assert all(20 in of_rank for of_rank in sizes(tmp_path / "t.rings"))
