"""The bits of training with ShardedOptimizer: those of DDP, or Parallel, with the same optimizer on each rank."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from marks import mostly_nightly
from pool import RankPool, run_on_ranks
from sharded_training import (
    MODELS,
    OPTIMIZERS,
    batch,
    differences,
    different_weights,
    dtype_of,
    make,
    not_divided,
    plain,
    sharded,
    train,
    trained,
    unlike_plain,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


class Case(NamedTuple):
    optimizer: str
    how: str
    dtype: torch.dtype | None
    model: str

    @property
    def steps(self) -> int:
        """The number of steps: RAdam's updates are others from the sixth on."""
        return 8 if self.optimizer == "RAdam" else 3

    @property
    def options(self) -> dict[str, Any]:
        how = {"foreach": False} if self.how == "single" else {self.how: True}
        more = OPTIMIZERS[self.optimizer]
        if (self.optimizer, self.how, self.dtype) == ("SGD", "fused", torch.bfloat16):
            more = {"lr": 1.0}  # with momentum it differs from itself
        elif self.optimizer == "SGD":
            more = more | {"lr": 0.1}  # three smaller steps change nothing in bfloat16
        return {"lr": 1e-2, **more, **how}


CASES = [
    Case(name, how, dtype, "odd")
    for name, how, dtype in itertools.product(
        OPTIMIZERS, ("single", "foreach", "fused"), (torch.float32, torch.bfloat16)
    )
    if (how != "fused" or name in FUSED)
]
CASES += [Case(name, "foreach", None, model) for name in OPTIMIZERS for model in ("conv", "tied", "mixed")]
CASES += [Case("AdamW", how, None, "mlp") for how in ("foreach", "fused")]


class Together(nn.Module):
    """A model for each case. They are trained in the same steps, each by its own optimizer."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        torch.manual_seed(0)
        models = [MODELS[case.model]() for case in cases]
        self.models = nn.ModuleList(
            net.to(case.dtype) if case.dtype else net for net, case in zip(models, cases, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([net(x.to(dtype_of(net))).float().square().mean() for net in self.models]).sum()


def train_together(
    steps: int, cases: Sequence[Case], wrap: Callable[[nn.Module], nn.Module], make_optimizer: Callable
) -> tuple[Together, list]:
    torch.set_num_threads(1)
    net = Together(cases)
    model = wrap(net)
    optimizers = [
        make_optimizer(each.parameters(), getattr(torch.optim, case.optimizer), **case.options)
        for each, case in zip(net.models, cases, strict=True)
    ]
    for step in range(steps):
        model.zero_grad()
        model(batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return net, optimizers


def all_optimizers(beside_ddp: bool, elements: bool | None) -> list[str]:
    by_steps = itertools.groupby(sorted(CASES, key=lambda case: case.steps), lambda case: case.steps)
    return [one for steps, cases in by_steps for one in optimizers_of(steps, list(cases), beside_ddp, elements)]


def optimizers_of(steps: int, cases: Sequence[Case], beside_ddp: bool, elements: bool | None) -> list[str]:
    begin = Together(cases).state_dict()
    wrap = DistributedDataParallel if beside_ddp else syncengine.Parallel
    theirs, plain_optimizers = train_together(
        steps, cases, wrap, lambda parameters, kind, **how: kind(parameters, **how)
    )
    weights = dict(theirs.named_parameters())
    still = [name for name, value in weights.items() if torch.equal(value, begin[name])]
    odd = [name for name in still if "body.0.bias" not in name]  # before BatchNorm: it has no gradient
    odd += [name for name, value in weights.items() if not value.isfinite().all()]
    wrong = [f"{cases[int(name.split('.')[1])]}: {name}" for name in odd]
    make_sharded = functools.partial(syncengine.ShardedOptimizer, elements=elements)
    ours, optimizers = train_together(steps, cases, syncengine.Parallel, make_sharded)
    for i, case in enumerate(cases):
        found = different_weights(ours.models[i], theirs.models[i])
        found += differences(plain_optimizers[i].state_dict(), optimizers[i].state_dict())
        found += not_divided(ours.models[i], optimizers[i])
        wrong += [f"{case}: {one}" for one in found]
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize("elements", mostly_nightly([None, False], 0), ids=["slices", "whole"])
@pytest.mark.parametrize("world", mostly_nightly([2, 3, 4], 1))
def test_each_of_torchs_optimizers_has_the_bits_of_ddp(pool: RankPool, world: int, elements: bool | None):
    """In each implementation, float32 and bfloat16."""
    settings = {"timeout": 60.0, "numerics": "ring"}
    found = pool.run(all_optimizers, True, elements, world=world, gloo=True, settings=settings, timeout=300)
    assert found == [[]] * world


@pytest.mark.nightly
@pytest.mark.parametrize("elements", [None, False], ids=["slices", "whole"])
def test_each_of_torchs_optimizers_has_its_own_bits_in_rank_order(pool: RankPool, elements: bool | None):
    assert pool.run(all_optimizers, False, elements, world=3, timeout=300) == [[]] * 3


@pytest.mark.parametrize("world", [2, 8])
@run_on_ranks()
def test_scalars_empty_and_tiny_parameters(world: int):
    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))
            self.one = torch.nn.Parameter(torch.tensor([0.5]))
            self.none = torch.nn.Parameter(torch.empty(0, 3))
            self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 24 * 3).view(24, 3))

        def forward(self, x):
            return x @ self.weight * self.scale + self.one + self.none.sum()

    ours, theirs = Tiny(), Tiny()
    train(*sharded(ours), 5)
    train(*plain(theirs), 5)
    return different_weights(ours, theirs)


class WholeOnly(torch.optim.SGD):
    """Not elementwise: each gradient is divided by its own norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["largest"] = max(state.get("largest", 0.0), p.grad.norm().item())
                    state["rows"] = p.grad.flatten(1).sum(1) if p.dim() > 1 else p.grad.sum()
                    p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"] / state["count"])


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(3)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make_net", "kind"),
    mostly_nightly([(make, WholeOnly), (make, torch.optim.Adafactor), (three_layers, torch.optim.Muon)], 0),
)
@run_on_ranks(world=3)
def test_whole_parameters_keep_the_bits_of_any_optimizer(make_net: Callable[[], nn.Module], kind: type):
    return unlike_plain(6, make_net, kind, elements=False)


@run_on_ranks()
def test_parameters_of_no_parallel_are_updated_by_each_rank():
    ours, theirs = make(), make()
    for net, optimizer in (
        (ours, syncengine.ShardedOptimizer(ours.parameters(), torch.optim.AdamW)),
        (theirs, torch.optim.AdamW(theirs.parameters())),
    ):
        net(torch.ones(2, 24)).sum().backward()
        optimizer.step()
    return different_weights(ours, theirs)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Parameter(torch.randn(24, 300))
        numbers = torch.randn(300, dtype=torch.complex64)
        self.waves = nn.Parameter(numbers.clone().conj())
        self.imaginary = nn.Parameter(torch._neg_view(numbers.imag.clone()))  # as x.conj().imag is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.always * self.waves * self.imaginary).abs()


@run_on_ranks()
def test_conjugates_and_negatives_become_plain():
    """Weights whose memory holds the conjugate, or the negative, of their elements."""
    net = Lazy()
    assert net.waves.is_conj() and net.imaginary.is_neg()
    ours, _, optimizer = trained(3, net, torch.optim.SGD)
    train(*plain(theirs := Lazy(), torch.optim.SGD), 3)
    pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    return [name for (name, p), other in pairs if not torch.equal(p, other)] + not_divided(ours, optimizer)
