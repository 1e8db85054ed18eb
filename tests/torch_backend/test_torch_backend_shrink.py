"""torch.distributed.shrink_group: of the default group and of others, with ranks that live, leave, hang or die."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from pool import RankPool, run_on_ranks
from torch.distributed.distributed_c10d import SHRINK_ABORT, SHRINK_DEFAULT
from torch.utils.data import DistributedSampler

from syncengine.errors import PeerLost, SyncError
from syncengine.launch import store as launch_store


def begin(timeout: float = 60.0) -> int:
    """Makes the default group; returns this process's rank."""
    store = dist.PrefixStore("test", launch_store.open_store())  # type: ignore[call-arg] # that of tests
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("syncengine", timeout=timedelta(seconds=timeout), store=store, rank=rank, world_size=size)
    return rank


def check_whole(size: int, group: dist.ProcessGroup | None = None) -> None:
    """A group has `size` ranks, and works."""
    assert dist.get_world_size(group) == size
    me = dist.get_rank(group)
    gathered = [torch.empty(1) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([float(me)]), group=group)
    assert [int(each) for each in gathered] == list(range(size))
    work = dist.all_reduce(ones := torch.ones(70_000), group=group, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(ones, torch.full_like(ones, size))


def leave_together(size: int) -> None:
    """All ranks have left the collective that they were in, which shrinking would end for those that are behind."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"{size} have left", 1) == size:
        store.set(f"all {size} have left", "")
    store.wait([f"all {size} have left"])


def check_new_world(size: int) -> None:
    """What is asked of torch.distributed without a group sees the new default group."""
    check_whole(size)
    sampler = DistributedSampler(range(12))  # type: ignore[arg-type]
    assert (sampler.num_replicas, sampler.rank) == (size, dist.get_rank())
    tensor = torch.tensor([float(dist.get_rank())])
    dist.broadcast(tensor, size - 1)
    assert int(tensor) == size - 1
    check_whole(size, dist.new_group())
    dist.barrier()


@pytest.mark.parametrize(
    ("excluded", "flags", "hosts"),
    [
        ([1], SHRINK_DEFAULT, "aaaa"),
        ([0, 2], SHRINK_ABORT, "aaaa"),
        ([1, 2, 3], SHRINK_DEFAULT, "aaaa"),
        ([1], SHRINK_ABORT, "abba"),
        ([0, 2], SHRINK_DEFAULT, "aabb"),
        ([2, 3], SHRINK_ABORT, "aabb"),
    ],
)
@run_on_ranks(settings=None)
def test_the_default_group(excluded: list[int], flags: int, hosts: str) -> None:
    """Excluded ranks live, and leave when they like. Other groups are gone, and the timeout stays."""
    was = begin(40.0)
    other = dist.new_group([0, 1, 2, 3])
    check_whole(4, other)
    check_whole(4)
    leave_together(4)
    if was in excluded:
        dist.destroy_process_group()
        return
    group = dist.shrink_group(excluded, shrink_flags=flags)
    left = [rank for rank in range(4) if rank not in excluded]
    assert group is dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert backend.communicator.global_ranks == left and backend.options._timeout == timedelta(seconds=40)
    assert len(set(backend.communicator.hosts)) == len({hosts[rank] for rank in left})
    assert (dist.get_rank(), dist.get_world_size()) == (left.index(was), len(left))
    check_new_world(len(left))
    dist.destroy_process_group()


@run_on_ranks(world=4, settings=None)
def test_one_after_another() -> None:
    """A group of some ranks, which leaves the others as they are; then the default one, twice."""
    was = begin()
    some = dist.new_group([0, 1, 2])  # torch takes `ranks_to_exclude` for global ranks where it maps these
    if was in (0, 2):
        check_whole(2, dist.shrink_group([1], group=some))
    check_whole(4)
    leave_together(4)
    if was < 3:
        check_whole(3, dist.shrink_group([3]))
        leave_together(3)
        if was != 1:
            dist.shrink_group([1])
            check_new_world(2)
    dist.destroy_process_group()


@run_on_ranks(world=2, settings=None)
def test_wrong_use() -> None:
    begin()
    for excluded, error in (([], ValueError), ([0, 0], ValueError), ([7], ValueError), ([0, 1], ValueError)):
        with pytest.raises(error):
            dist.shrink_group(excluded)
    with pytest.raises(RuntimeError, match="exclusion list"):
        dist.shrink_group([dist.get_rank()])
    check_whole(2)
    dist.destroy_process_group()


def lose(dead: list[int], stopped: list[int]) -> tuple[int, int]:
    """The others notice it in a collective, and go on with DDP without them."""
    was = begin(15.0)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)

    def step() -> None:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            ddp(torch.ones(2, 8) * (1 + dist.get_rank())).sum().backward()

    step()
    leave_together(4)
    if was in dead + stopped:
        os.kill(os.getpid(), signal.SIGKILL if was in dead else signal.SIGSTOP)
    with pytest.raises(SyncError):
        while True:
            dist.all_reduce(torch.ones(70_000))
    if len(dead) > 1:
        with pytest.raises(PeerLost, match="exclude ranks 1, 2 of the group"):
            dist.shrink_group(dead[:1], shrink_flags=SHRINK_ABORT)
    dist.shrink_group(dead + stopped, shrink_flags=SHRINK_ABORT)
    model.zero_grad()
    step()
    size = dist.get_world_size()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((4, 8), 2.0 * 3 * sum(range(1, size + 1)) / size))
    check_new_world(size)
    result = dist.get_rank(), size
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize(
    ("dead", "stopped", "hosts"),
    mostly_nightly(
        [([0], [], "aaaa"), ([1, 2], [], "aaaa"), ([], [3], "aaaa"), ([0], [], "aabb"), ([1, 2], [], "aabb")], 4
    ),
)
def test_ranks_that_die_or_hang(pool: RankPool, dead: list[int], stopped: list[int], hosts: str) -> None:
    left = [rank for rank in range(4) if rank not in dead + stopped]
    with pool.spawn_ranks(lose, dead, stopped, hosts=hosts, settings=None) as ranks:
        for new, rank in enumerate(left):
            assert ranks[rank].result(120.0) == (new, len(left))
        for rank in stopped:
            ranks[rank].signal(signal.SIGKILL)
        for rank in dead:
            assert ranks[rank].exit_code() == -signal.SIGKILL
