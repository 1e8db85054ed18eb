"""Several hosts: one machine split by SYNCENGINE_HOST_ID, connected over loopback. Bits, bytes, training, faults."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import WITHIN, live_on, my_rank, needs_hooks, others, seconds_after, set_fault, suffer, wait_for_failure
from marks import mostly_nightly
from pool import RankPool, run_on_ranks

import syncengine

PLACEMENTS = ["ab", "aab", "aabb", "aaab", "abab", "abcd"]


def run(pool: RankPool, function: Callable[..., Any], hosts: str, *args: Any) -> list[Any]:
    """One rank for each letter of `hosts`; equal letters share a host."""
    return pool.run(function, hosts, *args, world=len(hosts), settings=None)


def start(hosts: str, **settings) -> syncengine.Communicator:
    live_on(hosts)
    return syncengine.init(**{"timeout": 60.0, **settings})


def sums(dtype: torch.dtype, count: int, op: str) -> torch.Tensor:
    """Of numbers whose order of addition shows."""
    generator = torch.Generator().manual_seed(syncengine.rank())
    tensor = torch.randn(count, generator=generator)
    tensor = tensor.mul_(torch.randint(1, 1000, (count,), generator=generator)).to(dtype)
    syncengine.all_reduce(tensor, op)
    return tensor


def reduce_all(hosts: str, numerics: str) -> list[torch.Tensor]:
    start(hosts, numerics=numerics)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32]
    results = [sums(dtype, count, "sum") for dtype in dtypes for count in (1, 1000, 300_001)]
    return [*results, sums(torch.bfloat16, 100_000, "avg"), sums(torch.float32, 1000, "max")]


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


@pytest.mark.thorough
@pytest.mark.parametrize("numerics", mostly_nightly(["rank_order", "ring"], 0))
def test_bits_do_not_depend_on_placement(pool: RankPool, numerics: str) -> None:
    for world in (2, 3, 4):
        alone = run(pool, reduce_all, "a" * world, numerics)
        for hosts in (placement for placement in PLACEMENTS if len(placement) == world):
            for got in run(pool, reduce_all, hosts, numerics):
                assert same(got, alone[0]), hosts


def links(hosts: str) -> str:
    return start(hosts).links


def test_the_way_between_hosts_follows_from_who_is_where(pool: RankPool) -> None:
    assert run(pool, links, "aa") == ["", ""]
    wanted = "all_reduce by chain from 256 KiB (16-bit never), broadcast by relay never"
    assert run(pool, links, "aabb") == [wanted] * 4
    assert "by chain never" in run(pool, links, "ab")[0]


def use_everything(hosts: str) -> None:
    communicator = start(hosts)
    rank, size = communicator.rank, communicator.size
    assert (rank, size) == (my_rank(), len(hosts))
    for count in (1, 1000, 200_000):
        tensor = torch.full((count,), float(rank))
        syncengine.broadcast(tensor, size - 1)
        assert tensor.eq(size - 1).all()
        part, whole = torch.full((count,), float(rank)), torch.empty(size, count)
        syncengine.all_gather(whole, part)
        assert whole.eq(torch.arange(size)[:, None]).all()
        syncengine.reduce_scatter(part, whole)
        assert part.eq(size * rank).all()
        syncengine.all_reduce(part, "max")
        assert part.eq(size * (size - 1)).all()
        totals = [torch.full((count,), float(rank + i)) for i in range(5)]
        works = [syncengine.all_reduce(total, async_op=True) for total in totals]
        shared = syncengine.empty(count).fill_(rank)
        syncengine.all_reduce(shared, "avg")
        assert shared.eq((size - 1) / 2).all()
        strided = torch.ones(count, 2)[:, 0]
        syncengine.all_reduce(strided)
        assert strided.eq(size).all()
        for i, (work, total) in enumerate(zip(works, totals, strict=True)):
            work.wait()
            assert total.eq(size * ((size - 1) / 2 + i)).all()
        syncengine.barrier()
    group = communicator.split([r for r in range(size) if r % 2 == rank % 2])
    tensor = torch.ones(10_000)
    group.all_reduce(tensor)
    assert tensor.eq(group.size).all()
    assert group.global_ranks == [r for r in range(size) if r % 2 == rank % 2]


@pytest.mark.parametrize("hosts", ["a", "aa", "aaa", "aaaaaaaa", *mostly_nightly(PLACEMENTS, 1, 4, 5)])
def test_every_collective(pool: RankPool, hosts: str) -> None:
    run(pool, use_everything, hosts)


@run_on_ranks(hosts=["abab"])
def test_local_ranks_count_within_a_host() -> None:
    assert syncengine.local_rank() == syncengine.rank() // 2


def train(hosts: str, numerics: str, **arguments) -> tuple[list[float], list[torch.Tensor]]:
    assert start(hosts, numerics=numerics).numerics == numerics
    torch.manual_seed(7)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = syncengine.Parallel(torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)), **arguments)
    torch.manual_seed(syncengine.rank())
    losses = []
    for _ in range(6):
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        with torch.no_grad():  # not torch.optim, which imports all of torch._dynamo: for seconds, under mpirun
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def check_trained(trained, alone) -> None:
    """What the ranks return from `train` has the bits of another run."""
    for (losses, got), (wanted_losses, wanted) in zip(trained, alone, strict=True):
        assert losses == wanted_losses
        assert same(got, wanted)


@pytest.mark.parametrize("numerics", mostly_nightly(["rank_order", "ring"], 1))
def test_training_is_that_of_one_host(pool: RankPool, numerics: str) -> None:
    alone = run(pool, train, "aaaa", numerics)
    for hosts in ("aabb", "aaab", "abcd"):
        check_trained(run(pool, train, hosts, numerics), alone)


def test_fast_trains_and_is_named_so(pool: RankPool) -> None:
    losses = [losses for losses, _ in run(pool, train, "aabb", "fast")]
    wanted = [losses for losses, _ in run(pool, train, "aaaa", "rank_order")]
    assert torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=1e-4)


def leave_in_the_middle(hosts):
    """An exit without shutdown(), with a model still there."""
    start(hosts)
    global model
    model = syncengine.Parallel(torch.nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()


def all_reduce_for_long(hosts, fault):
    live_on(hosts)
    if fault:
        set_fault(len(hosts) - 1, fault)
    return all_reduce_until_it_fails()


def all_reduce_until_it_fails():
    def body(step):
        tensor = torch.ones(200_000)
        for number in range(100_000):
            step()
            syncengine.all_reduce(tensor)
            if number == 20:
                print("busy", flush=True)

    return suffer(body, timeout=100.0)


def wait_until_busy(ranks) -> None:
    """All are in the middle of it."""
    for rank in ranks:
        while "busy" not in rank.output():
            assert rank.exit_code(0.01) is None, rank.output()


def check_all_lost(ranks, victim: int, killed_at: float | None = None) -> None:
    for rank in others(ranks, victim):
        outcome = rank.result()
        outcome.check("PeerLost", f"rank {victim}")
        if killed_at is not None:
            assert outcome.at - killed_at < WITHIN, outcome


@pytest.mark.parametrize("hosts", mostly_nightly(["ab", "aabb", "aaab"], 1))
def test_killed_on_another_host(pool: RankPool, hosts: str) -> None:
    with pool.spawn_ranks(all_reduce_for_long, hosts, None, world=len(hosts), settings=None) as ranks:
        kill_the_last(ranks)


def kill_the_last(ranks) -> None:
    wait_until_busy(ranks)
    killed_at = time.monotonic()
    ranks[-1].signal(signal.SIGKILL)
    check_all_lost(ranks, len(ranks) - 1, killed_at)


@needs_hooks
@pytest.mark.parametrize(
    "point", mostly_nightly(["opened", "staged", "reducing", "reduced", "pulled", "finished"], 2, 4)
)
def test_killed_at_each_state(pool: RankPool, point: str) -> None:
    with pool.spawn_ranks(all_reduce_for_long, "aabb", f"{point}:5:kill", world=4, settings=None) as ranks:
        check_all_lost(ranks, 3)


def all_reduce_until(hosts, thawed):
    communicator = start(hosts)
    rounds = 0
    while True:
        rounds += 1
        ready = torch.tensor([float(Path(thawed).exists())])
        if rounds == 20:
            print("busy", flush=True)
        syncengine.all_reduce(ready, "min")
        if ready.item():
            return communicator.size


@pytest.mark.thorough
def test_frozen_for_seconds_on_another_host(pool: RankPool, tmp_path: Path) -> None:
    """For as long as a host may be that migrates, or a link that fails over."""
    thawed = tmp_path / "thawed"
    with pool.spawn_ranks(all_reduce_until, "abc", str(thawed), world=3, settings=None) as ranks:
        wait_until_busy(ranks)
        ranks[2].signal(signal.SIGSTOP)
        time.sleep(3.5)
        ranks[2].signal(signal.SIGCONT)
        thawed.touch()
        assert [rank.result() for rank in ranks] == [3] * 3
        for number, rank in enumerate(ranks):
            said = rank.output()
            assert (f"rank {number}: rank 2 has been silent for" in said) == (number < 2), said
            assert (f"rank {number}: rank 2 is heard again" in said) == (number < 2), said
            assert "rank 2: rank" not in said, said  # who was frozen heard nobody because it did not listen


@pytest.mark.thorough
def test_frozen_for_longer_than_the_silence(pool: RankPool) -> None:
    environ = {"SYNCENGINE_SILENCE": "1.5"}
    with pool.spawn_ranks(all_reduce_for_long, "ab", None, settings=None, environ=environ) as ranks:
        wait_until_busy(ranks)
        ranks[1].signal(signal.SIGSTOP)
        outcome = ranks[0].result()
        outcome.check("PeerLost", "it was given up after 1.5 s", "SYNCENGINE_SILENCE")
        assert 1.5 <= seconds_after("rank 1 has been silent for", outcome.text) < WITHIN


@pytest.mark.thorough
@pytest.mark.parametrize("first", mostly_nightly([0, 1], 0))  # it comes to its deadline before the others
@run_on_ranks(hosts=["aabb"], settings=None)
def test_a_timeout_names_the_rank_on_another_host(first: int) -> None:
    def body(step):
        syncengine.barrier()
        if syncengine.rank() == 3:
            wait_for_failure()
        elif syncengine.rank() != first:
            time.sleep(0.4)
        syncengine.all_reduce(torch.ones(10))

    # The timeout is for init, too, where other tests share the cores.
    suffer(body, timeout=2.0).check("Timeout", "waits for rank 3 ")


@run_on_ranks(hosts=["ab"], settings=None)
def test_settings_between_hosts_must_agree() -> None:
    suffer(lambda step: None, timeout=20.0, sockets=2 + my_rank()).check("Mismatch", "sockets=2")


@run_on_ranks(hosts=["ab"], settings=None)
def test_a_rank_that_fails_while_hosts_connect_is_heard() -> None:
    """Rank 1 alone knows that its secret is a wrong one; rank 0 may have been called by anybody."""
    os.environ["SYNCENGINE_SECRET"] = f"16 bytes or more {my_rank() == 1}"
    outcome = suffer(lambda step: None, timeout=60.0)
    if my_rank() == 0:
        outcome.check("Aborted", "rank 1 failed in init: InvalidUsage: rank ", "different secrets", soon=True)
    else:
        outcome.check("InvalidUsage", "different secrets", soon=True)


def init_only(hosts, fault):
    live_on(hosts)
    set_fault(len(hosts) - 1, fault)
    return suffer(lambda step: syncengine.barrier(), timeout=3.0)


@needs_hooks
@pytest.mark.parametrize("hosts", mostly_nightly(["ab", "aabb"], 1))
def test_killed_while_hosts_connect(pool: RankPool, hosts: str) -> None:
    with pool.spawn_ranks(init_only, hosts, "joining:1:kill", world=len(hosts), settings=None) as ranks:
        for rank in ranks[:-1]:
            outcome = rank.result()
            # Who only waits to be called can't know that nobody is there any more, but for the deadline.
            assert outcome.error in ("PeerLost", "Timeout"), outcome
            assert "rank" in outcome.text
            assert outcome.left == []
