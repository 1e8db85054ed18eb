"""Real models train to the same bits with Parallel and with DDP over Gloo."""

from __future__ import annotations

import pytest
from marks import mostly_nightly
from models import workload
from models.workload import train
from pool import RankPool
from torch.nn.parallel import DistributedDataParallel

import syncengine

MODES = {  # two ranks have the same bits in both, but other buckets
    "resnet18": ["ring"],
    "resnet18_channels_last": ["rank_order"],
    "gpt": ["rank_order", "ring"],
    "recommender": ["rank_order"],
    "recommender_sparse": ["ring"],
    "experts": ["rank_order", "ring"],
    "lstm": ["ring"],
}


def difference_from_ddp(name: str) -> tuple[str, list[str]]:
    """Where training differs first, and parameters and buffers that it did not change."""
    ours = train(syncengine.Parallel, workload(name))
    theirs = train(DistributedDataParallel, workload(name))
    return ours.difference(theirs), sorted(set(ours.state).difference(ours.moved()))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mode"), mostly_nightly([(name, mode) for name, modes in MODES.items() for mode in modes], 1, 2, 5, 6)
)
def test_a_real_model_trains_to_the_bits_of_ddp(pool: RankPool, name: str, mode: str):
    results = pool.run(difference_from_ddp, name, gloo=True, settings={"timeout": 60.0, "numerics": mode})
    for different, unchanged in results:
        assert not different
        unused = ["module.heads.task 2.bias", "module.heads.task 2.weight"] if name == "experts" else []
        assert unchanged == unused


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_nightly(["gpt", "experts"], 0))
def test_a_real_model_trains_to_the_bits_of_ddp_on_3_ranks_in_ring(pool: RankPool, name: str):
    settings = {"timeout": 60.0, "numerics": "ring"}
    for different, _ in pool.run(difference_from_ddp, name, world=3, gloo=True, settings=settings):
        assert not different
