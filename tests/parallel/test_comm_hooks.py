"""Communication hooks, those on buffers too: what they see, raise and cost. torch's: test_torch_comm_hooks.py."""

import contextlib
import gc
import re
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import WITHIN
from marks import flat_at_night, mostly_nightly
from models.workload import same_bits
from parallel_models import CAP, Mlp, Opposite, assert_averaged, average, backwards, both, data, of_both, outcome
from pool import RankPool, run_on_ranks
from random_layers import Layer
from test_torch_comm_hooks import TORCH_HOOKS, plain, with_hook
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location
from torch_versions import since_2_13

import syncengine
from syncengine.errors import Aborted, InvalidUsage

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")


@run_on_ranks(gloo=True)
def test_the_bucket_is_ddps():
    def watch(state, bucket):
        assert type(bucket) is dist.GradBucket
        shapes = [(g.shape, p.shape) for g, p in zip(bucket.gradients(), bucket.parameters(), strict=True)]
        buffer = bucket.buffer()
        state.append((bucket.index(), bucket.is_last(), buffer.shape, buffer.dtype, buffer.sum().item(), shapes))
        return default_hooks.allreduce_hook(None, bucket)

    class Complex(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(torch.complex64)).abs()

    def step(model: nn.Module) -> list[Any]:
        record: list[Any] = []
        model.register_comm_hook(record, watch)
        backwards(model)
        return record + [p.grad.sum().item() for p in model.parameters()]

    for make, options in (
        (Mlp, {"bucket_cap_mb": 0.5}),
        (partial(Complex, 24, 3, dtype=torch.complex64), {"bucket_cap_mb": 0.5}),
        (Mlp, {"bucket_cap_mb_list": [0.2, 0.6]}),  # several buckets from the beginning
        (Mlp, {"bucket_cap_mb": 0.5, "find_unused_parameters": True}),
    ):
        ours, theirs = of_both(step, make, **options)
        assert ours == theirs
        assert len(ours) > 3


@run_on_ranks(gloo=True)
def test_the_buffer_is_all_that_is_copied():
    model = with_hook(syncengine.Parallel, TORCH_HOOKS["all-reduce"], Mlp())
    model(data()).square().mean().backward()
    copied = model.sync_stats()["copied_bytes"]
    assert copied.pop("comm hook") == sum(p.nbytes for p in model.parameters())
    assert not any(copied.values())


@run_on_ranks(gloo=True)
def test_hooks_run_in_the_order_of_buckets():
    """What they send is matched by its order, but ranks are ready in opposite orders here."""

    def hook(state, bucket):
        state.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    def step(model: nn.Module) -> None:
        order: list[int] = []
        model.register_comm_hook(order, hook)
        for i in range(3):
            order.clear()
            model.zero_grad()
            model(data(i)).square().mean().backward()
            assert order == [*range(len(order))]

    both(partial(Opposite, 6), step, **CAP)


@flat_at_night
@run_on_ranks(gloo=True)
def test_futures_may_be_completed_late_and_in_any_order():
    """By another thread, after backward has come to its end, the last bucket's first."""

    def complete(futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]]) -> None:
        time.sleep(0.05)
        for future, result in reversed(futures):
            time.sleep(0.002)
            future.set_result(result)

    def hook(state, bucket):
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        dist.all_reduce(bucket.buffer())
        state.append((future, bucket.buffer() / 2))
        if bucket.is_last():
            threading.Thread(target=complete, args=(state[:],)).start()
            state.clear()
        return future

    def step(model: nn.Module) -> None:
        model.register_comm_hook([], hook)
        backwards(model)

    both(Mlp, step, **CAP)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("kinds_of_buckets", mostly_nightly(["in place", "flat"], 1), indirect=True)
@run_on_ranks(gloo=True)
def test_hooks_in_join(divide: bool):
    """A rank without a batch hands zeros to its hook, which divides by the number of all ranks in any case."""

    def step(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        with model.join(divide_by_initial_world_size=divide):
            for i in range(2 + 2 * syncengine.rank()):
                optimizer.zero_grad()
                model(data(i)).square().mean().backward()
                optimizer.step()
        optimizer.zero_grad()  # those of a rank that has joined are its own

    both(Mlp, step, bucket_cap_mb=0.5)


@run_on_ranks(world=3, gloo=True)
def test_hooks_make_the_weighted_mean():
    """Though they divide by the number of ranks."""
    for name in ("all-reduce", "native all-reduce"):
        torch.manual_seed(0)
        model = with_hook(syncengine.Parallel, TORCH_HOOKS[name], Mlp())
        weight = 1 + 4 * syncengine.rank()  # of 15
        model.weight(weight)
        model(data()).square().mean().backward()
        assert_averaged(model.module, model.module(data()).square().mean() * weight * 3 / 15)


@pytest.mark.thorough
@flat_at_night
@run_on_ranks(gloo=True)
def test_a_backward_in_another_thread_ends_after_the_hook_of_an_earlier_bucket():
    """Two threads go through one forward; the first hook still runs when all gradients have come."""

    def hook(state, bucket):
        if waits and bucket.index() == 0:
            called.set()
            ended.wait(2.0)  # nor must the other thread's backward end before
        return default_hooks.allreduce_hook(state, bucket)

    waits, called, ended = False, threading.Event(), threading.Event()
    heads = nn.ModuleList(nn.Linear(24, 300, bias=False) for _ in range(2))
    heads.forward = lambda x: [head(x) for head in heads]
    model = with_hook(syncengine.Parallel, plain(hook), heads, bucket_cap_mb=1e-3)
    for i in range(2):
        sum(out.square().sum() for out in model(data(i))).backward()
    model.zero_grad()
    late, early = model(data(3))

    def backward(out: torch.Tensor) -> None:
        out.square().sum().backward()
        if out is late:
            ended.set()

    waits = True
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(backward, early)
        assert called.wait(60.0), first
        threads.submit(backward, late).result()
        first.result()
    assert_averaged(model.module, sum(out.square().sum() for out in model.module(data(3))))


@pytest.mark.parametrize(
    ("where", "kind", "text"),
    [
        ("in the hook", KeyError, "no such bucket"),
        ("in its future", KeyError, "no such bucket"),
        ("wrong size", InvalidUsage, "1 elements instead of"),
        ("no future", RuntimeError, "callback must return a torch.futures.Future object, not NoneType"),
    ],
)
@run_on_ranks()
def test_an_error_of_a_hook_reaches_every_rank_at_once(where: str, kind: type[Exception], text: str):
    rank, module = syncengine.rank(), Mlp()

    def hook(state, bucket):
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if rank == 0:
            return future  # never completed: waits for the peer, which does not come
        if where == "in the hook":
            raise KeyError("no such bucket")
        if where == "in its future":
            future.set_exception(KeyError("no such bucket"))
            return future
        return syncengine.hooks.completed(torch.zeros(1)) if where == "wrong size" else None

    raised = kind if rank == 1 else Aborted
    started = time.monotonic()
    with pytest.raises(raised, match=text) as error:  # it may reach rank 0 long before its backward
        model = with_hook(syncengine.Parallel, plain(hook), module, **CAP)
        model(data()).sum().backward()
    assert error.type is raised
    assert all(p.grad is None for p in module.parameters())
    if rank == 0:
        assert time.monotonic() - started < WITHIN
        assert "rank 1: the communication hook" in str(error.value)


@pytest.mark.parametrize("kind", ["a tensor", "a number", "a list", "a text"])
@run_on_ranks(gloo=True)
def test_what_a_hook_must_not_return_is_ddps_error(kind: str):
    def hook(state, bucket):
        if kind == "a tensor":
            return bucket.buffer()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result({"a number": 3, "a list": [bucket.buffer()], "a text": "x"}[kind])
        return future

    def step(model: nn.Module) -> str:
        model.register_comm_hook(None, hook)
        dist.barrier()  # both are at the same place when an error ends it
        return outcome(lambda: model(data()).sum().backward())[0]

    ours, theirs = of_both(step, partial(nn.Linear, 24, 2))
    dist.all_gather_object(of_ranks := ["", ""], ours)
    assert theirs == "RuntimeError"
    assert {"RuntimeError"} <= set(of_ranks) <= {"RuntimeError", "Aborted"}


def lost_peer() -> None:
    model = with_hook(syncengine.Parallel, plain(lambda state, bucket: torch.futures.Future()), Mlp())
    if syncengine.rank() == 1:
        time.sleep(0.5)  # until the other one waits
        signal.raise_signal(signal.SIGKILL)
    with pytest.raises(syncengine.errors.PeerLost, match="rank 1"):
        model(data()).sum().backward()


@flat_at_night
def test_a_rank_that_waits_for_a_hook_hears_of_a_death(pool: RankPool):
    with pool.spawn_ranks(lost_peer) as ranks:
        ranks[0].result(20)


@pytest.mark.thorough
@flat_at_night
@run_on_ranks(settings={"timeout": 2.0})
def test_a_future_that_never_comes_is_a_timeout():
    model = with_hook(syncengine.Parallel, plain(lambda state, bucket: torch.futures.Future()), Mlp())
    loss = model(data()).sum()
    with pytest.raises((syncengine.errors.Timeout, Aborted), match=r"bucket 0 of Parallel.Mlp"):
        loss.backward()


@run_on_ranks(gloo=True)
def test_a_hook_may_not_run_a_forward_that_averages():
    """The hook runs while its backward waits: the first backward of a static graph has all gradients at its end."""
    told = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        with torch.enable_grad():
            told.append(outcome(lambda: model(data(0))))
            with model.no_sync():
                model(data(0))
        return average(state, bucket)

    model = with_hook(syncengine.Parallel, plain(hook), Mlp(), static_graph=True)
    model(data(0)).square().sum().backward()
    assert told and all(kind == "InvalidUsage" and "still waits for averages" in text for kind, text in told), told
    assert_averaged(model.module, model.module(data(0)).square().sum())


@run_on_ranks()
def test_a_forward_may_not_end_while_a_backward_waits():
    began, may_end, told = threading.Event(), threading.Event(), []

    def before_forward(module: nn.Module, inputs: Any) -> None:
        if threading.current_thread() is slow:
            began.set()
            may_end.wait()

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        may_end.set()
        slow.join()
        return average(state, bucket)

    slow = threading.Thread(target=lambda: told.append(outcome(lambda: model(data(1)))))
    model = with_hook(syncengine.Parallel, plain(hook), Mlp(), static_graph=True)
    model.module.register_forward_pre_hook(before_forward)
    loss = model(data(0)).square().sum()
    slow.start()
    began.wait()
    loss.backward()
    assert [kind for kind, _ in told] == ["InvalidUsage"] and "still waits for averages" in told[0][1], told
    model.zero_grad()
    model(data(0)).square().sum().backward()


@run_on_ranks(gloo=True)
def test_a_second_hook_is_refused_as_in_ddp():
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        model = with_hook(wrap, TORCH_HOOKS["all-reduce"], nn.Linear(24, 2))
        for name in ("all-reduce", "native all-reduce"):
            with pytest.raises(RuntimeError, match="can only be called once"):
                TORCH_HOOKS[name](model)


@since_2_13
@run_on_ranks(gloo=True)
def test_bf16_works_on_cpus():
    with pytest.raises(TypeError, match="CUDA"):
        DistributedDataParallel(nn.Linear(24, 2)).register_comm_hook(None, default_hooks.bf16_compress_hook)
    model = syncengine.Parallel(nn.Linear(24, 2))
    own = torch.autograd.grad(model.module(data()).sum(), list(model.parameters()))
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    model(data()).sum().backward()
    for parameter, of_rank in zip(model.parameters(), own, strict=True):
        dist.all_reduce(half := of_rank.bfloat16() / 2)
        assert torch.equal(parameter.grad, half.float())


@run_on_ranks(gloo=True)
def test_a_hook_may_come_after_some_steps():
    def step(model: nn.Module) -> None:
        backwards(model)
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        backwards(model)

    both(Mlp, step, bucket_cap_mb=0.5)


@pytest.mark.parametrize("as_state", [False, True])
@run_on_ranks()
def test_a_model_that_its_hook_refers_to_is_freed(as_state: bool):
    """By the collector, which does not look into C++."""
    model = syncengine.Parallel(nn.Linear(24, 2))
    hook = average if as_state else lambda state, bucket, model=model: average(model, bucket)
    model.register_comm_hook(model if as_state else None, hook)
    model(data()).sum().backward()
    gone = weakref.ref(model)
    del model, hook
    gc.collect()
    assert gone() is None


def counting() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen += x[0, :2]
        return self.layer(x)

    return Layer(forward, layer=nn.Linear(24, 2), seen=nn.Buffer(torch.zeros(2)))


@run_on_ranks(gloo=True)
def test_buffer_hooks():
    def hook(state: list[str], buffers: dict[str, torch.Tensor], async_op: bool) -> Any:
        state += buffers
        works = [dist.all_reduce(b, async_op=async_op) for b in buffers.values()]
        return [work.get_future() for work in works] if async_op else None

    def step(model: nn.Module, location: Location, async_op: bool) -> None:
        names: list[str] = []
        model._register_buffer_comm_hook(names, partial(hook, async_op=async_op), location)
        backwards(model)
        assert names == ["seen"] * 3

    for location, async_op in ((Location.POST_FORWARD, True), (Location.PRE_FORWARD, False)):
        both(counting, partial(step, location=location, async_op=async_op))


@run_on_ranks(gloo=True)
def test_buffer_hooks_under_no_sync():
    def hook(state: list[float], buffers: dict[str, torch.Tensor]) -> None:
        dist.all_reduce(buffers["seen"])
        state.append(buffers["seen"].sum().item())

    def step(model: nn.Module, location: Location) -> list[float]:
        seen: list[float] = []
        model._register_buffer_comm_hook(seen, hook, location)
        for i in range(7):
            with model.no_sync() if i % 3 else contextlib.nullcontext():
                model(data(i)).sum().backward()
        return [*seen, model.module.seen.sum().item()]

    for location in Location:
        ours, theirs = of_both(partial(step, location=location), counting)
        assert ours == theirs
        assert 1 < len(ours) < 8


@pytest.mark.parametrize("alone", [False, True])
@run_on_ranks(settings={"timeout": 20.0})
def test_join_refuses_a_hook_that_would_wait_for_a_rank_without_a_batch(alone: bool):
    model = syncengine.Parallel(counting())
    model._register_buffer_comm_hook(None, lambda _, buffers: None, Location.POST_FORWARD)
    text = "POST_FORWARD hooks need join(throw_on_early_termination=True)"
    with pytest.raises(InvalidUsage if syncengine.rank() == 1 else Aborted, match=re.escape(text)), model.join():
        for i in range(1 + syncengine.rank()):
            with model.no_sync() if i and alone else contextlib.nullcontext():
                model(data(i)).sum().backward()


@pytest.mark.parametrize("location", Location, ids=str)
@run_on_ranks(gloo=True, settings={"timeout": 20.0})
def test_an_error_in_a_buffer_hook_is_told_to_ranks_that_wait_in_theirs(location: Location):
    def hook(rank: int, buffers: dict[str, torch.Tensor]) -> None:
        if rank == 1:
            raise kind("no buffers today")
        syncengine.all_reduce(buffers["seen"])

    kind = ValueError if location is Location.PRE_FORWARD else InvalidUsage
    model = syncengine.Parallel(counting())
    model._register_buffer_comm_hook(syncengine.rank(), hook, location)
    with pytest.raises((kind, Aborted)) as error:
        model(data(0)).sum().backward()
    dist.barrier()  # rank 1 lives on
    told = "" if syncengine.rank() == 1 else f"rank 1 raised in its buffer hook: {kind.__name__}: "
    assert str(error.value) == told + "no buffers today"


@pytest.mark.parametrize("location", Location, ids=str)
@run_on_ranks(gloo=True)
def test_a_buffer_hook_may_call_the_models_own_broadcast(location: Location):
    def hook(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
        model._default_broadcast_coalesced(list(buffers.values()))

    results = []
    ours = partial(syncengine.Parallel, process_group=syncengine.default_communicator())
    for wrap in (ours, DistributedDataParallel):
        torch.manual_seed(0)
        model = wrap(counting())
        model._register_buffer_comm_hook(model, hook, location)
        backwards(model)
        results.append([*(p.grad for p in model.parameters()), model.module.seen])
    assert all(map(same_bits, *results))
