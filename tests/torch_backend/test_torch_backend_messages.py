"""The torch.distributed backend "syncengine": point-to-point calls, and the collectives that are made of messages."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import WITHIN, seconds_after
from pool import RankPool, run_on_ranks
from torch.distributed import ReduceOp
from torch_backend_values import equal, ours, value

from syncengine.errors import InvalidUsage, Mismatch, PeerLost, Timeout

LARGE = 700_001  # elements: several staged pieces


@run_on_ranks(hosts=["aaaa", "aabb"], gloo=True, settings=None)
def test_receive_from_any_rank() -> None:
    group, rank = ours(), dist.get_rank()
    for size in (3, LARGE):
        if rank:
            dist.send(value(torch.float32, rank, size), 0, group, tag=size)
        else:
            sources = set()
            for _ in range(3):
                received = torch.empty(size)
                source = dist.recv(received, group=group, tag=size)
                assert equal(received, value(torch.float32, source, size))
                sources.add(source)
            assert sources == {1, 2, 3}


@run_on_ranks(hosts=["aa", "ab"], gloo=True, settings=None)
def test_messages_match_by_tag_and_in_order() -> None:
    group, rank, count = ours(), dist.get_rank(), 50
    buffers = [torch.full((10 if i % 2 else 5000,), i if rank == 0 else -1) for i in range(count)]
    if rank == 0:
        works = [dist.isend(b, 1, group, tag=i % 4) for i, b in enumerate(buffers)]
        dist.barrier(group)
    else:
        dist.barrier(group)
        order = sorted(range(count), key=lambda i: (-(i % 4), i))  # the last tag first
        works = [dist.irecv(buffers[i], 0, group, tag=i % 4) for i in order]
    for work in reversed(works):
        work.wait()
    assert all(bool((b == i).all()) for i, b in enumerate(buffers))


@run_on_ranks(hosts=["aaa", "aba"], gloo=True, settings=None)
def test_a_future_of_a_message_that_comes_late_does_not_hold_up_the_others() -> None:
    group, rank = ours(), dist.get_rank()
    late = dist.irecv(first := torch.empty(5), (rank - 1) % 3, group, tag=1).get_future()
    early = dist.irecv(torch.empty(5), (rank - 1) % 3, group, tag=2).get_future()
    dist.send(torch.ones(5), (rank + 1) % 3, group, tag=2)
    early.wait()
    dist.send(torch.ones(5), (rank + 1) % 3, group, tag=1)
    assert late.wait()[0] is first or equal(first, torch.ones(5))
    future = dist.isend(torch.ones(LARGE), (rank + 1) % 3, group).get_future()
    dist.recv(torch.empty(LARGE), (rank - 1) % 3, group)
    future.wait()


def receive_what_was_not_sent(how: str) -> str | None:
    group, rank = ours(), dist.get_rank()
    dist.barrier()
    if rank == 1:
        if how == "size":
            with pytest.raises(Mismatch):
                dist.send(torch.ones(5000), 0, group)
        elif how == "collective":
            with pytest.raises(Mismatch):
                dist.scatter(torch.ones(3), None, 0, group)
        elif how == "die":
            os._exit(1)
        elif how == "late":
            dist.barrier()
        return None
    kind = {"size": Mismatch, "collective": Mismatch, "die": PeerLost, "late": Timeout}[how]
    with pytest.raises(kind) as error:
        if how == "collective":
            dist.scatter(torch.ones(3), [torch.ones(3), torch.ones(4)], 0, group)
            dist.barrier(group)
        elif how == "late":
            dist.irecv(torch.ones(3), 1, group, tag=5).wait(timedelta(seconds=0.3))
        else:
            dist.recv(torch.ones(3), 1, group, tag=0)
    text = str(error.value)
    if how == "late":
        dist.barrier()
        seconds = seconds_after("rank 0 waits for rank 1 since", text)
        assert 0.3 <= seconds < WITHIN
        text = text.replace(f" since {seconds} s ", " since 0.3 s ")
    return text


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("size", "rank 0 called recv(from rank 1 of the group, tag 0) for 12 bytes where rank 1 sent 20000 bytes"),
        ("collective", "rank 1 called scatter(from rank 0 of the group) for 12 bytes where rank 0 sent 16 bytes"),
        ("die", "rank 1 died while rank 0 was in recv(from rank 1 of the group, tag 0)"),
        ("late", "rank 0 waits for rank 1 since 0.3 s in recv(from rank 1 of the group, tag 5)"),  # or tenths more
    ],
)
def test_what_does_not_come_is_named(pool: RankPool, how: str, text: str, hosts: str):
    with pool.spawn_ranks(receive_what_was_not_sent, how, hosts=hosts, gloo=True, settings=None) as ranks:
        told = ranks[0].result()
        # Why a rank of another host is thought to be dead stands between these.
        assert text in told if hosts == "aa" else all(part in told for part in text.split(" while "))
        if how != "die":
            ranks[1].result()


@run_on_ranks(world=3, gloo=True, settings=None)
def test_a_message_of_any_rank_is_not_awaited_when_all_have_left() -> None:
    group = ours(timeout=timedelta(seconds=20))
    if dist.get_rank() > 0:
        dist.send(torch.ones(4), 0, group)
        dist.destroy_process_group(group)
        return
    for _ in range(2):
        dist.recv(torch.ones(4), group=group)
    with pytest.raises(PeerLost, match=r"^ranks 1, 2 have left .* while rank 0 was in recv\(from any rank"):
        dist.recv(torch.ones(4), group=group)


@run_on_ranks(gloo=True, settings=None)
def test_wrong_calls_are_refused_on_the_rank_that_makes_them() -> None:
    group = ours()
    with pytest.raises(InvalidUsage, match=r"all_to_all: 3 rows don't go into 2 equal parts"):
        dist.all_to_all_single(torch.ones(3), torch.ones(3), group=group)
    with pytest.raises(InvalidUsage, match=r"needs 2 split sizes that add up to 4 rows"):
        dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [1, 2], group)
    backend = group._get_backend(torch.device("cpu"))
    with pytest.raises(InvalidUsage, match=r"rank 7 of the group is not in 0\.\.1"):
        backend.send([torch.ones(1)], 7, 0)
    dist.barrier(group)


def exchange(
    group: dist.ProcessGroup, how: str, number: float, bad: bool = False, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """The call of 2 ranks that `how` names, which this rank refuses if it is `bad`; what it got."""
    rank = dist.get_rank()
    size = 5000 if how.endswith("large") else 3
    parts = list(torch.full((2, size), number, dtype=dtype))
    received = list(torch.empty(2, size, dtype=dtype))
    if how.startswith("scatter"):
        output = received[0].expand(2, size) if bad else received[0]
        dist.scatter(output, parts if rank == 1 else None, 1, group)
        return [output]
    if bad:
        received[0] = torch.empty(size + 1)
    if how.startswith("gather"):
        dist.gather(parts[0], received if rank == 0 else None, 0, group)
        return received if rank == 0 else []
    if how == "all_to_all_single":
        dist.all_to_all_single(whole := torch.cat(received), torch.cat(parts), group=group)
        return list(whole.chunk(2))
    dist.all_to_all(received, parts, group)
    return received


@pytest.mark.parametrize("how", ["gather", "scatter", "all_to_all", "all_to_all_single"])
@run_on_ranks(gloo=True, settings=None)
def test_parts_of_another_dtype_are_a_mismatch(how: str):
    group = ours()
    with pytest.raises(Mismatch) as error:
        exchange(group, how, 1, dtype=(torch.float32, torch.int32)[dist.get_rank()])  # of one size
        dist.barrier(group)
    text = str(error.value)
    assert f"called {how.removesuffix('_single')}(from rank" in text
    assert "of another dtype" in text


@run_on_ranks(gloo=True, settings=None)
def test_nothing_has_no_dtype() -> None:
    group, rank = ours(), dist.get_rank()
    ids = torch.tensor([3, 5] if rank == 0 else [])  # int64; float32
    count = len(ids)
    for backend_group in (group, dist.group.WORLD):
        dist.all_to_all_single(torch.empty_like(ids), ids, [count, 0], [count, 0], group=backend_group)
    dist.barrier(group)


@pytest.mark.parametrize(
    "how", ["gather", "gather large", "scatter", "scatter large", "all_to_all", "all_to_all large"]
)
@run_on_ranks(hosts=["aa", "ab"], gloo=True, settings=None)
def test_a_call_that_one_rank_refused_is_not_taken_for_the_next(how: str):
    group, rank = ours(), dist.get_rank()
    for tag in (4, 5):  # the program's own messages count nothing
        if rank == 0:
            dist.send(torch.ones(tag), 1, group, tag=tag)
        else:
            dist.recv(torch.ones(tag), 0, group, tag=tag)
    for call in range(3):
        assert all(bool((t == call).all()) for t in exchange(group, how, float(call)))
    with pytest.raises(Mismatch) as error:
        try:
            exchange(group, how, 10.0, bad=rank == 0)
        except InvalidUsage:
            assert rank == 0
        exchange(group, how, 20.0)
        dist.barrier(group)
    text = str(error.value)
    name = how.split(" ", maxsplit=1)[0]
    there = [(0, 1), (1, 0)] if name == "all_to_all" else [(0, 1)]  # where it may be noticed
    assert any(f"rank {a} called {name}(from rank {b} of the group) for" in text for a, b in there)
    assert "in another call of a collective" in text


def collectives(group: dist.ProcessGroup, bad: bool) -> list[tuple[Callable[[], Any], torch.Tensor, torch.Tensor]]:
    """One call of each other kind, which this rank refuses if it is `bad`: its target, and what that will be."""
    rank, backend = dist.get_rank(), group._get_backend(torch.device("cpu"))
    reduced, several, rooted, part, sent = (torch.full((2,), rank + 1.0) for _ in range(5))
    whole, listed, packed = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    one, sum_of_both, of_each = torch.full((2,), rank + 1.0), torch.full((2,), 3.0), torch.tensor([1.0, 1, 2, 2])
    mine = of_each[2 * rank :][:2] * 2
    op = ReduceOp.BOR if bad else ReduceOp.SUM
    target = torch.zeros(1).expand(2) if bad else sent
    lists = [list(listed.chunk(2)), list(packed.chunk(2))]
    if bad:
        lists = [[torch.zeros(3), torch.zeros(2)]] * 2
    return [
        (lambda: dist.all_reduce(reduced, op, group), reduced, sum_of_both),
        (lambda: backend.allreduce_coalesced([] if bad else [several]).wait(), several, sum_of_both),
        (lambda: dist.reduce(rooted, 1, op, group), rooted, sum_of_both if rank else torch.ones(2)),
        (lambda: dist.broadcast(target, 1, group), target, torch.full((2,), 2.0)),
        (lambda: dist.all_gather_into_tensor(whole[: 3 if bad else 4], one, group), whole, of_each),
        (lambda: dist.all_gather(lists[0], one, group), listed, of_each),
        (lambda: dist.all_gather_coalesced([[t] for t in lists[1]], [one], group), packed, of_each),
        (lambda: dist.reduce_scatter_tensor(part, of_each[: 3 if bad else 4], group=group), part, mine),
    ]


@run_on_ranks(gloo=True, settings=None)
def test_a_collective_that_one_rank_refused_may_be_repeated() -> None:
    group, rank = ours(), dist.get_rank()
    for refused in range(len(collectives(group, False))):
        if rank == 0:
            with pytest.raises(InvalidUsage):
                collectives(group, True)[refused][0]()
        call, target, expected = collectives(group, False)[refused]
        call()
        assert equal(target, expected), refused
        for how in ("gather", "scatter large", "all_to_all"):
            assert all(bool((t == refused).all()) for t in exchange(group, how, float(refused)))
    number = torch.tensor(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group())
    numbers = [torch.zeros_like(number) for _ in range(2)]
    dist.all_gather(numbers, number)
    assert numbers[0] == numbers[1]


@run_on_ranks(gloo=True, settings=None)
def test_a_collective_that_one_rank_refused_and_left_out_is_named_by_a_gather():
    group, rank = ours(), dist.get_rank()
    tensor = torch.zeros(1).expand(2) if rank == 0 else torch.ones(2)
    with pytest.raises(Mismatch) as error:
        try:
            dist.broadcast(tensor, 1, group, async_op=True)
        except InvalidUsage:
            assert rank == 0
        exchange(group, "gather", 20.0)
        dist.barrier(group)
    text = str(error.value)
    assert "called gather(to rank 0 of the group)" in text
    assert "called broadcast(from rank 1 of the group, float32, 2 elements)" in text


@run_on_ranks(gloo=True, settings=None)
def test_a_gather_that_one_rank_left_out_is_named_by_the_next_collective():
    group, rank = ours(), dist.get_rank()
    with pytest.raises(Mismatch) as error:
        if rank == 1:
            exchange(group, "gather", 10.0)
        dist.all_reduce(torch.ones(1), group=group)
    text = str(error.value)
    assert "called gather(to rank 0 of the group)" in text
    assert "called all_reduce(sum, float32, 1 elements)" in text


@run_on_ranks(gloo=True, settings=None)
def test_a_batch_that_raises_leaves_the_group_as_it_was() -> None:
    group, rank = ours(), dist.get_rank()
    backend = group._get_backend(torch.device("cpu"))
    peer = 1 - rank

    def batch(*last: dist.P2POp) -> list[dist.Work]:
        send = dist.P2POp(dist.isend, torch.full((3,), rank + 1.0), peer, group)
        receive = dist.P2POp(dist.irecv, received, peer, group)
        return dist.batch_isend_irecv([send, receive, *last])

    sparse = dist.P2POp(dist.irecv, torch.ones(2).to_sparse(), peer, group)
    nobody = dist.P2POp(dist.irecv, torch.ones(2), peer, group)
    nobody.group_peer = 7
    for bad, error in ((sparse, NotImplementedError), (nobody, InvalidUsage)):
        received = torch.zeros(3)
        with pytest.raises(error):
            batch(bad)
        dist.all_reduce(total := torch.ones(2), group=group)
        assert equal(total, torch.full((2,), 2.0))
        dist.barrier(group)
        assert equal(received, torch.full((3,), peer + 1.0))  # what came before it took place, as with Gloo
        received = torch.zeros(3)
        for work in batch():
            work.wait()
        assert equal(received, torch.full((3,), peer + 1.0))

    # The same of the calls themselves, which are torch's to end.
    backend._start_coalescing()
    with pytest.raises(InvalidUsage):
        backend.send([torch.ones(2)], 7, 0)
    with pytest.raises(InvalidUsage, match="no coalescing has begun"):
        backend._end_coalescing()
    backend.allreduce([total]).wait()
    assert equal(total, torch.full((2,), 4.0))
