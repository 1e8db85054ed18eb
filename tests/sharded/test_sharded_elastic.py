"""ShardedOptimizer within syncengine.elastic: ranks die between two updates, and within one."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Outcome, my_rank, needs_hooks, set_fault, suffer
from launcher import Launcher
from marks import mostly_nightly
from pool import RankPool, Ranks
from test_elastic import Net, digest
from torch import nn

import syncengine
from syncengine.errors import TornWeights
from syncengine.launch.local import JOIN

STEPS, TOTAL, SAVED = 10, 8, 4
DATA = torch.utils.data.TensorDataset(
    torch.randn(160, 16, generator=torch.Generator().manual_seed(1)),
    torch.randn(160, 4, generator=torch.Generator().manual_seed(2)),
)


def train(kills: dict[Any, Any], file: str = "") -> tuple[str, list[int], list[str]]:
    """`kills`: of each rank that dies, the step and the place there, or a fault point. Goes on from a checkpoint in
    `file`, made after some steps, where weights are torn. Returns a digest, who is left, and what was torn."""

    def die(step: int, place: str) -> None:
        if JOIN not in os.environ and kills.get(my_rank()) == (step, place):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    syncengine.init(timeout=100.0)
    net, torn, finished = Net(), [], 0
    loader = torch.utils.data.DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True)
    while True:
        model = syncengine.Parallel(net)
        optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if torn:
            saved = torch.load(file, weights_only=True)
            finished = saved.pop("steps")
            for name, one in saved.items():
                named[name].load_state_dict(one)

        def steps(elastic: syncengine.Elastic) -> None:
            batches = syncengine.micro_batches(model, loader, total=TOTAL)  # noqa: B023
            batches.step = elastic.step
            for step in elastic.steps(STEPS):
                die(step, "begin")
                if "wait" in kills and step == 6 and syncengine.rank() == 0 and syncengine.world_size() == 2:
                    deadline = time.monotonic() + 90  # for another one to come
                    while not elastic._door.somebody_waits() and time.monotonic() < deadline:
                        time.sleep(0.1)
                    time.sleep(1.0)  # so that this step's end looks again
                for _, (x, y) in batches:
                    loss = nn.functional.mse_loss(model(x), y)  # noqa: B023
                    die(step, "forward")
                    loss.backward()
                    die(step, "backward")
                optimizer.step()  # noqa: B023
                die(step, "updated")
                optimizer.zero_grad()  # noqa: B023
                scheduler.step()  # noqa: B023
                if file and step + 1 == SAVED and syncengine.rank() == 0:
                    torch.save({**{n: o.state_dict() for n, o in named.items()}, "steps": SAVED}, file)  # noqa: B023

        try:
            syncengine.elastic(steps, step=finished, patience=120.0, **named)
            break
        except TornWeights as error:
            torn.append(str(error))
    states = [one.state_dict() for one in named.values()]
    return digest(*states), syncengine.default_communicator().global_ranks, torn


def disturbed(kills: dict[Any, Any], file: str = "") -> Outcome:
    for rank, fault in kills.items():
        if isinstance(fault, str):
            set_fault(rank, fault)
    return suffer(lambda step: train(kills, file), timeout=100.0)


def values(ranks: Ranks, left: list[int]) -> list[Any]:
    """Of those that are left, which have come through, and have nothing left over."""
    outcomes = [ranks[rank].result(120.0) for rank in left]
    assert all((outcome.error, outcome.left) == ("", []) for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="module")
def undisturbed(pool: RankPool) -> str:
    """Of one rank alone."""
    return pool.run(train, {}, world=1, settings=None)[0][0]


def test_nobody_dies(pool: RankPool, undisturbed: str) -> None:
    assert pool.run(train, {}, world=3, settings=None) == [(undisturbed, [0, 1, 2], [])] * 3


@pytest.mark.thorough
@needs_hooks
@pytest.mark.parametrize(
    "kills",
    mostly_nightly(
        [{1: (3, "begin")}, {0: (0, "forward"), 2: (5, "backward")}, {2: (3, "updated")}, {1: "completed:4:kill"}], 3
    ),
    ids=["begin", "two", "updated", "completed"],
)
def test_a_death_between_updates_loses_nothing(pool: RankPool, undisturbed: str, kills: dict[Any, Any]) -> None:
    """Or in one, by a rank that has written its part: then this step is made on all that are left."""
    left = [rank for rank in range(4) if rank not in kills]
    with pool.spawn_ranks(disturbed, kills, world=4, settings=None) as ranks:
        assert values(ranks, left) == [(undisturbed, left, [])] * len(left)
        for rank in kills:
            assert ranks[rank].exit_code() == -signal.SIGKILL


def torn_here(kills: dict[Any, Any]) -> Outcome:
    """Rank 0 takes its weights for torn, as those of a host are where another one's are whole."""
    renew = syncengine.ShardedOptimizer.renew

    def torn(self: syncengine.ShardedOptimizer, loads: bool = False) -> None:
        renew(self, loads)
        if not loads:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(float("nan"))
            raise TornWeights("on this host")

    if my_rank() == 0:
        syncengine.ShardedOptimizer.renew = torn  # type: ignore[method-assign]
    return disturbed(kills)


@pytest.mark.thorough
def test_torn_weights_are_got_from_a_rank_that_has_whole_ones(pool: RankPool, undisturbed: str) -> None:
    with pool.spawn_ranks(torn_here, {1: (3, "backward")}, world=3, settings=None) as ranks:
        assert values(ranks, [0, 2]) == [(undisturbed, [0, 2], [])] * 2


@pytest.mark.thorough
@needs_hooks
def test_a_death_within_an_update_tears_the_weights(pool: RankPool, undisturbed: str, tmp_path: Path) -> None:
    """All that are left say so, and go on from a checkpoint."""
    file = str(tmp_path / "saved.pt")
    with pool.spawn_ranks(disturbed, {1: "updating:7:kill"}, file, world=3, settings=None) as ranks:
        for whole, left, torn in values(ranks, [0, 2]):
            assert (whole, left) == (undisturbed, [0, 2])
            assert len(torn) == 1 and torn[0].startswith("the weights are torn at step 7: continue from a checkpoint")


@pytest.mark.thorough
def test_another_process_joins(pool: RankPool, undisturbed: str) -> None:
    """In the place of one that has died. It shares weights and state with the others."""
    with Launcher(pool, train, {1: (3, "backward"), "wait": True}) as launcher:
        launcher.start(3)
        assert launcher.watch(lambda: launcher.processes[1].exit_code(0) == -signal.SIGKILL)
        launcher.join(3)
        assert launcher.outcomes() == dict.fromkeys((0, 2, 3), (undisturbed, [0, 2, 3], []))
