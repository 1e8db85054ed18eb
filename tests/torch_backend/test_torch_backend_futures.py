"""The torch.distributed backend "syncengine": callbacks of futures, which may block and make calls themselves."""

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from parallel_models import Run, different_bits, train
from pool import run_on_ranks
from refusals import needs_seccomp, refuse
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch_backend_values import ours

import syncengine

LATE = 0.3  # seconds


def be_late(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(LATE)


def begin(group: dist.ProcessGroup) -> Future[Any]:
    """The sum of ones over all ranks."""
    return dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()


def total(future: Future[Any]) -> float:
    return float(future.wait()[0])


def now_it_begins() -> torch.Tensor:
    """When this is. On the rank that is late: before any callback runs."""
    return torch.tensor(time.monotonic(), dtype=torch.float64)


def check_completers(began: torch.Tensor) -> None:
    """At most two threads complete futures, and one more for each 10 ms of callbacks: since `began` on rank 1.

    Rank 1, which is late, has none if each of its calls was complete when it asked for the future.
    """
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    count, now = names.count("syncengine-c10d"), time.monotonic()
    dist.broadcast(began, 1)
    assert 1 - dist.get_rank() <= count <= 3 + (now - began.item()) / 0.01, (count, now - began.item())


@run_on_ranks(gloo=True, settings=None)
def test_eight_callbacks_wait_within_each_other() -> None:
    group = ours()

    def nest(depth: int, late: int) -> Future[float]:
        def callback(future: Future[Any]) -> float:
            if depth == 4:
                be_late(late)
            return total(future) + (nest(depth - 1, late).wait() if depth > 1 else 0)

        return begin(group).then(callback)

    for late in (0, 1, 1):
        assert nest(8, late).wait() == 16
    works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(3)]  # nothing has stayed behind
    assert [total(work.get_future()) for work in works] == [2, 2, 2]


@pytest.mark.nightly
@run_on_ranks(gloo=True, settings=None)
def test_a_chain_of_callbacks_that_each_wait() -> None:
    group = ours()
    for late in (0, 1):
        dist.barrier()
        be_late(late)
        future = begin(group)
        for _ in range(8):
            future = future.then(lambda f: [f.wait()[0] + total(begin(group))])
        assert total(future) == 18


@run_on_ranks(gloo=True, settings=None)
def test_a_callback_may_wait_for_what_began_before_it() -> None:
    """It asks for no future itself, so that nothing but its silence tells that it waits."""
    group = ours()
    if dist.get_rank() == 1:
        dist.barrier()  # nothing is complete before rank 0 has added all callbacks
    began = now_it_begins()
    futures = [begin(group) for _ in range(16)]
    if dist.get_rank() == 1:  # they are complete too soon here
        dist.broadcast(began, 1)
        dist.barrier(group)
        return
    both = futures[0].then(lambda f: total(f) + total(futures[1]))
    happened = [threading.Event() for _ in range(7)]
    pairs = zip(futures[2:9], happened, strict=True)
    waiting = [future.then(lambda f, event=event: event.wait(60)) for future, event in pairs]
    for future, event in zip(futures[9:], reversed(happened), strict=True):
        future.then(lambda f, event=event: event.set())
    dist.barrier()
    assert both.wait() == 4
    assert all(future.wait() for future in waiting)
    check_completers(began)
    dist.barrier(group)


@run_on_ranks(gloo=True, settings=None)
def test_callbacks_of_messages_may_wait_for_messages() -> None:
    group, rank = ours(), dist.get_rank()

    def receive(tag: int) -> Future[Any]:
        return dist.irecv(torch.empty(1), 1 - rank, group, tag=tag).get_future()

    def nest(tag: int) -> Future[float]:
        return receive(tag).then(lambda f: total(f) + (nest(tag + 1).wait() if tag < 7 else 0))

    whole = nest(0)
    dist.barrier()
    be_late(1)
    for tag in range(8):
        dist.send(torch.full((1,), tag + 1.0), 1 - rank, group, tag=tag)
    assert whole.wait() == 36
    dist.barrier(group)


def numbers_and_threads(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """The number and the thread of each of 200 callbacks, in the order in which they run."""
    seen: list[tuple[int, int]] = []
    if dist.get_rank() == 1:
        dist.barrier()  # nothing is complete before rank 0 has added all callbacks
    futures = [begin(group).then(lambda f, i=i: seen.append((i, threading.get_ident()))) for i in range(200)]
    if dist.get_rank() == 0:
        dist.barrier()
    for future in futures:
        future.wait()
    return seen


@run_on_ranks(gloo=True, settings=None)
def test_callbacks_that_do_not_block_run_in_the_order_of_the_calls() -> None:
    """If the machine holds up a callback for 10 ms, another thread goes on, as if it blocked: then all begins anew."""
    began = now_it_begins()
    for _ in range(100):
        group = ours()
        seen = numbers_and_threads(group)
        threads = torch.tensor(len({thread for _, thread in seen}))
        dist.broadcast(threads, 0)  # rank 1 is late: its own thread runs the callbacks of what is complete
        if threads == 1:
            break
        dist.destroy_process_group(group)
    assert threads == 1, "another thread has gone on in each of 100 rounds"
    assert dist.get_rank() == 1 or [number for number, _ in seen] == list(range(200))
    check_completers(began)


@pytest.mark.parametrize("how", ["nested", "behind", "message"])
@run_on_ranks(gloo=True, settings=None)
def test_works_keep_their_deadline_wherever_they_wait(how: str):
    group = ours()
    backend = group._get_backend(torch.device("cpu"))
    if dist.get_rank() == 1:
        begin(group)
        dist.barrier()
        return
    first = begin(group)
    if how == "nested":

        def callback(future: Future[Any]) -> Any:
            future.wait()
            backend.set_timeout(timedelta(seconds=LATE))
            return begin(group).wait()

        future = first.then(callback)
    elif how == "behind":  # others that may take longer
        first.wait()
        begin(group), begin(group)
        backend.set_timeout(timedelta(seconds=LATE))
        future = begin(group)
    elif how == "message":
        backend.set_timeout(timedelta(seconds=LATE))
        future = dist.irecv(torch.empty(1), 1, group).get_future()
    with pytest.raises(Exception, match="rank 0 waits for rank 1") as error:
        future.wait()
    assert "gave up" in str(error.value)
    dist.barrier()


def refuse_threads() -> None:
    """The calling thread can start no other from now on."""
    refuse("clone", "clone3", code=errno.EAGAIN)


@needs_seccomp
@run_on_ranks(gloo=True, settings=None, spawned=True)
def test_a_future_for_which_no_thread_could_start_may_be_asked_for_again() -> None:
    group = ours()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)

        def ask() -> None:
            refuse_threads()
            with pytest.raises(RuntimeError, match="can't start a thread"):
                work.get_future()

        with ThreadPoolExecutor(1) as asking:
            asking.submit(ask).result()
        futures = [work.get_future(), begin(group)]
        dist.barrier()
    else:
        dist.barrier()  # nothing is complete before rank 0 has asked for all futures
        futures = [begin(group), begin(group)]
    assert [total(future) for future in futures] == [2, 2]


@needs_seccomp
@run_on_ranks(gloo=True, settings=None, spawned=True)
def test_one_thread_completes_all_futures_where_no_other_can_start() -> None:
    group = ours()

    def begin_on_rank_0_first(count: int) -> list[Future[Any]]:
        """No future is complete before rank 0 has asked for all of them."""
        if dist.get_rank() == 1:
            dist.barrier()
        return [begin(group) for _ in range(count)]

    (first,) = begin_on_rank_0_first(1)
    if dist.get_rank() == 0:
        first = first.then(lambda _: refuse_threads())  # on the thread that completes futures
        dist.barrier()
    first.wait()
    dist.barrier()  # rank 0's thread is idle by then
    futures = begin_on_rank_0_first(2)
    if dist.get_rank() == 0:
        dist.barrier()
    assert [total(future) for future in futures] == [2, 2]


def with_power_sgd(wrap: Any, group: dist.ProcessGroup | None, module: nn.Module, **options: Any) -> nn.Module:
    model = wrap(module, process_group=group, **options)
    state = powerSGD_hook.PowerSGDState(group, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


@pytest.mark.parametrize("accumulate", mostly_nightly([1, 2], 1))
@run_on_ranks(gloo=True)
def test_power_sgd_trains_to_the_bits_of_gloo(accumulate: int):
    """Its callbacks wait for all-reduces that they begin."""
    run = Run(accumulate=accumulate, options=(("bucket_cap_mb", 100),))
    group = ours()
    reference = train(partial(with_power_sgd, DistributedDataParallel, None), run)
    return sum(
        different_bits(train(partial(with_power_sgd, wrap, group), run), reference)
        for wrap in (DistributedDataParallel, syncengine.Parallel)
    )
