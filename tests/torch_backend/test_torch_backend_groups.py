"""The torch.distributed backend "syncengine": groups of some ranks, parts of groups, and the default group."""

from __future__ import annotations

import os
import re
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import WITHIN, seconds_after
from pool import RankPool, run_on_ranks
from torch_backend_values import equal, mine, ours, value, values

import syncengine
from syncengine import _C
from syncengine.communicator import group_communicator
from syncengine.errors import InvalidUsage, SyncError
from syncengine.launch import store as launch_store


@run_on_ranks(world=4, gloo=True, settings=None)
def test_groups_of_some_ranks() -> None:
    rank = dist.get_rank()
    evens, odds = dist.new_group([0, 2], backend="syncengine"), dist.new_group([3, 1], backend="syncengine")
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=odds if rank % 2 else evens)
    assert tensor[0] == (4 if rank % 2 else 2)
    if rank % 2 == 0:
        assert odds is dist.GroupMember.NON_GROUP_MEMBER
        dist.all_reduce(tensor, group=odds)  # a warning, as everywhere
    else:
        backend = odds._get_backend(torch.device("cpu"))
        assert backend.communicator.global_ranks == [1, 3]
        dist.broadcast(tensor := torch.full((1,), rank), 3, odds)
        assert tensor.item() == 3
    single = dist.new_group([rank], backend="syncengine", use_local_synchronization=True)
    dist.all_reduce(tensor := torch.full((2,), 7.0), group=single)
    dist.all_gather([gathered := torch.zeros(2)], tensor, group=single)
    assert gathered[0] == 7
    dist.destroy_process_group(odds if rank % 2 else evens)


@run_on_ranks(world=3, gloo=True, settings=None)
def test_a_backend_is_split() -> None:
    group, rank = ours(), dist.get_rank()
    backend = group._get_backend(torch.device("cpu"))
    half = backend.split([0, 2])
    assert backend.supports_splitting
    if rank == 1:
        assert half is None
    else:
        assert isinstance(half, _C.Backend)
        assert half.communicator.global_ranks == [0, 2]
        half.allreduce([tensor := mine(torch.float32, 5)]).wait()
        assert equal(tensor, value(torch.float32, 0, 5) + value(torch.float32, 2, 5))
        half.shutdown()
    # The way of torch's own split_group, whose Python front asks for an accelerator.
    part = group.split_group([2, 1], timeout=timedelta(seconds=20), group_desc="two")
    if rank == 0:
        assert part is None
    else:
        assert (part.rank(), part.size(), part.group_desc) == (rank - 1, 2, "two")
        part.broadcast(tensor := mine(torch.float32, 5), 1).wait()
        assert equal(tensor, value(torch.float32, 2, 5))
        part.shutdown()
    with pytest.raises(InvalidUsage, match="can be lowered only"):
        group.split_group([0, 1], timeout=timedelta(days=2))
    dist.barrier(group)


def whole_life(debug: bool) -> None:
    if debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
    rank = int(os.environ["RANK"])
    for backend, generation in (("syncengine", 0), ("cpu:syncengine", 1)):
        store = dist.PrefixStore(str(generation), launch_store.open_store())
        dist.init_process_group(backend, store=store, rank=rank, world_size=2)
        tensor = mine(torch.float32, 10)
        dist.all_reduce(tensor)
        assert equal(tensor, sum(values(torch.float32, 10)))
        dist.barrier()
        model = syncengine.Parallel(torch.nn.Linear(3, 3))
        assert model.communicator is group_communicator(dist.group.WORLD)
        model(torch.ones(2, 3)).sum().backward()
        dist.destroy_process_group()
        assert not dist.is_initialized()


@pytest.mark.parametrize("debug", [False, True])
def test_the_default_group(pool: RankPool, debug: bool):
    with pool.spawn_ranks(whole_life, debug, settings=None) as ranks:
        for rank in ranks:
            rank.result()
            assert rank.exit_code() == 0, rank.output()


@run_on_ranks(gloo=True, settings=None)
def test_parallel_uses_the_engine_below_the_group():
    group = dist.new_group([0, 1], backend="syncengine")
    model = syncengine.Parallel(torch.nn.Linear(3, 3), process_group=group)
    assert model.communicator is group._get_backend(torch.device("cpu")).communicator
    assert model.process_group is group
    before = model.communicator.counters()["operations"]
    model(torch.ones(2, 3)).sum().backward()
    assert model.communicator.counters()["operations"] > before


def test_backend_is_registered():
    assert "syncengine" in dist.Backend.backend_list
    assert dist.Backend.backend_capability["syncengine"] == (["cpu", "cuda"] if _C.has_cuda else ["cpu"])
    assert issubclass(_C.Backend, torch._C._distributed_c10d.Backend)


def ring_of_one(**options: Any) -> dist.ProcessGroup:
    """A group of this rank alone, after a message to itself in each order, and one of each kind of call."""
    for rank in range(dist.get_world_size()):
        group = dist.new_group([rank], backend="syncengine", **options)
        if rank == dist.get_rank():
            kept = group
    rank = dist.get_rank()
    for size in (0, 3, 700_001):
        first, second = torch.empty(size), torch.empty(size)
        works = [
            dist.irecv(second, rank, kept, tag=2),
            dist.isend(torch.full((size,), 1.0), rank, kept, tag=1),
            dist.isend(torch.full((size,), 2.0), rank, kept, tag=2),
            dist.irecv(first, group=kept, tag=1),
        ]
        for work in works:
            work.wait()
        assert first.eq(1).all()
        assert second.eq(2).all()
    operations = [dist.P2POp(dist.isend, torch.arange(6.0).view(2, 3).t(), rank, kept)]
    operations.append(dist.P2POp(dist.irecv, transposed := torch.zeros(2, 3).t(), rank, kept))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert transposed.t().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    future = dist.irecv(later := torch.empty(3), rank, kept).get_future()
    dist.isend(torch.ones(3), rank, kept).wait()
    future.wait()
    assert later.eq(1).all()
    dist.all_to_all_single(same := torch.empty(4), torch.arange(4.0), group=kept)
    assert same.tolist() == [0, 1, 2, 3]
    backend = kept._get_backend(torch.device("cpu"))
    assert backend.communicator.global_ranks == backend.communicator.split([0]).global_ranks == [rank]
    return kept


@run_on_ranks(gloo=True, settings=None)
def test_messages_to_oneself_in_a_group_of_one() -> None:
    ring_of_one()


def errors_in_a_group_of_one(kind: str) -> str:
    group = ring_of_one(timeout=timedelta(seconds=2.0 if kind == "group" else 30.0))
    backend = group._get_backend(torch.device("cpu"))
    rank = dist.get_rank()
    with pytest.raises(SyncError) as raised:
        if kind == "sizes":
            dist.isend(torch.ones(3), rank, group)
            dist.irecv(torch.ones(4), rank, group).wait()
        elif kind == "timeout":
            dist.irecv(torch.ones(4), rank, group).wait(timedelta(seconds=0.3))
        elif kind == "group":
            dist.irecv(torch.ones(4), rank, group).wait()
        else:
            work = dist.irecv(torch.ones(4), rank, group)
            threading.Timer(0.3, backend.communicator.abort, ["enough"]).start()
            work.wait()
    with pytest.raises(type(raised.value)):
        dist.isend(torch.ones(4), rank, group)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("kind", "text", "limit"),
    [
        ("sizes", r"Mismatch: rank 1 called recv\(.*\) for 16 bytes where rank 1 sent 12 bytes", None),
        ("timeout", r"Timeout: rank 1 is not done since .* in recv\(.*gave up", 0.3),
        ("group", r"Timeout: rank 1 is not done since .* in recv\(.*the timeout is 2.0 s", 2.0),
        ("abort", "Aborted: enough", None),
    ],
)
def test_messages_to_oneself_that_fail(pool: RankPool, kind: str, text: str, limit: float | None):
    answers = pool.run(errors_in_a_group_of_one, kind, gloo=True, settings=None, environ={"SYNCENGINE_LOG_AFTER": "60"})
    assert re.match(text, answers[1]), answers
    if limit:
        assert limit <= seconds_after("is not done since", answers[1]) < WITHIN
