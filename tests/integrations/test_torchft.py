"""torchft: its process group with ours, its Manager with real replica groups, and examples/with_torchft.py."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import ROOT, imported, load, run
from lightning_ranks import same

from syncengine import errors
from syncengine.torchft import ProcessGroup

MEMBERS = 3


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def on_threads(function, *arguments: object) -> list:
    """What `function(rank, *arguments)` returns on each member, a thread each, as torchft's own tests have them."""
    with ThreadPoolExecutor(MEMBERS) as threads:
        return list(threads.map(lambda rank: function(rank, *arguments), range(MEMBERS)))


def total(group: ProcessGroup, rank: int) -> torch.Tensor:
    tensor = torch.tensor([1.0 + rank, 10.0])
    group.allreduce([tensor], dist.ReduceOp.SUM).wait()
    return tensor


def test_a_group_is_configured_anew_with_other_members(store: dist.TCPStore):
    def member(rank: int) -> None:
        group = ProcessGroup(timedelta(seconds=60))
        assert group.errored() is None
        group.configure(f"127.0.0.1:{store.port}/all", "replica", rank, MEMBERS)
        assert group.size() == MEMBERS
        assert torch.equal(total(group, rank), torch.tensor([6.0, 30.0]))
        if rank == MEMBERS - 1:
            group.shutdown()
            return
        with pytest.raises(errors.PeerLost, match=f"rank {MEMBERS - 1} has left"):
            total(group, rank)
        assert isinstance(group.errored(), errors.PeerLost)
        group.configure(f"127.0.0.1:{store.port}/fewer", "replica", rank, MEMBERS - 1)
        assert group.errored() is None
        assert torch.equal(total(group, rank), torch.tensor([3.0, 20.0]))
        group.shutdown()

    on_threads(member)


def test_abort_ends_a_wait_and_the_group_is_configured_anew(store: dist.TCPStore):
    def member(rank: int) -> None:
        group = ProcessGroup(timedelta(seconds=60))
        group.configure(f"127.0.0.1:{store.port}/before", "replica", rank, MEMBERS)
        if rank == 0:
            group.abort()
        else:
            with pytest.raises(errors.Aborted, match="rank 0 aborted"):
                total(group, rank)
        group.configure(f"127.0.0.1:{store.port}/after", "replica", rank, MEMBERS)
        assert torch.equal(total(group, rank), torch.tensor([6.0, 30.0]))
        group.shutdown()

    on_threads(member)


def test_timeouts(store: dist.TCPStore):
    group = ProcessGroup(timedelta(seconds=0.2))
    with pytest.raises(errors.Timeout, match="rank 1 did not join.*within 0.2 s"):
        group.configure(f"127.0.0.1:{store.port}/alone", "replica", 0, 2)

    late = threading.Barrier(MEMBERS)

    def member(rank: int) -> None:
        group = ProcessGroup(timedelta(seconds=60))
        group.configure(f"127.0.0.1:{store.port}/slow", "replica", rank, MEMBERS)
        group.set_timeout(timedelta(seconds=90))  # from the next configure on
        if rank == 0:
            group.set_timeout(timedelta(seconds=0.2))
            with pytest.raises(errors.Timeout):
                total(group, rank)
            assert isinstance(group.errored(), errors.Timeout)
            late.wait(60)
        else:
            late.wait(60)
            with pytest.raises(errors.SyncError):
                total(group, rank)

    on_threads(member)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    home = tmp_path_factory.mktemp("torchft")
    said = run(sys.executable, ROOT / "examples" / "with_torchft.py", "--out", home / "out", home=home)
    return home / "out", said


def test_the_killed_group_comes_back_and_the_others_never_stop(trained: tuple[Path, str]):
    out, said = trained
    assert said.endswith("6 ranks; equal models: True\n")
    steps = {group: [line["step"] for line in committed(out, group)] for group in range(3)}
    last = steps[0][-1]
    for group in (0, 2):  # of which one may come to the first quorum late
        assert steps[group] == list(range(steps[group][0], last + 1))
    missed = sorted(set(range(steps[1][0], last + 1)) - set(steps[1]))
    assert len(missed) >= 20
    assert missed == list(range(missed[0], missed[-1] + 1))
    assert steps[1][-1] == last
    assert committed(out, 0)[-1]["loss"] < committed(out, 0)[0]["loss"] / 2


def test_the_weights_are_those_of_a_plain_loop_over_the_same_groups(trained: tuple[Path, str]):
    out, _ = trained
    with imported("with_torchft.py") as example:
        module, optimizer = example.make()
        took_part: dict[int, dict[int, int]] = {}  # of each step, its groups, and how many each of them says there are
        for group in range(3):
            for line in committed(out, group):
                took_part.setdefault(line["step"], {})[group] = line["groups"]
        for step in range(len(took_part)):
            (count,) = set(took_part[step].values())
            # A group that is killed may not have written down its last step.
            groups = [0, 1, 2] if count == 3 else list(took_part[step])
            assert len(groups) == count
            averages = []
            for group in groups:
                losses = (example.loss_of(module, step, group, rank) for rank in (0, 1))
                ranks = [torch.autograd.grad(loss, module.parameters()) for loss in losses]
                averages.append([(a + b) / 2 for a, b in zip(*ranks, strict=True)])
            for parameter, gradients in zip(module.parameters(), zip(*averages, strict=True), strict=True):
                parameter.grad = sum(gradients[1:], gradients[0]) / len(groups)
            optimizer.step()
    same(load(out / "group1-rank1.pt"), module.state_dict())


def committed(out: Path, group: int) -> list[dict]:
    return [json.loads(line) for line in (out / f"group{group}-rank0.jsonl").read_text().splitlines()]
