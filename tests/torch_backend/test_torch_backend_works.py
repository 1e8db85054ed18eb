"""The torch.distributed backend "syncengine": works, futures, and what becomes of errors."""

import os
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from pool import RankPool, run_on_ranks
from torch.distributed import ReduceOp
from torch_backend_values import equal, ours
from torch_versions import since_2_13

import syncengine
from syncengine.errors import InvalidUsage, Mismatch


@run_on_ranks(hosts=["aa", "ab"], gloo=True, settings=None)
def test_works_and_futures() -> None:
    group = ours()
    tensor = torch.ones(3, 4).t()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    done = work.get_future().then(lambda future: future.value()[0] * 2)
    assert equal(done.wait(), torch.full((4, 3), 4.0))
    assert work.is_completed()
    assert work.is_success()
    assert equal(tensor, torch.full((4, 3), 2.0))
    assert work.result()[0] is tensor or equal(work.result()[0], tensor)
    work = dist.barrier(group, async_op=True)
    while not work.is_completed():
        pass
    assert work.get_future().wait() == []
    backend = group._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    dist.barrier(group)
    assert backend._get_sequence_number_for_group() == before + 1
    backend._set_sequence_number_for_group()
    assert backend.name() == "syncengine"
    assert (backend.rank(), backend.size()) == (dist.get_rank(), 2)


@run_on_ranks(gloo=True, settings=None)
def test_other_threads_run_while_a_work_is_synchronized() -> None:
    """Rank 1 calls when it hears from another thread of rank 0."""
    group, tensor = ours(timeout=timedelta(seconds=25)), torch.ones(1)
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)  # over Gloo
        dist.all_reduce(tensor, group=group)
    else:
        work, begins = dist.all_reduce(tensor, group=group, async_op=True), threading.Event()

        def tell() -> None:
            begins.wait()
            for _ in range(600):  # a wait with the GIL lets it go every 50 ms
                time.sleep(0.001)
            dist.send(torch.empty(1), 1)

        thread = threading.Thread(target=tell)
        thread.start()
        begins.set()
        work.synchronize()
        thread.join()
    assert tensor.item() == 2


@run_on_ranks(gloo=True, settings=None)
def test_errors_reach_futures_and_later_calls():
    group = ours()
    future = dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group, async_op=True).get_future()
    with pytest.raises(Mismatch) as error:
        future.wait()
    with pytest.raises(Mismatch):
        dist.barrier(group)
    dist.barrier()  # Gloo's: not concerned
    text = str(error.value)
    assert "all_reduce(sum, float32, 3 elements)" in text
    assert "all_reduce(sum, float32, 4 elements)" in text


@run_on_ranks(gloo=True, settings=None)
def test_what_can_not_work_is_refused_by_name() -> None:
    group = ours()
    backend = group._get_backend(torch.device("cpu"))
    with pytest.raises(InvalidUsage, match=r"all_reduce: ReduceOp.BOR has no meaning for dtype Float.*convert"):
        dist.all_reduce(torch.ones(2), ReduceOp.BOR, group)
    with pytest.raises(InvalidUsage, match=r"ReduceOp.AVG has no meaning for dtype Bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG, group)
    with pytest.raises(InvalidUsage, match=r"ReduceOp.PREMUL_SUM has no meaning for dtype Int"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), dist._make_nccl_premul_sum(0.5), group)
    with pytest.raises(InvalidUsage, match=r"all_reduce_coalesced: got an empty list: give at least one"):
        backend.allreduce_coalesced([])
    with pytest.raises(InvalidUsage, match=r"merge_remote_group: .* make one of all the ranks"):
        group.merge_remote_group(dist.HashStore(), 2, timedelta(seconds=1))
    with pytest.raises(InvalidUsage, match=r"dense CPU (or CUDA )?tensors, not one on meta"):
        backend.allreduce([torch.ones(2, device="meta")])
    with pytest.raises(InvalidUsage, match=r"dense CPU (or CUDA )?tensors, not one of layout Sparse"):
        backend.allreduce([torch.ones(2).to_sparse()])
    with pytest.raises(InvalidUsage, match=r"the larger tensor has 5 elements; it needs 2 times 2"):
        dist.all_gather_into_tensor(torch.empty(5), torch.ones(2), group)
    with pytest.raises(InvalidUsage, match=r"pg_options .*ProcessGroupGloo._Options.* leave them out.*SYNCENGINE_"):
        dist.new_group(backend="syncengine", pg_options=dist.ProcessGroupGloo._Options())
    dist.barrier(group)  # nothing has failed


def impatient() -> dist.ProcessGroup:
    """A group with a short timeout, which is torch's limit for making it, too: a busy machine may need a longer one."""
    for seconds in (1.5, 15):
        group, errors = None, [""] * dist.get_world_size()
        dist.barrier()
        try:
            group = ours(timeout=timedelta(seconds=seconds))
        except Exception as error:
            dist.all_gather_object(errors, repr(error))
        else:
            dist.all_gather_object(errors, "")
        if not any(errors):
            return group
    raise AssertionError(errors)


@pytest.mark.parametrize("how", ["group", "set", pytest.param("call", marks=since_2_13), "wait", "monitored"])
@run_on_ranks(hosts=mostly_nightly(["aa", "ab"], 1), gloo=True, settings=None)
def test_timeouts_name_the_rank_that_is_missing(how: str):
    group = impatient() if how == "group" else ours(timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        dist.barrier()
        return
    with pytest.raises(syncengine.errors.Timeout, match="rank 0 waits for rank 1") as error:
        if how == "group":
            dist.all_reduce(torch.ones(1), group=group)
        elif how == "set":
            group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=0.3))
            dist.all_reduce(torch.ones(1), group=group)
        elif how == "call":
            dist.barrier(group, timeout=timedelta(seconds=0.3))
        elif how == "wait":
            dist.all_reduce(torch.ones(1), group=group, async_op=True).wait(timedelta(seconds=0.3))
        elif how == "monitored":
            group._get_backend(torch.device("cpu")).monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
    assert isinstance(error.value, TimeoutError)
    assert ("monitored_barrier()" in str(error.value)) == (how == "monitored")
    dist.barrier()


@run_on_ranks(gloo=True, settings=None)
def test_the_timeout_of_the_environment() -> None:
    with mock.patch.dict(os.environ, SYNCENGINE_TIMEOUT="20"):
        groups = [ours(), ours(timeout=timedelta(seconds=40))]
    found = [group._get_backend(torch.device("cpu")).communicator.timeout for group in groups]
    assert found == [20, 40]  # what torch was given comes first


def leave_or_die(how: str) -> str | None:
    group = ours()
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the data set is empty")
        if how == "die":
            os._exit(1)
        group.abort() if how == "abort" else dist.destroy_process_group(group)
        return None
    with pytest.raises(syncengine.errors.SyncError) as error:
        for _ in range(2):
            dist.all_reduce(torch.ones(1), group=group)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "Aborted: rank 1: ValueError: the data set is empty"),
        ("die", "PeerLost: rank 1 died while rank 0 was in all_reduce"),
        ("abort", "Aborted: rank 1 aborted the process group"),
        ("destroy", "PeerLost: rank 1 has left"),
    ],
)
def test_a_rank_that_goes_is_named(pool: RankPool, how: str, text: str):
    with pool.spawn_ranks(leave_or_die, how, gloo=True, settings=None) as ranks:
        assert text in ranks[0].result()
