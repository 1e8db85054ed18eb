"""`Parallel(nonfinite=...)`: which rank has brought NaN or Inf into which parameter, in which step."""

import functools
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from flat import flat
from marks import mostly_nightly
from parallel_models import CAP, average, outcome
from pool import RankPool, run_on_ranks
from random_layers import Layer
from test_torch_comm_hooks import TORCH_HOOKS, plain, with_hook
from torch import nn

import syncengine
from syncengine.errors import InvalidUsage, Mismatch, NotFinite, SyncError

VALUES = {"NaN": float("nan"), "Inf": float("inf"), "-Inf": float("-inf")}
SIZES = [3, 300_001, 1, 70_000, 500]  # of parameters: small ones, which share a block, and large ones
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

# What ranks bring in one step: (rank, parameter, element, kind).
Brought = Sequence[tuple[int, int, int, str]]


class Given(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self, sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size, dtype=dtype) for size in sizes)

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


@functools.cache
def finite(rank: int, sizes: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.rand(size, generator=generator).to(dtype) for size in sizes]


def gradients(module: Given, brought: Brought) -> list[torch.Tensor]:
    """Gradients that this rank brings."""
    given = [g.clone() for g in finite(syncengine.rank(), tuple(map(len, module.weights)), module.weights[0].dtype)]
    for rank, parameter, element, kind in brought:
        if rank == syncengine.rank():
            given[parameter][element] = VALUES[kind]
    return given


def said_by(backward: Callable[[], Any]) -> str:
    """The text of its NotFinite; empty if it raises nothing."""
    kind, text = outcome(backward)
    assert kind in ("NotFinite", "returned"), (kind, text)
    return text if kind == "NotFinite" else ""


def said_of(model: syncengine.Parallel, plans: Sequence[Brought]) -> list[str]:
    """The text of each step's NotFinite."""
    said = []
    for brought in plans:
        model.zero_grad()
        said.append(said_by(model(gradients(model.module, brought)).backward))
    return said


def steps(plans: Sequence[Brought], dtype: torch.dtype = torch.float32, sizes: Sequence[int] = SIZES) -> list[str]:
    """The text of each step's NotFinite; the averages are those of a model that does not look."""
    model = syncengine.Parallel(Given(sizes, dtype), nonfinite="raise")
    plain = syncengine.Parallel(Given(sizes, dtype))
    said = []
    for brought in plans:
        said += said_of(model, [brought])
        assert said_of(plain, [brought]) == [""]
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ((ours.grad == theirs.grad) | (ours.grad.isnan() & theirs.grad.isnan())).all()
    return said


def cases(world: int) -> list[Brought]:
    """Every rank, parameter and kind once, at the ends of parameters and within; between them steps without any."""
    plans: list[Brought] = [[]]
    for i, size in enumerate(SIZES):
        for j, kind in enumerate(VALUES):
            element = [0, size // 2, size - 1][(i + j) % 3]
            plans += [[((i + j) % world, i, element, kind)], []]
    return plans


def check(plans: Sequence[Brought], said: Sequence[Sequence[str]]) -> None:
    """Each of these ranks' texts names what was brought in its step."""
    for texts in said:
        for step, (brought, text) in enumerate(zip(plans, texts, strict=True), 1):
            who = [f"rank {rank} brought {kind} into weights.{parameter}" for rank, parameter, _, kind in brought]
            expected = f"{', '.join(who)} in step {step} of Parallel(Given): look at " if brought else ""
            assert text.startswith(expected) and bool(text) == bool(brought), (brought, text)


@pytest.mark.thorough
@pytest.mark.parametrize(("numerics", "world"), mostly_nightly(product(["rank_order", "ring"], [1, 2, 3, 4]), 2))
@pytest.mark.parametrize("memory", mostly_nightly(["arena", "torch"], 0))
def test_rank_parameter_and_step_are_named(pool: RankPool, world: int, numerics: str, memory: str):
    settings = {"numerics": numerics, "gradient_memory": memory}
    plans = cases(world)
    for dtype in DTYPES if world == 3 else DTYPES[:1]:
        check(plans, pool.run(steps, plans, dtype, world=world, settings=settings))


@pytest.mark.parametrize("algorithm", ["auto", "one_shot", "staged"])
def test_small_models(pool: RankPool, algorithm: str):
    """Of less than a KiB: every rank reduces everything, unless told otherwise."""
    plans: list[Brought] = [[(rank, p, 0, kind)] for rank in range(3) for p in range(3) for kind in VALUES]
    environ = {"SYNCENGINE_TEST_ALGORITHM": algorithm}
    check(plans, pool.run(steps, plans, torch.float32, [7, 20, 1], world=3, environ=environ))


def test_flat_buckets(pool: RankPool):
    check(cases(3), pool.run(flat, steps, cases(3), world=3))


@pytest.mark.thorough
@pytest.mark.parametrize("hosts", mostly_nightly(["ab", "aab", "abab"], 1))
@pytest.mark.parametrize("algorithm", mostly_nightly(["exchange", "chain"], 1))
def test_between_hosts(pool: RankPool, hosts: str, algorithm: str):
    plans, environ = cases(len(hosts)), {"SYNCENGINE_TEST_HOST_ALGORITHM": algorithm}
    for dtype in (torch.float32, torch.bfloat16):
        check(plans, pool.run(steps, plans, dtype, hosts=hosts, environ=environ))


@pytest.mark.thorough
@pytest.mark.parametrize("numerics", mostly_nightly(["ring", "fast"], 0))
def test_other_sums_between_hosts(pool: RankPool, numerics: str):
    check(cases(3), pool.run(steps, cases(3), hosts="aab", settings={"numerics": numerics}))


@pytest.mark.parametrize("world", [2, 4])
def test_several_ranks_and_opposite_infinities(pool: RankPool, world: int):
    """Inf - Inf is NaN, which nobody has brought."""
    plans: list[Brought] = [[(0, 1, 5, "Inf"), (1, 1, 5, "-Inf")], [(0, 3, 5, "Inf"), (world - 1, 0, 1, "NaN")]]
    check(plans, pool.run(steps, plans, world=world))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@run_on_ranks()
def test_a_sum_that_overflows_is_nobodys(dtype: torch.dtype):
    model = syncengine.Parallel(Given([5, 60_000], dtype), nonfinite="raise")
    given = gradients(model.module, [])
    given[1][40_000] = -torch.finfo(dtype).max
    text = "all ranks brought finite gradients, but their sum is -Inf in weights.1 in step 1 of Parallel(Given): "
    assert said_by(model(given).backward).startswith(text)


@run_on_ranks()
def test_accumulation():
    """The first of three backwards brings it."""
    model = syncengine.Parallel(Given(), nonfinite="raise")
    plans: list[Brought] = [[], [(1, 3, 69_999, "Inf")]]
    said = []
    for brought in plans:
        model.zero_grad()
        for each in (brought, []):
            with model.no_sync():
                model(gradients(model.module, each)).backward()
        said += [said_by(model(gradients(model.module, [])).backward)]
    check(plans, [said])


@pytest.mark.parametrize("world", [1, 2, 3])
@run_on_ranks()
def test_micro_batches(world: int):
    """Whichever of a rank's micro-batches has brought it."""
    # Where each brings NaN: parameter + 1, or 0.
    places = [0] * 6 + [0, 0, 0, 0, 0, 2] + [3, 0, 0, 0, 0, 0] + [0] * 6 + [0, 0, 1, 0, 0, 0]
    model = syncengine.Parallel(Given([7, 90_000, 1]), nonfinite="raise")
    batches = syncengine.micro_batches(model, torch.utils.data.DataLoader(places), total=6)

    def backwards() -> None:
        for _, (place,) in batches:
            brought = [(syncengine.rank(), place - 1, -1, "NaN")] if place else []
            model(gradients(model.module, brought)).backward()

    said = []
    for _ in range(5):
        said.append(said_by(backwards))
        if said[-1]:
            batches.step += 1  # which has not happened: without its gradients
        model.zero_grad()
    rank = {1: 0, 2: 0, 3: 1}[world]
    check([[], [(world - 1, 1, -1, "NaN")], [(0, 2, -1, "NaN")], [], [(rank, 0, -1, "NaN")]], [said])


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("numerics", ["rank_order", "ring"])
@run_on_ranks(world=3)
def test_sparse_gradients(kind: str, numerics: str):
    module = Layer(
        lambda self, ids, factor: self.mix(self.words(ids)).sum() + (self.tags(ids % 20) * factor).sum(),
        words=nn.Embedding(50, 6, sparse=True),
        mix=nn.Linear(6, 6),
        tags=nn.Embedding(20, 6, sparse=True),
    )
    model = syncengine.Parallel(module, nonfinite="raise")
    said = []
    for i in range(3):
        model.zero_grad()
        factor = torch.ones(4, 6)
        if i == 1 and syncengine.rank() == 2:
            factor[3, 2] = VALUES[kind]
        said.append(said_by(model(torch.arange(4) + 3 * syncengine.rank(), factor).backward))
    assert [bool(text) for text in said] == [False, True, False], said
    assert said[1].startswith(f"rank 2 brought {kind} into tags.weight in step 2 of Parallel(Layer): ")


@pytest.mark.parametrize("name", ["plain", "ours", "all-reduce", "fp16", "native fp16"])
@run_on_ranks(gloo=True)
def test_communication_hooks(name: str):
    hooks = {**TORCH_HOOKS, "plain": plain(average), "ours": plain(syncengine.hooks.bf16_compress)}
    model = with_hook(syncengine.Parallel, hooks[name], Given(), nonfinite="raise")
    check(cases(2), [said_of(model, cases(2))])


def warnings_of(model: syncengine.Parallel, brought: Brought) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.zero_grad()
        model(gradients(model.module, brought)).backward()
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


@run_on_ranks()
def test_warnings():
    """Training goes on, with what is in .grad."""
    model = syncengine.Parallel(Given(), nonfinite="warn", **CAP)
    plans: list[Brought] = [[], [(0, 2, 0, "NaN")], []]
    said = []
    for brought in plans:
        said.append("".join(warnings_of(model, brought)))
        assert not brought or model.module.weights[2].grad.isnan().all()
    check(plans, [said])


@run_on_ranks()
def test_many_steps_are_warned_of_by_their_number():
    """They are steps 3, 4, ... 210, whose weights are NaN from step 150 on."""
    model = syncengine.Parallel(Given(), nonfinite="warn")
    texts = []
    for step in range(1, 211):
        texts += [f"{step}: {text}" for text in warnings_of(model, [(0, 2, 0, "NaN")] if step > 2 else [])]
        if step == 150:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(torch.nan)
    first, second, third = texts
    assert first.startswith("3: rank 0 brought NaN into ")
    assert second.startswith("103: 100 of the last 100 steps were not finite; in the last one rank 0 brought NaN")
    assert "finite any more" not in first + second
    assert third.startswith("203: 100 of the last 100 steps")
    assert third.endswith("No weight of Parallel(Given) is finite any more: go back to a checkpoint")


@run_on_ranks()
def test_a_filter_may_make_an_error_of_the_warning():
    model = syncengine.Parallel(Given(), nonfinite="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # on all ranks alike
        with pytest.raises(RuntimeWarning, match="rank 1 brought Inf into weights.0 in step 1"):
            model(gradients(model.module, [(1, 0, 1, "Inf")])).backward()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("who", "world"), [([0, 1], 2), ([1], 3)])
@run_on_ranks()
def test_a_backward_that_fails_on_all_ranks_or_on_one(who: list[int], late: bool, world: int):
    """Nobody waits for ever, nor has averages that another rank lacks, when a rank's own code fails in a backward."""
    model = syncengine.Parallel(Given(), nonfinite="raise", **CAP)
    said: list[str] = []

    def hook(gradient: torch.Tensor) -> None:
        if len(said) == 1 and syncengine.rank() in who:
            raise KeyError("my own")

    if not late:
        model.module.weights[0].register_hook(hook)
    for brought in ([], [], [(1, 1, 0, "NaN")]):
        model.zero_grad()
        given = [g.requires_grad_() * 1 for g in gradients(model.module, brought)]
        given[0 if late else -1].register_hook(hook)  # late: when all gradients are on their way
        try:
            model(given).backward()
            said.append("")
        except (KeyError, SyncError) as error:
            said.append(f"{type(error).__name__}: {error}")
            if type(error) not in (NotFinite, KeyError):
                break
    assert not said[0]
    assert ("my own" if syncengine.rank() in who else "Aborted: rank 1: backward aborted") in said[1]
    if world == len(who):
        assert said[2].startswith("NotFinite: rank 1 brought NaN into weights.1 in step ")


@pytest.mark.parametrize("batches", [0, 2])
@run_on_ranks()
def test_in_a_join_context(batches: int):
    """Rank 0 has so many batches; NaN costs a rank without a batch nothing."""
    plans: list[Brought] = [[], [(1, 4, 499, "NaN")], [], []][: batches + 4 * syncengine.rank()]
    model = syncengine.Parallel(Given(), nonfinite="raise")
    with model.join():
        check(plans, [said_of(model, plans)])
    syncengine.barrier()


@run_on_ranks()
def test_ranks_that_ask_for_different_things_hear_of_it():
    with pytest.raises(Mismatch, match=r"(?s)(?=.*nonfinite=raise)(?=.*nonfinite=None)"):
        syncengine.Parallel(Given(), nonfinite=["raise", None][syncengine.rank()])


@pytest.mark.parametrize("value", ["", "Raise", True, 1, []])
def test_what_is_nothing_to_do_is_refused(value: Any):
    with pytest.raises(InvalidUsage, match="nonfinite="):
        syncengine.Parallel(nn.Linear(2, 2), nonfinite=value)


def operations_of(plans: Sequence[Brought], sizes: Sequence[int]) -> list[int]:
    """In each step behind the first two, beyond those of the model's buckets."""
    model = syncengine.Parallel(Given(sizes), nonfinite="raise")
    said_of(model, [[], []])  # then the ranks have agreed on buckets
    counted = []
    for brought in plans:
        before = model.communicator.counters()["operations"]
        said_of(model, [brought])
        counted.append(model.communicator.counters()["operations"] - before - model.sync_stats()["buckets"])
    return counted


@pytest.mark.parametrize("memory", ["arena", "torch"])
@pytest.mark.parametrize("sizes", [[7, 20], SIZES])
def test_finite_gradients_cost_no_operation(pool: RankPool, memory: str, sizes: list[int]):
    """On one host: each rank sees with a bucket whether any other has noted something."""
    plans: list[Brought] = [[], [(2, 1, 3, "NaN")], [], [(0, 0, 1, "Inf")], []]
    settings = {"timeout": 60.0, "gradient_memory": memory}
    assert pool.run(operations_of, plans, sizes, world=3, settings=settings) == [[0, 1, 0, 1, 0]] * 3
