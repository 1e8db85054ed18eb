"""examples/hybrid.py: each part has the bits that it has with DDP and Gloo in the same places."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import load, over_gloo, torchrun

PARTS = ("tensor", "pipeline", "recommendation")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Two folders, and what the run with Parallel said. At 4 ranks DDP's bits are those of `ring`."""
    home = tmp_path_factory.mktemp("hybrid")
    start = partial(torchrun, "hybrid.py", ranks=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYNCENGINE_NUMERICS", "ring")
        said = start("--out", home / "ours", home=home)
    over_gloo(start, "--ddp", "--out", home / "ddp", home=home)
    return home / "ours", home / "ddp", said


@pytest.mark.parametrize("part", PARTS)
def test_bits_of_ddp(trained: tuple[Path, Path, str], part: str):
    ours, ddp, _ = trained
    for rank in range(4):
        pairs = list(zip(load(ours / f"{part}{rank}.pt"), load(ddp / f"{part}{rank}.pt"), strict=True))
        assert pairs
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("part", PARTS)
def test_it_learns(trained: tuple[Path, Path, str], part: str):
    first, last = map(float, re.search(f"{part}: loss (.*), then (.*)", trained[2]).groups())
    assert last < 0.7 * first


@pytest.mark.parametrize("part", ["tensor", "pipeline"])
def test_what_is_cut_in_two_is_replicated(trained: tuple[Path, Path, str], part: str):
    """Ranks 0 and 1 are one replica, 2 and 3 the other one."""
    zero, one, two, three = (load(trained[0] / f"{part}{rank}.pt") for rank in range(4))
    assert all(map(torch.equal, zero, two))
    assert all(map(torch.equal, one, three))
    assert not torch.equal(zero[0], one[0])


def test_rows_are_dealt_out_and_the_dense_part_is_replicated(trained: tuple[Path, Path, str]):
    *dense, rows = zip(*(load(trained[0] / f"recommendation{rank}.pt") for rank in range(4)), strict=True)
    assert len(dense) == 4
    assert all(torch.equal(first, other) for first, *others in dense for other in others)
    assert not any(torch.equal(rows[0], other) for other in rows[1:])
