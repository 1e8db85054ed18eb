"""Uneven inputs: ranks that run out of batches shadow the others, and everybody ends with DDP's bits."""

import contextlib
import resource
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import mostly_nightly
from parallel_models import CAP, Branches, Conv, Mlp, both, data, different_bits
from pool import run_on_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch_versions import since_2_13

import syncengine
from syncengine.errors import Aborted, InvalidUsage, Mismatch


class ByRank(Branches):
    """Rank 0 uses one branch, the others another, or all the same."""

    def __init__(self, agree: bool = False) -> None:
        super().__init__()
        self.agree = agree

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, self.agree or syncengine.rank() == 0)


@dataclass
class Uneven:
    """One training with different numbers of batches: two rounds, so that joined ranks come back."""

    make: Callable[[], nn.Module]
    batches: tuple[int, ...]  # by rank
    accumulate: int = 1
    join: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ddp_options: dict[str, Any] | None = None  # where DDP crashes with `options`
    zero: bool = False  # torch's Join with a ZeroRedundancyOptimizer


def train(wrap: Callable[..., nn.Module], run: Uneven) -> list[torch.Tensor]:
    torch.manual_seed(3)
    options = run.options if run.ddp_options is None or wrap is syncengine.Parallel else run.ddp_options
    model = wrap(run.make(), **options)
    sgd = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD) if run.zero else torch.optim.SGD
    optimizer = sgd(model.parameters(), lr=0.05, momentum=0.9 if run.make in (Mlp, Conv) else 0.0)
    history = []
    for number in range(2):
        with Join([model, optimizer], **run.join) if run.zero else model.join(**run.join):
            for step in range(run.batches[syncengine.rank()]):
                for micro in range(run.accumulate - 1):
                    with model.no_sync():
                        model(data(500 + 10 * step + micro)).square().mean().backward()
                model(data(10 * number + step)).square().mean().backward()
                # DDP gives zeros to parameters that only joined ranks have used before; here they stay without.
                history += [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        history += [t.detach().clone() for t in model.state_dict().values()]
    return history


def runs_of(world: int) -> list[Uneven]:
    batches = {2: [(1, 3), (4, 2), (0, 2), (3, 0)], 3: [(1, 4, 2), (0, 2, 3), (3, 0, 1)]}[world]
    one_branch = partial(ByRank, agree=True)
    static, unused = {"static_graph": True}, {"find_unused_parameters": True}
    skip = {**unused, "skip_all_reduce_unused_params": True}
    starts = [counts for counts in batches if min(counts) > 0]
    return [
        *(Uneven(Mlp, counts, accumulate=1 + i % 2) for i, counts in enumerate(batches)),
        *(Uneven(Conv, counts, join={"divide_by_initial_world_size": False}) for counts in batches),
        *(Uneven(ByRank, counts, options=unused) for counts in batches),
        # DDP skips none of these buckets. Where it does, or a static graph begins with a joined rank, it crashes.
        *(Uneven(one_branch, counts, options=skip) for counts in batches[:2]),
        *(Uneven(one_branch, counts, options=skip | CAP, ddp_options=unused | CAP) for counts in batches),
        *(Uneven(make, counts, options=static) for make in (Mlp, ByRank) for counts in starts),
        *(Uneven(ByRank, c, options=static, ddp_options=unused) for c in batches if c not in starts),
        Uneven(Conv, batches[0], zero=True),
        Uneven(Conv, batches[1], options={"forward_sync_buffers": False}),
        Uneven(Mlp, (2,) * world, join={"enable": False}),
    ]


KINDS = mostly_nightly(
    [("in place", 2, "rank_order"), ("in place", 2, "ring"), ("in place", 3, "ring"), ("flat", 2, "rank_order")], 2
)


@pytest.mark.thorough
@since_2_13
@pytest.mark.parametrize(("kinds_of_buckets", "world", "numerics"), KINDS, indirect=["kinds_of_buckets"])
@pytest.mark.usefixtures("kinds_of_buckets")
@run_on_ranks(gloo=True)
def test_uneven_inputs_train_as_under_ddp(world: int, numerics: str):
    for run in runs_of(world):
        assert not different_bits(train(syncengine.Parallel, run), train(DistributedDataParallel, run)), run


@pytest.mark.parametrize(("divide", "expected"), [(True, [24.0, 20.0, 12.0]), (False, [24.0, 30.0, 36.0])])
@run_on_ranks(world=3)
def test_what_is_divided_by(divide: bool, expected: list[float]):
    """Without torch.distributed."""
    model = syncengine.Parallel(nn.Linear(1, 1, bias=False))
    with model.join(divide_by_initial_world_size=divide):
        for mean in expected[: syncengine.rank() + 1]:
            model.zero_grad()
            model(torch.full((1, 1), 12.0 * (syncengine.rank() + 1))).sum().backward()
            assert model.module.weight.grad.item() == mean


@run_on_ranks(world=3)
def test_all_end_with_the_model_of_the_last():
    model = syncengine.Parallel(nn.Linear(2, 2, bias=False), forward_sync_buffers=False)
    with torch.no_grad(), model.join():
        for _ in range([1, 3, 2][syncengine.rank()]):
            model(torch.ones(1, 2))
            model.module.weight.fill_(syncengine.rank())
    assert model.module.weight.unique().item() == 1.0  # who came last
    with torch.no_grad(), model.join():
        model.module.weight.fill_(syncengine.rank())
    assert model.module.weight.unique().item() == 2.0  # all came last: the highest of them
    assert not model._join_config.enable
    model(torch.ones(1, 2)).sum().backward()


@run_on_ranks(gloo=True)
def test_the_last_forward_in_join_may_not_synchronize():
    """After such a forward buffers stay as they are for one more, on ranks without a batch as well."""

    def step(model: nn.Module) -> None:
        with model.join():
            for i in range(1 + syncengine.rank()):
                with model.no_sync() if i else contextlib.nullcontext():
                    model(data(i)).square().mean().backward()
        model(data(2)).square().mean().backward()

    both(Conv, step)


@run_on_ranks()
def test_after_join_buckets_are_skipped_again():
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, **CAP}
    model = syncengine.Parallel(ByRank(agree=True), **options)
    reduced = []
    with model.join():
        for i in range(1 + syncengine.rank()):
            model(data(i)).sum().backward()
            reduced.append(model.sync_stats()["reduced_bytes"])
    model(data(2)).sum().backward()
    used, everything = (n * 4 * (24 * 24 + 24) for n in (2, 4))
    assert reduced == [used, everything][: 1 + syncengine.rank()]
    assert model.sync_stats()["reduced_bytes"] == used


@pytest.mark.parametrize("torchs", [True, False])
@run_on_ranks(world=3, gloo=True)
def test_throw_on_early_termination(torchs: bool):
    model = syncengine.Parallel(nn.Linear(24, 2))
    join = partial(Join, [model]) if torchs else model.join
    steps = 0
    of_others = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    text = "Rank 0 exhausted all inputs." if syncengine.rank() == 0 else of_others
    with pytest.raises(RuntimeError, match=text), join(throw_on_early_termination=True):
        for step in range(2 + syncengine.rank()):
            model(data(step)).sum().backward()
            steps += 1
    assert steps == 2
    model._join_config = type(model._join_config).construct_disabled_join_config()
    model(data(0)).sum().backward()  # nothing is broken


@run_on_ranks(settings={"timeout": 20.0})
def test_early_termination_ends_the_context_of_a_rank_that_catches_its_error():
    model, rank = syncengine.Parallel(nn.Linear(24, 2)), syncengine.rank()
    for caught in (True, False):
        error = Aborted if caught and rank == 1 else InvalidUsage
        text = "Detected" if rank > caught else "Rank 0 exhausted all inputs."
        with pytest.raises(error, match=text), model.join(throw_on_early_termination=True):
            for step in range(1 + 3 * rank):
                with contextlib.suppress(*[InvalidUsage] if caught else []):
                    output = model(data(step))  # the last one may have no backward
                    if step == 0 and caught:
                        output.sum().backward()
    model(data(0)).sum().backward()


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("what", ["gradients", "buffers"])
@run_on_ranks(world=3, settings={"timeout": 20.0})
def test_ranks_that_disagree_are_told_so(what: str, caught: bool):
    """Rank 2 has no batch. If the others catch the error, their next forward says that rank 2 has left."""
    model = syncengine.Parallel(Conv())
    rank, text = syncengine.rank(), f"rank 0 synchronizes its {what}, but rank 1 does not"
    if goes_on := caught and rank < 2:
        text = r"rank 2 raised in join\(\) of Parallel\(Conv\): Mismatch: in join\(\), " + text
    with pytest.raises(Aborted if goes_on else Mismatch, match=text), model.join():
        if rank < 2:
            model.require_backward_grad_sync = what != "gradients" or rank == 0
            model.forward_sync_buffers = what != "buffers" or rank == 0
            with contextlib.suppress(*[Mismatch] if caught else []):
                model(data(0)).sum().backward()
            model(data(0)).sum().backward()
    assert syncengine.default_communicator().exception() is None


@run_on_ranks(world=3)
def test_freezing_after_a_rank_has_joined():
    """Ranks that have joined take the others' word for what requires a gradient."""
    model = syncengine.Parallel(Mlp())
    with model.join():
        for step in range([1, 5, 5][syncengine.rank()]):
            model.module.head.requires_grad_(step != 3)
            model.zero_grad()
            model(data(step)).sum().backward()
            assert (model.module.head.weight.grad is None) == (step == 3)


@run_on_ranks(settings={"timeout": 20.0})
def test_a_rank_without_memory_for_its_zeros_is_no_longer_waited_for():
    model, x = syncengine.Parallel(nn.Linear(3072, 3072)), torch.ones(1, 3072)
    for _ in range(3):
        model(x).sum().backward()
    if syncengine.rank() == 0:
        with pytest.raises(Aborted, match="rank 1: backward aborted"), model.join():
            model(x).sum().backward()
    else:
        before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**24, before[1]))
        taken = []
        with contextlib.suppress(RuntimeError):
            while True:
                taken.append(torch.empty_like(model.module.weight))
        with pytest.raises(RuntimeError, match="can't allocate memory"), model.join():
            pass
        resource.setrlimit(resource.RLIMIT_AS, before)
    syncengine.barrier()


@run_on_ranks()
def test_torchs_join_needs_a_torch_group():
    model = syncengine.Parallel(nn.Linear(24, 2))
    with pytest.raises(InvalidUsage, match=r"pass one as process_group.*or use model.join"):
        Join([model])


@run_on_ranks(world=1, gloo=True)
def test_alone_nobody_is_waited_for():
    model = syncengine.Parallel(nn.Linear(24, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for join in (model.join, partial(Join, [model])):
            with join():
                model(data(0)).sum().backward()
