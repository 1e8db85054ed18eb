"""Communication hooks, those on buffers too: what they see, raise and cost. torch's: test_torch_comm_hooks.py."""

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import WITHIN
from marks import flat_at_night, mostly_nightly
from parallel_models import (
    CAP,
    Mlp,
    Opposite,
    assert_averaged,
    average,
    backwards,
    both,
    data,
    different_bits,
    gradients,
    of_both,
    outcome,
)
from pool import RankPool, run_on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location
from torch_versions import since_2_13

import syncengine
from syncengine.errors import Aborted, InvalidUsage

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")

# --- What a hook sees


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
        return record + [g.sum().item() for g in gradients(model)]

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
    model = syncengine.Parallel(Mlp())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(data()).square().mean().backward()
    bytes_of_gradients = sum(p.nbytes for p in model.parameters())
    copied = model.sync_stats()["copied_bytes"]
    assert copied.pop("comm hook") == bytes_of_gradients
    assert not any(copied.values())


@run_on_ranks(gloo=True)
def test_hooks_run_in_the_order_of_buckets():
    """What they send is matched by its order, but ranks are ready in opposite orders here."""

    def step(model: nn.Module) -> None:
        order: list[int] = []

        def hook(state, bucket):
            order.append(bucket.index())
            return default_hooks.allreduce_hook(None, bucket)

        model.register_comm_hook(None, hook)
        for i in range(3):
            model.zero_grad()
            order.clear()
            model(data(i)).square().sum().backward()
            assert order == list(range(len(order)))

    both(partial(Opposite, 6), step, **CAP)


@flat_at_night
@run_on_ranks(gloo=True)
def test_futures_may_be_completed_late_and_in_any_order():
    """By another thread, after backward has come to its end, the last bucket's first."""

    def step(model: nn.Module) -> None:
        open_futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []

        def complete(futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]]) -> None:
            time.sleep(0.05)
            for future, result in reversed(futures):
                time.sleep(0.002)
                future.set_result(result)

        def hook(state, bucket):
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            dist.all_reduce(bucket.buffer())
            open_futures.append((future, bucket.buffer() / 2))
            if bucket.is_last():
                threading.Thread(target=complete, args=(open_futures[:],)).start()
                open_futures.clear()
            return future

        model.register_comm_hook(None, hook)
        backwards(model)

    both(Mlp, step, **CAP)


@pytest.mark.parametrize("kinds_of_buckets", mostly_nightly(["in place", "flat"], 1), indirect=True)
@run_on_ranks(gloo=True)
def test_hooks_in_join():
    """A rank without a batch hands zeros to its hook, which divides by the number of all ranks in any case."""

    def step(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        with model.join(divide_by_initial_world_size=divide):
            for i in range(2 + 2 * syncengine.rank()):
                optimizer.zero_grad()
                model(data(i)).square().mean().backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for divide in (True, False):
        assert not different_bits(*of_both(step, bucket_cap_mb=0.5)), divide


@run_on_ranks(world=3, gloo=True)
def test_hooks_make_the_weighted_mean():
    """Though they divide by the number of ranks."""
    for register in (
        lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
        lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    ):
        torch.manual_seed(0)
        model = syncengine.Parallel(Mlp())
        register(model)
        local = torch.autograd.grad(model.module(data()).square().mean(), list(model.parameters()))
        model.weight(1 + 4 * syncengine.rank())
        model(data()).square().mean().backward()
        for parameter, grad in zip(model.parameters(), local, strict=True):
            total = grad * (1 + 4 * syncengine.rank())
            dist.all_reduce(total)
            torch.testing.assert_close(parameter.grad, total / 15)


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

    waits, errors = False, []
    called, ended = threading.Event(), threading.Event()
    heads = nn.ModuleList(nn.Linear(24, 300, bias=False) for _ in range(2))
    heads.forward = lambda x: [head(x) for head in heads]
    model = syncengine.Parallel(heads, bucket_cap_mb=1e-3)
    model.register_comm_hook(None, hook)
    for i in range(2):
        sum(out.square().sum() for out in model(data(i))).backward()
    model.zero_grad()
    late, early = model(data(3))

    def backward(out: torch.Tensor) -> None:
        try:
            out.square().sum().backward()
        except BaseException as error:
            errors.append(error)
        if out is late:
            ended.set()

    waits = True
    threads = [threading.Thread(target=backward, args=(out,)) for out in (early, late)]
    threads[0].start()
    assert called.wait(60.0), errors
    threads[1].start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert_averaged(model.module, sum(out.square().sum() for out in model.module(data(3))))


# --- Errors


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
        model = syncengine.Parallel(module, **CAP)
        model.register_comm_hook(None, hook)
        model(data()).sum().backward()
    seconds = time.monotonic() - started
    assert error.type is raised
    assert all(p.grad is None for p in module.parameters())
    if rank == 0:
        assert seconds < WITHIN
        assert "rank 1: the communication hook" in str(error.value)


def with_result(kind: str) -> list[str]:
    """Of both, whose hook gives what is none: the type of the error."""

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

    return of_both(step, partial(nn.Linear, 24, 2))


@pytest.mark.parametrize("kind", ["a tensor", "a number", "a list", "a text"])
def test_what_a_hook_must_not_return_is_ddps_error(pool: RankPool, kind: str):
    ours, theirs = zip(*pool.run(with_result, kind, gloo=True), strict=True)
    assert set(theirs) == {"RuntimeError"}
    assert "RuntimeError" in ours
    assert set(ours) <= {"RuntimeError", "Aborted"}


def lost_peer() -> str:
    model = syncengine.Parallel(Mlp())
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    if syncengine.rank() == 1:
        time.sleep(0.5)  # until the other one waits
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(syncengine.errors.PeerLost) as error:
        model(data()).sum().backward()
    return str(error.value)


@flat_at_night
def test_a_rank_that_waits_for_a_hook_hears_of_a_death(pool: RankPool):
    with pool.spawn_ranks(lost_peer) as ranks:
        assert "rank 1" in ranks[0].result(20)


@pytest.mark.thorough
@flat_at_night
@run_on_ranks(settings={"timeout": 2.0})
def test_a_future_that_never_comes_is_a_timeout():
    model = syncengine.Parallel(Mlp())
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    loss = model(data()).sum()
    with pytest.raises((syncengine.errors.Timeout, Aborted), match=r"bucket 0 of Parallel.Mlp"):
        loss.backward()


@run_on_ranks(gloo=True)
def test_a_hook_may_not_run_a_forward_that_averages():
    """The hook runs while its backward waits: the first backward of a static graph has all gradients at its end."""
    model = syncengine.Parallel(Mlp(), static_graph=True)
    errors = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        with torch.enable_grad():
            with pytest.raises(InvalidUsage, match="still waits for averages") as caught:
                model(data(0))
            errors.append(caught)
            with model.no_sync():
                model(data(0))
        return average(state, bucket)

    model.register_comm_hook(None, hook)
    model(data(0)).square().sum().backward()
    assert errors
    assert_averaged(model.module, model.module(data(0)).square().sum())


@run_on_ranks()
def test_a_forward_may_not_end_while_a_backward_waits():
    began, may_end, errors = threading.Event(), threading.Event(), []

    class Slow(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is slow:
                began.set()
                may_end.wait()
            return super().forward(x)

    def forward() -> None:
        with pytest.raises(InvalidUsage, match="still waits for averages") as caught:
            model(data(1))
        errors.append(caught)

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        may_end.set()
        slow.join()
        return average(state, bucket)

    slow = threading.Thread(target=forward)
    model = syncengine.Parallel(Slow(), static_graph=True)
    model.register_comm_hook(None, hook)
    loss = model(data(0)).square().sum()
    slow.start()
    began.wait()
    loss.backward()
    assert len(errors) == 1
    model.zero_grad()
    model(data(0)).square().sum().backward()


@run_on_ranks(gloo=True)
def test_a_second_hook_is_refused_as_in_ddp():
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        model = wrap(nn.Linear(24, 2))
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        with pytest.raises(RuntimeError, match="can only be called once"):
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        with pytest.raises(RuntimeError, match="can only be called once"):
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


@since_2_13
@run_on_ranks(gloo=True)
def test_bf16_works_on_cpus():
    with pytest.raises(TypeError, match="CUDA"):
        DistributedDataParallel(nn.Linear(24, 2)).register_comm_hook(None, default_hooks.bf16_compress_hook)
    model = syncengine.Parallel(nn.Linear(24, 2))
    own = torch.autograd.grad(model.module(data()).sum(), list(model.parameters()))
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    model(data()).sum().backward()
    for grad, of_rank in zip(gradients(model), own, strict=True):
        dist.all_reduce(half := of_rank.bfloat16() / 2)
        assert torch.equal(grad, half.float())


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

    class Averaging(syncengine.Parallel):
        def average(self, state, bucket):
            return average(state, bucket)

    model = Averaging(nn.Linear(24, 2))
    model.register_comm_hook(*((model, average) if as_state else (None, model.average)))
    model(data()).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# --- Hooks on buffers


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x[0, :2]
        return self.layer(x)


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
        both(Counting, partial(step, location=location, async_op=async_op))


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
        ours, theirs = of_both(partial(step, location=location), Counting)
        assert ours == theirs
        assert 1 < len(ours) < 8


@pytest.mark.parametrize(
    ("location", "kind"), [(Location.PRE_FORWARD, ValueError), (Location.POST_FORWARD, InvalidUsage)], ids=str
)
@run_on_ranks(gloo=True, settings={"timeout": 20.0})
def test_an_error_in_a_buffer_hook_is_told_to_ranks_that_wait_in_theirs(location: Location, kind: type[Exception]):
    def hook(rank: int, buffers: dict[str, torch.Tensor]) -> None:
        if rank == 1:
            raise kind("no buffers today")
        syncengine.all_reduce(buffers["seen"])

    model = syncengine.Parallel(Counting())
    model._register_buffer_comm_hook(syncengine.rank(), hook, location)
    with pytest.raises((kind, Aborted)) as error:
        model(data(0)).sum().backward()
    dist.barrier()  # rank 1 lives on
    told = "" if syncengine.rank() == 1 else f"rank 1 raised in its buffer hook: {kind.__name__}: "
    assert str(error.value) == told + "no buffers today"


@run_on_ranks(gloo=True)
def test_a_buffer_hook_may_call_the_models_own_broadcast():
    def hook(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
        model._default_broadcast_coalesced(list(buffers.values()))

    for location in Location:
        results = []
        ours = partial(syncengine.Parallel, process_group=syncengine.default_communicator())
        for wrap in (ours, DistributedDataParallel):
            torch.manual_seed(0)
            model = wrap(Counting())
            model._register_buffer_comm_hook(model, hook, location)
            for i in range(3):
                model(data(i)).sum().backward()
            results.append([*gradients(model), model.module.seen])
        assert not different_bits(*results)
