"""The torch.distributed backend "syncengine": calls that one thread coalesces, beside others' calls."""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import run_on_ranks
from torch.distributed.distributed_c10d import _coalescing_manager
from torch_backend_values import equal, ours

from syncengine.errors import InvalidUsage, SyncError, Timeout


def in_thread(body: Callable[[], None]) -> None:
    """Runs it to its end in another thread."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(body).result()


@run_on_ranks(gloo=True, settings=None)
def test_each_thread_coalesces_its_own_calls() -> None:
    group, rank = ours(), dist.get_rank()
    backend = group._get_backend(torch.device("cpu"))
    backend._start_coalescing()
    assert backend.allreduce([mine := torch.ones(3, 2).t()]) is None

    def other() -> None:
        tensor = torch.ones(2)
        backend.allreduce([tensor]).wait()  # begun outside of the coalescing
        assert equal(tensor, torch.full((2,), 2.0))
        backend._start_coalescing()
        assert backend.allreduce([tensor]) is None
        backend._end_coalescing().wait()
        assert equal(tensor, torch.full((2,), 4.0))

    in_thread(other)
    assert backend.allreduce([last := torch.full((2,), float(rank))]) is None
    backend._end_coalescing().wait()
    assert equal(mine, torch.full((2, 3), 2.0))
    assert equal(last, torch.ones(2))


@run_on_ranks(gloo=True, settings=None)
def test_calls_on_a_tensor_wait_for_those_on_it_in_a_block_before() -> None:
    """Elements with gaps go through a copy, which is read at the call. The block's message may be what is to come."""
    group, rank = ours(), dist.get_rank()
    backend = group._get_backend(torch.device("cpu"))
    tensor, received = torch.ones(4, 6)[:, ::2], torch.zeros(1)
    if rank == 1:
        time.sleep(0.2)  # the other one has called by then, but for its waiting
    backend._start_coalescing()
    backend.recv([received], 1 - rank, 0)
    backend.allreduce([tensor])
    backend.allreduce([tensor])
    coalesced = backend._end_coalescing()
    later = dist.all_reduce(tensor, group=group, async_op=True)
    assert later is not None
    later.wait()
    assert equal(tensor, torch.full((4, 3), 8.0))
    dist.isend(torch.ones(1), 1 - rank, group)
    coalesced.wait()
    assert equal(tensor, torch.full((4, 3), 8.0))
    assert equal(received, torch.ones(1))


@run_on_ranks(gloo=True, settings=None)
def test_a_thread_does_not_inherit_what_one_before_left_open() -> None:
    group = ours()
    backend = group._get_backend(torch.device("cpu"))
    for _ in range(20):  # one of them gets the number that the system gave one before
        in_thread(backend._start_coalescing)

        def other() -> None:
            dist.all_reduce(tensor := torch.ones(2), group=group)
            assert equal(tensor, torch.full((2,), 2.0))

        in_thread(other)


@run_on_ranks(gloo=True, settings=None)
def test_what_an_error_ends_has_its_results_all_the_same() -> None:
    group = ours()
    backend = group._get_backend(torch.device("cpu"))
    for how in ("refused", "refused on one rank", "begun anew"):
        strided, plain = torch.ones(3, 2).t(), torch.ones(2)
        backend._start_coalescing()
        backend.allreduce([strided])
        backend.allreduce([plain])
        if how == "begun anew":
            backend._start_coalescing()
            backend._end_coalescing()
        elif how == "refused" or dist.get_rank() == 0:
            with pytest.raises(InvalidUsage):
                backend.allreduce([torch.ones(2).to_sparse()])
        else:
            backend._end_coalescing().wait()
        dist.barrier(group)
        assert equal(plain, torch.full((2,), 2.0)), how
        assert equal(strided, torch.full((2, 3), 2.0)), how
    for _ in range(2):  # one that nobody ends goes with the group
        backend._start_coalescing()
        backend.allreduce([strided])
    dist.destroy_process_group(group)


@pytest.mark.thorough
@run_on_ranks(gloo=True, settings=None)
def test_what_a_body_has_called_before_it_raises_takes_place():
    group, rank = ours(), dist.get_rank()
    strided, plain, never = torch.full((3, 2), float(rank)).t(), torch.full((3, 2), float(rank)), torch.zeros(1)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    with pytest.raises(ValueError, match="of the program"), _coalescing_manager(group, torch.device("cpu")):
        dist.irecv(never, 1 - rank, group)
        dist.broadcast(strided, 1, group)
        dist.broadcast(plain, 1, group)
        raise ValueError("of the program")
    dist.barrier(group)
    assert equal(strided, torch.ones(2, 3))
    assert equal(plain, torch.ones(3, 2))
    if rank == 1:
        time.sleep(0.5)
    dist.broadcast(plain.fill_(rank + 5.0), 1, group)  # on its own, so rank 0 waits for it
    assert equal(plain, torch.full((3, 2), 6.0))
    works = [dist.isend(torch.ones(1), 1 - rank, group, tag=tag) for tag in (0, 1)]
    works.append(dist.irecv(torch.zeros(1), 1 - rank, group, tag=1))
    for work in works:
        work.wait()
    dist.barrier(group)


@run_on_ranks(gloo=True, settings=None)
def test_a_manager_that_outlives_its_body():
    """Which is then there after its body has raised: the next call notices."""
    group, rank = ours(), dist.get_rank()
    plain = torch.full((2,), float(rank))
    manager = _coalescing_manager(group, torch.device("cpu"))
    with pytest.raises(ValueError, match="of the program"), manager:
        dist.broadcast(plain, 1, group)
        raise ValueError("of the program")
    if rank == 1:
        time.sleep(0.5)
    dist.broadcast(plain.fill_(rank + 5.0), 1, group)
    assert equal(plain, torch.full((2,), 6.0))


@run_on_ranks(gloo=True, settings=None)
def test_a_barrier_among_coalesced_calls() -> None:
    group, rank = ours(), dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    strided, plain = torch.full((3, 2), float(rank)).t(), torch.full((2,), float(rank))
    with _coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(strided, 1, group)
        if rank == 1:
            time.sleep(0.5)
            store.set("late", "here")
        dist.barrier(group)  # waits
        assert store.check(["late"])
        dist.broadcast(plain, 1, group)
        group._get_backend(torch.device("cpu")).monitored_barrier()
    manager.wait()
    assert equal(strided, torch.ones(2, 3))
    assert equal(plain, torch.ones(2))


@pytest.mark.thorough
@run_on_ranks(gloo=True, settings=None)
def test_the_timeout_of_a_wait_is_one_for_all_of_its_calls():
    group, rank = ours(), dist.get_rank()
    backend = group._get_backend(torch.device("cpu"))
    tensors = [torch.ones(2) for _ in range(3)]
    dist.barrier()
    if rank == 1:
        with contextlib.suppress(SyncError):  # rank 0 gives up
            for tensor in tensors:
                time.sleep(0.7)
                backend.allreduce([tensor]).wait()
        return
    backend._start_coalescing()
    for tensor in tensors:
        backend.allreduce([tensor])
    with pytest.raises(Timeout, match=r"wait\(timeout=...\) gave up"):
        backend._end_coalescing().wait(timedelta(seconds=1))


@run_on_ranks(gloo=True, settings=None)
def test_a_coalesced_receive_from_any_rank_knows_its_sender() -> None:
    group, rank = ours(), dist.get_rank()
    with _coalescing_manager(group, torch.device("cpu"), async_ops=True) as coalesced:
        if rank == 0:
            dist.irecv(received := torch.zeros(2), group=group)
        else:
            dist.isend(torch.ones(2), 0, group)
        dist.broadcast(torch.zeros(2), 0, group)
    coalesced.wait()
    if rank == 0:
        assert equal(received, torch.ones(2))
        assert coalesced.works[0]._source_rank() == 1


@run_on_ranks(gloo=True, settings=None)
def test_coalesced_exchanges_put_their_own_parts() -> None:
    group, rank = ours(), dist.get_rank()
    gathered, exchanged, back = torch.zeros(2, 3), torch.zeros(2), torch.arange(4.0).view(2, 2).t()
    with _coalescing_manager(group, torch.device("cpu"), async_ops=True) as coalesced:
        dist.gather(torch.full((3,), rank + 1.0), list(gathered) if rank == 0 else None, 0, group)
        dist.all_to_all_single(exchanged, torch.full((2,), rank + 1.0), group=group)
        dist.all_to_all_single(back, back, group=group)  # of copies, which its own part reaches before the tensor
    coalesced.wait()
    assert equal(gathered, torch.tensor([[1.0] * 3, [2.0] * 3]) if rank == 0 else torch.zeros(2, 3))
    assert equal(exchanged, torch.tensor([1.0, 2.0]))
    assert equal(back, torch.tensor([[0.0, 2.0], [0.0, 2.0]] if rank == 0 else [[1.0, 3.0], [1.0, 3.0]]))
