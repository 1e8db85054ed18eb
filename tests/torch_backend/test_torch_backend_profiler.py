"""Rows of the backend "syncengine" in torch's profiler: one a call, as c10d gives Gloo's."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from pool import run_on_ranks
from torch import nn
from torch.autograd.profiler import profile
from torch.nn.parallel import DistributedDataParallel
from torch_backend_values import ours

import syncengine


def rows(events: Any, backend: str) -> list[Any]:
    return [event for event in events if event.name.startswith(backend + ":")]


def names(profiled: Any, backend: str = "syncengine") -> Counter[str]:
    return Counter(event.name.removeprefix(backend + ":") for event in rows(profiled.function_events, backend))


def call_everything(group: dist.ProcessGroup, asynchronous: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(4, 3), [torch.ones(4, 3) for _ in range(world)]
    works = [
        dist.all_reduce(x, group=group, async_op=asynchronous),
        dist.broadcast(x, 0, group, async_op=asynchronous),
        dist.reduce(x, 0, group=group, async_op=asynchronous),
        dist.all_gather(y, x, group, async_op=asynchronous),
        dist.gather(x, y if rank == 0 else None, 0, group, async_op=asynchronous),
        dist.scatter(x, y if rank == 0 else None, 0, group, async_op=asynchronous),
        dist.barrier(group, async_op=asynchronous),
        dist.isend(torch.ones(5), (rank + 1) % world, group),
        dist.irecv(torch.ones(5), (rank - 1) % world, group),
    ]
    for work in works:
        if work is not None:
            work.wait()


@run_on_ranks(gloo=True, settings=None)
def test_every_call_has_the_row_of_gloo() -> None:
    group, gloo = ours(), dist.new_group(backend="gloo")
    for asynchronous in (False, True):
        with profile(record_shapes=True) as reference:
            call_everything(gloo, asynchronous)
        with profile(record_shapes=True) as profiled:
            call_everything(group, asynchronous)
        assert names(profiled) == names(reference, "gloo")
        callers = {e.thread for e in profiled.function_events if e.name == "aten::ones"}
        assert len(callers) == 1
        of_gloo = {e.name.removeprefix("gloo:"): e for e in rows(reference.function_events, "gloo")}
        for event in rows(profiled.function_events, "syncengine"):
            other = of_gloo[event.name.removeprefix("syncengine:")]
            assert event.is_async
            assert event.count == 1
            assert event.thread in callers
            if not event.name.endswith(("scatter", "barrier")):
                assert event.input_shapes == other.input_shapes, event.name


@run_on_ranks(gloo=True, settings=None)
def test_rows_of_what_gloo_names_otherwise_or_does_not_have() -> None:
    group, rank = ours(), dist.get_rank()
    x, y = torch.ones(3), [torch.ones(3), torch.ones(3)]
    with profile(record_shapes=True) as profiled:
        dist.all_gather_into_tensor(torch.empty(6), x, group)
        dist.reduce_scatter_tensor(x, torch.ones(6), group=group)
        dist.reduce_scatter(x, y, group=group)
        dist.all_reduce_coalesced(y, group=group)
        dist.all_to_all(list(torch.ones(2, 3)), y, group)
        dist.all_to_all_single(torch.empty(6), torch.ones(6), group=group)
        dist.isend(x, 1 - rank, group)
        dist.recv(torch.empty(3), group=group)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, 1 - rank, group), dist.P2POp(dist.irecv, torch.empty(3), 1 - rank, group)]
        ):
            work.wait()
    expected = {"all_gather": 1, "reduce_scatter": 2, "all_reduce_coalesced": 1, "all_to_all": 2}
    assert names(profiled) == {**expected, "send": 2, "recv": 1, "recvAnySource": 1}
    shapes = {e.name: e.input_shapes for e in rows(profiled.function_events, "syncengine")}
    assert shapes["syncengine:all_reduce_coalesced"] == [[3], [3]]
    assert shapes["syncengine:recvAnySource"] == [[3]]


@run_on_ranks(gloo=True, settings=None)
def test_works_that_outlive_the_profile() -> None:
    group = ours()
    with profile() as profiled:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    work.wait()
    assert names(profiled) == {"all_reduce": 1}
    with torch.profiler.profile(record_shapes=True) as profiled:
        total = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()[0]
    assert total.tolist() == [2.0] * 3
    assert [e.input_shapes for e in rows(profiled.events(), "syncengine")] == [[[3]]]
    dist.all_reduce(total, group=group)  # nobody profiles


@run_on_ranks(gloo=True, settings=None)
def test_rows_of_ddp_over_the_backend() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=ours())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    with profile() as profiled:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    assert names(profiled)["all_reduce"] == 3


@run_on_ranks()
def test_rows_of_the_averaging_in_parallel() -> None:
    model = syncengine.Parallel(nn.Sequential(nn.Linear(24, 300), nn.Linear(300, 300)), bucket_cap_mb=1e-6)
    for i in range(4):
        with profile() as profiled:
            model(torch.ones(2, 24)).sum().backward()
        if i > 2:
            of_buckets = {name.partition(" (")[0] for name in names(profiled)}
            assert of_buckets == {f"all_reduce of bucket {i} of Parallel(Sequential)" for i in range(4)}
            assert any("(1.weight" in name for name in names(profiled))
    assert model.sync_stats()["buckets"] == 4
