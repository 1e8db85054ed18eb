"""The bits of training with ShardedOptimizer: those of DDP, or Parallel, with the same optimizer on each rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from pool import RankPool
from sharded_training import differences, different_weights, make, plain, sharded, train
from torch.nn.parallel import DistributedDataParallel

import syncengine

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "ASGD": {},
    "Rprop": {},
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def against_ddp(steps: int, name: str, options: dict) -> list[str]:
    torch.set_num_threads(1)
    ours, theirs = make(), make()
    model, optimizer = sharded(ours, getattr(torch.optim, name), **options)
    reference = DistributedDataParallel(theirs)
    train(model, optimizer, steps)
    plain_optimizer = getattr(torch.optim, name)(theirs.parameters(), lr=1e-2, **options)
    train(reference, plain_optimizer, steps)
    return different_weights(ours, theirs) + differences(plain_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["default", "fused"])
def test_fifty_steps_have_the_bits_of_ddp(pool: RankPool, world: int, options: dict):
    mode = {"timeout": 60.0, "numerics": "rank_order" if world == 2 else "ring"}
    answers = pool.run(against_ddp, 50, "AdamW", options, world=world, gloo=True, settings=mode)
    assert answers == [[]] * world


def against_plain(cases: list[tuple]) -> list[str]:
    torch.set_num_threads(1)
    wrong = []
    for name, how, dtype, model in cases:
        options = {**OPTIMIZERS[name], **({how: True} if how != "single" else {"foreach": False})}
        ours, theirs = make(model, dtype), make(model, dtype)
        trained, optimizer = sharded(ours, getattr(torch.optim, name), **options)
        train(trained, optimizer, 12)
        reference, plain_optimizer = plain(theirs, getattr(torch.optim, name), **options)
        train(reference, plain_optimizer, 12)
        found = different_weights(ours, theirs) + differences(plain_optimizer.state_dict(), optimizer.state_dict())
        wrong += [f"{name} {how} {dtype} {model}: {one}" for one in found]
    return wrong


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 3])
def test_each_of_torchs_optimizers_has_its_own_bits(pool: RankPool, name: str, world: int):
    ways = ["single", "foreach", *(["fused"] if name in FUSED else [])]
    cases = [
        (name, how, dtype, "mlp")
        for how, dtype in itertools.product(ways, [torch.float32, torch.bfloat16])
        if (name, how, dtype) != ("SGD", "fused", torch.bfloat16)  # by itself it differs from itself
    ]
    cases += [(name, "foreach", None, model) for model in ("conv", "tied", "mixed")]
    assert pool.run(against_plain, cases, world=world) == [[]] * world


def with_scalars_and_tiny() -> list[str]:
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


@pytest.mark.parametrize("world", [2, 8])
def test_scalars_empty_and_tiny_parameters(pool: RankPool, world: int):
    assert pool.run(with_scalars_and_tiny, world=world) == [[]] * world


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


def whole_parameters(name: str) -> list[str]:
    kind, options = {
        "own": (WholeOnly, {}),
        "Adafactor": (torch.optim.Adafactor, {}),
    }[name]
    ours, theirs = make(), make()
    model, optimizer = sharded(ours, kind, elements=False, **options)
    train(model, optimizer, 6)
    reference, plain_optimizer = plain(theirs, kind, **options)
    train(reference, plain_optimizer, 6)
    return different_weights(ours, theirs) + differences(plain_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", ["own", "Adafactor"])
def test_whole_parameters_keep_the_bits_of_any_optimizer(pool: RankPool, name: str):
    assert pool.run(whole_parameters, name, world=3) == [[]] * 3


def muon() -> list[str]:
    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(24, 24, bias=False) for _ in range(3)))

    ours, theirs = net(), net()
    train(*sharded(ours, torch.optim.Muon, elements=False), 5)
    train(*plain(theirs, torch.optim.Muon), 5)
    return different_weights(ours, theirs)


def test_muon(pool: RankPool):
    assert pool.run(muon, world=2) == [[]] * 2


def no_world() -> list[str]:
    ours, theirs = make(), make()
    train(*sharded(ours), 5)
    train(*plain(theirs), 5)
    return different_weights(ours, theirs)


def test_one_rank(pool: RankPool):
    assert pool.run(no_world, world=1) == [[]]


def without_a_model() -> list[str]:
    torch.manual_seed(0)
    ours, theirs = make(), make()
    for net, optimizer in (
        (ours, syncengine.ShardedOptimizer(ours.parameters(), torch.optim.AdamW)),
        (theirs, torch.optim.AdamW(theirs.parameters())),
    ):
        net(torch.ones(2, 24)).sum().backward()
        optimizer.step()
    return different_weights(ours, theirs)


def test_parameters_of_no_parallel_are_updated_by_each_rank(pool: RankPool):
    assert pool.run(without_a_model) == [[]] * 2
