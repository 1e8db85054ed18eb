"""``Parallel(model.cuda())``: bits, streams, graphs. Ranks are processes, on however many GPUs there are.

Tests without a GPU are in test_flat_buckets.py.
"""

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_ranks import SOFTWARE, alone, marked, needs_real, run_processes
from cuda_training import batch, graph_step, job, on_gpus
from models.workload import same_bits
from parallel_models import CAP, Branches, Mlp
from test_nonfinite import Given, cases, check, gradients
from torch import nn

import syncengine
from syncengine.errors import InvalidUsage, NotFinite

LONG = 2_000_000_000  # cycles that a GPU sleeps: about a second


# ---- the average, in any world, on any stream ----


class Opposite(nn.Module):
    """Gradients become ready in the opposite order on odd ranks, and late ones at that."""

    def __init__(self, parts: int = 7) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))
        self.parts = nn.ModuleList([nn.Linear(24, 24) for _ in range(parts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = list(self.parts)[:: 1 if dist.get_rank() % 2 else -1]
        return torch.stack([Sleep.apply(part(x * self.scale), LONG // 10_000) for part in order])


class Sleep(torch.autograd.Function):
    """Keeps the GPU from going on in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        return grad, None


def local_gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [g.clone() for g in torch.autograd.grad(module(x).square().mean(), list(module.parameters()))]


def exact_average(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return average_of(local_gradients(module, x))


def average_of(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The averages in rank order, from what Gloo gathers: nothing of the engine's."""
    averages = []
    for grad in gradients:
        everyone = [torch.empty_like(grad, device="cpu") for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, grad.cpu())
        total = everyone[0]
        for other in everyone[1:]:
            total = total + other
        averages.append(total * (1.0 / len(everyone)))
    return averages


def check_average(module: nn.Module, expected: list[torch.Tensor]) -> None:
    for (name, p), average in zip(module.named_parameters(), expected, strict=True):
        assert same_bits(p.grad.cpu(), average), name


def averages(rank: int) -> str:
    with job():
        for make in (Mlp, Opposite):
            for options in ({}, CAP):
                torch.manual_seed(0)
                model = syncengine.Parallel(make().cuda(), **options)
                for step in range(4):
                    model.zero_grad()
                    expected = exact_average(model.module, batch(step))
                    model(batch(step)).square().mean().backward()
                    check_average(model.module, expected)
        if syncengine.world_size() > 1:
            assert model.sync_stats()["buckets"] == 15  # one for each parameter
    return "good"


@marked
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_gradients_are_the_average_in_rank_order(world: int):
    assert run_processes(world, averages) == ["good"] * world


@marked
@pytest.mark.parametrize("world", [2, 3])
def test_opposite_orders_of_readiness_with_a_single_hardware_queue(world: int):
    assert run_processes(world, averages, environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == ["good"] * world


def averages_on(model: nn.Module, streams: list[str]) -> None:
    """A step for each of `streams`: those of its forward and backward."""
    named = {"one": torch.cuda.Stream(), "two": torch.cuda.Stream(), "main": torch.cuda.current_stream()}
    main = named["main"]
    for step, pair in enumerate(streams):
        forward, backward = (named[name] for name in pair.split())
        model.zero_grad()
        expected = exact_average(model.module, batch(step))
        forward.wait_stream(main)
        with torch.cuda.stream(forward):
            loss = model(batch(step)).square().mean()
        backward.wait_stream(forward)
        with torch.cuda.stream(backward):
            loss.backward()
            grads = [p.grad * 1 for p in model.parameters()]  # read where backward was called, without waiting
        main.wait_stream(backward)
        for grad, average in zip(grads, expected, strict=True):
            assert same_bits(grad.cpu(), average), step


def averages_on_streams(rank: int, hook: Any = None) -> str:
    """With a communication hook if one is given."""
    with job():
        model = syncengine.Parallel(Opposite().cuda(), **CAP)
        if hook is not None:
            model.register_comm_hook(None, hook)
        averages_on(model, ["one one", "main two", "two main", "one two", "main main"])
        assert hook is None or model.sync_stats()["copied_bytes"]["bucket"] == 0
    return "good"


@marked
def test_averages_on_streams_that_are_not_the_default_one():
    assert run_processes(2, averages_on_streams) == ["good"] * 2


def host_runs_ahead(rank: int, hook: Any = None) -> str:
    """A whole step is queued while the GPU has not even begun with it: hosts wait for hosts in it, and for no device.

    Rank 1's stream waits for rank 0 in a group of its own, and goes on when rank 0's step is queued.
    """
    with job():
        model = syncengine.Parallel(nn.Sequential(Mlp(), nn.BatchNorm1d(7)).cuda(), bucket_cap_mb=0.5)
        if hook is not None:
            model.register_comm_hook(None, hook)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = batch(0)
        gate, side = syncengine.default_communicator().split([0, 1]), torch.cuda.Stream()
        gate.barrier(device=x.device)
        for step in range(5):
            torch.cuda.synchronize()
            if step == 4 and rank == 1:
                gate.barrier(device=x.device)
            syncengine.barrier(device=x.device)
            begun = torch.cuda.Event()
            begun.record()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 4 and rank == 0:
                assert not begun.query(), "the device has not waited"
                with torch.cuda.stream(side):
                    gate.barrier(device=x.device)
    return "good"


@marked
def test_the_host_waits_for_no_device_in_a_step():
    assert run_processes(2, host_runs_ahead) == ["good"] * 2


@needs_real("profiler")
@alone
@on_gpus()
def test_buckets_are_reduced_while_backward_runs(rank: int):
    from torch.profiler import ProfilerActivity, profile

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(Sleep.apply(self.first(x), LONG))

    model = syncengine.Parallel(Slow().cuda(), **CAP)
    for step in range(3):
        model(batch(step)).sum().backward()
    torch.cuda.synchronize()
    syncengine.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        model(batch(3)).sum().backward()
        torch.cuda.synchronize()
    kernels = [(e.name, e.time_range) for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    slept = next(span for name, span in kernels if "spin" in name)
    reduced = [span.start for name, span in kernels if "syncengine" in name and "copy_kernel" not in name]
    assert min(reduced) < slept.end < max(reduced), kernels


@on_gpus()
def test_unused_parameters_and_uneven_inputs(rank: int):
    def gradients_of(left: bool, step: int) -> list[torch.Tensor]:
        """The gradients of this rank, of all layers but `never`."""
        loss = inner(batch(step), left).sum()
        return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))

    model = syncengine.Parallel(Branches().cuda(), find_unused_parameters=True, **CAP)
    inner = model.module
    parameters = [p for layer in (inner.stem, inner.left, inner.right) for p in layer.parameters()]
    for step in range(3):
        model.zero_grad()
        expected = average_of(gradients_of(rank == 0, step))
        model(batch(step), rank == 0).sum().backward()
        assert all(same_bits(p.grad.cpu(), average) for p, average in zip(parameters, expected, strict=True)), step
        assert inner.never.weight.grad is None
    with model.join():
        for step in range(1 + rank):
            model.zero_grad()
            model(batch(step), True).sum().backward()
    own = gradients_of(True, 1) if rank == 1 else [torch.zeros_like(p) for p in parameters]
    expected = average_of(own)  # rank 1 has made this step alone
    if rank == 1:
        trained = [*inner.stem.parameters(), *inner.left.parameters()]
        assert all(same_bits(p.grad.cpu(), average) for p, average in zip(trained, expected[:4], strict=True))
        assert inner.right.weight.grad is None


# ---- graphs ----

TURNS = 60 if SOFTWARE else int(os.environ.get("SYNCENGINE_TEST_TURNS", "1000"))


def replays(rank: int, warm_up_aside: bool = False) -> str:
    with job():
        trained = []
        for captured in (True, False):
            torch.manual_seed(3)
            model = syncengine.Parallel(Opposite(2).cuda(), **CAP)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.empty(6, 24, device="cuda")
            stream = torch.cuda.Stream() if warm_up_aside else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for step in range(4):
                    x.copy_(batch(step))
                    graph_step(model, optimizer, x)
            torch.cuda.current_stream().wait_stream(stream)
            assert model.sync_stats()["buckets"] == 5
            eager = step = lambda: graph_step(model, optimizer, x)  # noqa: B023
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    eager()
                step = graph.replay
            for turn in range(TURNS):
                x.copy_(batch(turn % 7))
                if turn % 20 == 10 and rank == turn // 20 % dist.get_world_size():
                    torch.cuda.synchronize()
                    time.sleep(0.05)  # this rank is late
                (eager if turn % 20 == 15 else step)()
            torch.cuda.synchronize()
            if captured:
                new = syncengine.Parallel(nn.Linear(24, 1).cuda())
                with pytest.raises(InvalidUsage, match="run 3 steps"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                    new(x)
            x.copy_(batch(0))
            eager()  # and eager steps go on where the replays ended
            trained.append([p.detach().cpu() for p in model.parameters()])
        assert all(map(same_bits, *trained))
    return "good"


@alone
@marked
@pytest.mark.parametrize("warm_up_aside", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_a_captured_step_replayed_equals_eager_ones(world: int, warm_up_aside: bool):
    assert run_processes(world, partial(replays, warm_up_aside=warm_up_aside)) == ["good"] * world


# ---- NaN and Inf ----


def names_of_nonfinite(rank: int) -> list[str]:
    said = []
    with job():
        model = syncengine.Parallel(Given().cuda(), nonfinite="raise")
        for brought in cases(dist.get_world_size()):
            model.zero_grad()
            given = [g.cuda() for g in gradients(model.module, brought)]
            try:
                model(given).backward()
                said.append("")
            except NotFinite as error:
                said.append(str(error))
    return said


@marked
@pytest.mark.parametrize("world", [2, 3])
def test_who_has_brought_what_is_not_finite(world: int):
    check(cases(world), run_processes(world, names_of_nonfinite))
