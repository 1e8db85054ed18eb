"""Random programs: what a ShardedOptimizer leaves has the bits of the plain optimizer on each rank.

The grammar is what users do with an optimizer between and in steps: each method of `Actions` does one thing, to a model
that is trained sharded or plain. Each program follows from its number, which a failure names.
"""

import copy
import os
import random
from typing import Any

import pytest
import torch
from marks import mostly_nightly
from models.workload import same_bits
from pool import RankPool
from sharded_training import MODELS, OPTIMIZERS, batch, dtype_of, is_common, make, not_divided, snapshot
from sharded_training import differences as state_differences
from sharded_training import different_weights as weight_differences
from torch import nn
from torch.distributed.algorithms.join import Join

import syncengine

CHUNK = 8  # programs for each call of ranks
COUNT = int(os.environ.get("SYNCENGINE_TEST_PROGRAMS", "0"))  # more of them, other ones for another number
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
ENDS = ("", "join", "torch's Join")


class Run:
    """A model in training. What it draws is the same on all ranks, sharded and plain."""

    def __init__(self, number: int, is_ours: bool) -> None:
        self.dice = random.Random(number)
        self.name = self.dice.choice([name for name in MODELS if name != "mlp"])
        self.kind = self.dice.choice(list(OPTIMIZERS))
        hows = [{}, {"foreach": True}, *[{"fused": True}] * (self.kind in FUSED and self.name != "mixed")]
        self.options = {"lr": 1e-2, **OPTIMIZERS[self.kind], **self.dice.choice(hows)}
        self.elements = self.dice.choice([None, False])
        self.is_ours, self.step, self.gradients = is_ours, 0, []
        count = len(list(make(self.name).parameters()))
        order = self.dice.sample(range(count), count)
        some = self.dice.choice([0, 0, 1])
        self.frozen, self.groups = order[:some], [sorted(order[some:]), order[:some]]  # a parameter that is, at first
        self.late = [self.groups[0].pop()] if self.dice.random() < 0.3 else []  # not in the optimizer yet
        self.begin(is_ours)

    def begin(self, is_sharded: bool) -> None:
        self.net = make(self.name)
        self.wrap()
        self.begin_optimizer(is_sharded)

    def wrap(self) -> None:
        self.net.requires_grad_(True)
        self.model = syncengine.Parallel(self.net)
        for i in self.frozen:
            self.parameters[i].requires_grad_(False)

    def begin_optimizer(self, is_sharded: bool) -> None:
        self.is_sharded = is_sharded
        groups = [{"params": [self.parameters[i] for i in group]} for group in self.groups if group]
        kind = getattr(torch.optim, self.kind)
        if is_sharded:
            self.optimizer: Any = syncengine.ShardedOptimizer(groups, kind, elements=self.elements, **self.options)
        else:
            self.optimizer = kind(groups, **self.options)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def loss(self) -> torch.Tensor:
        self.step += 1
        return self.model(batch(self.step, dtype_of(self.net))).float().square().mean()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()

    def halves(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() * 0.5 for name, p in self.net.named_parameters()}


class Actions(Run):
    """Each method is one thing that users do to the optimizer, or to the model."""

    def keep_gradients(self) -> None:
        for _ in range(2):
            self.optimizer.zero_grad(set_to_none=False)
            self.loss().backward()
            self.optimizer.step()

    def accumulate(self) -> None:
        self.optimizer.zero_grad()
        with self.model.no_sync():
            self.loss().backward()
        self.loss().backward()
        self.optimizer.step()

    def clip(self) -> None:
        self.optimizer.zero_grad()
        (self.loss() * 100).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def scale(self) -> None:
        """Once with an infinity of one rank."""
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for factor in (1.0, float("inf"), 1.0):
            self.optimizer.zero_grad()
            scaler.scale(self.loss() * (factor if syncengine.rank() == 1 else 1.0)).backward()
            if self.dice.random() < 0.5:
                scaler.unscale_(self.optimizer)
            scaler.step(self.optimizer)
            scaler.update()
            # torch's foreach SGD with Nesterov's momentum adds that to the gradients, here to those of a shard alone.
            if factor == 1.0 and not (self.options.get("foreach") and self.options.get("nesterov")):
                self.gradients += [p.grad.clone() for p in self.parameters if p.grad is not None]

    def call_closure(self) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.gradients.append(self.optimizer.step(closure).detach())

    def step_without_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.step()

    def change_rates(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def unfreeze(self) -> None:
        for i in self.frozen:
            self.parameters[i].requires_grad_(True)
        self.frozen = []

    def add_group(self) -> None:
        if self.late:
            self.optimizer.add_param_group({"params": [self.parameters[i] for i in self.late], "lr": 3e-3})
            self.groups.append(self.late)
            self.late = []

    def rewind(self) -> None:
        """Weights and state."""
        weights, state = copy.deepcopy(self.net.state_dict()), snapshot(self.optimizer)
        self.train(self.dice.randint(0, 1))
        self.net.load_state_dict(weights)
        self.optimizer.load_state_dict(state)

    def load_state(self) -> None:
        self.optimizer.load_state_dict(snapshot(self.optimizer))

    def load_weights(self) -> None:
        self.net.load_state_dict(self.halves(), strict=False)

    def load_a_part(self) -> None:
        name, value = self.dice.choice(list(self.halves().items()))
        self.net.get_submodule(name.rpartition(".")[0]).load_state_dict({name.rpartition(".")[2]: value}, strict=False)

    def send_and_load(self) -> None:
        """To a process on one rank: torch moves what each storage holds, in place. Loading makes good for it."""
        if syncengine.rank() == self.dice.randrange(2):
            for p in self.trained:
                if is_common(p):
                    p.share_memory_()
        self.load_weights()

    def resume(self) -> None:
        """From a checkpoint, with the other kind."""
        weights, state = copy.deepcopy(self.net.state_dict()), snapshot(self.optimizer)
        untouched = copy.deepcopy(state)
        self.begin(self.is_ours and not self.is_sharded)
        self.net.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        if self.is_sharded:
            assert state_differences(untouched, state) == []

    def release(self) -> None:
        """Another one after it, of the same kind."""
        state = snapshot(self.optimizer)
        if self.is_sharded:
            self.optimizer.release()
        self.begin_optimizer(self.is_sharded)
        self.optimizer.load_state_dict(state)

    def wrap_again(self) -> None:
        self.wrap()

    def replace_state(self) -> None:
        for p, entries in self.optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.shape == p.shape and value.is_floating_point():
                    entries[key] = value * 0.5

    def replace_states(self) -> None:
        for p, entries in list(self.optimizer.state.items()):
            self.optimizer.state[p] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in entries.items()}

    def forget_state(self) -> None:
        """Of one parameter, or all. (Adagrad makes it but once, and torch's fused SGD for all or none.)"""
        if self.kind != "Adagrad":
            one = self.dice.random() < 0.5 and not (self.kind == "SGD" and self.options.get("fused"))
            for p in [self.dice.choice(self.trained)] if one else list(self.optimizer.state):
                self.optimizer.state.pop(p, None)

    def read_state(self) -> None:
        """As a log on rank 0: reading puts an empty entry where there is none."""
        parameter = self.dice.choice(self.trained)
        if syncengine.rank() == 0:
            assert self.optimizer.state[parameter].get("nothing") is None


ACTIONS = [name for name in vars(Actions) if not name.startswith("_")]


def end_unevenly(run: Actions, how: str) -> None:
    """Each rank has another number of batches, one has none; gradients are clipped, and rates change."""
    together = [run.model, run.optimizer] if run.is_sharded else [run.model]
    few = run.dice.choice([syncengine.rank(), syncengine.world_size() - 1 - syncengine.rank()])
    with Join(together) if how == "torch's Join" else run.model.join():
        for _ in range(2 * few):
            run.clip()
            run.change_rates()


def carry_out(number: int, is_ours: bool) -> tuple[Actions, str, list[str]]:
    run = Actions(number, is_ours)
    actions = run.dice.choices(ACTIONS, k=run.dice.choice([0, 6, 6, 6, 6]))
    for action in actions:
        run.train(run.dice.randint(0, 2))
        getattr(run, action)()
    run.unfreeze()
    run.add_group()
    run.train(len(actions) // 3)
    end = run.dice.choice(ENDS if actions else ENDS[1:])  # perhaps before any training
    if end:
        end_unevenly(run, end)
    return run, end, actions


def differences(first: int) -> list[str]:
    wrong = []
    for number in range(first, first + CHUNK):
        try:
            (ours, end, actions), (theirs, *_) = carry_out(number, True), carry_out(number, False)
        except Exception as error:
            raise AssertionError(f"program {number}") from error
        found = [name for name in weight_differences(ours.net, theirs.net) if not end or "running" not in name]
        found += [] if end else state_differences(theirs.optimizer.state_dict(), ours.optimizer.state_dict())
        found += not_divided(ours.net, ours.optimizer) if ours.is_sharded and syncengine.world_size() > 1 else []
        pairs = enumerate(zip(ours.gradients, theirs.gradients, strict=True))
        found += [f"gradient {i}" for i, (a, b) in pairs if not same_bits(a, b)]
        if found:
            wrong.append(f"program {number}, {ours.name}, {ours.kind}, {ours.options}, {actions}, {end}: {found}")
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world", "first"),
    mostly_nightly(
        [((2, 3, 2, 3, 2, 1)[chunk % 6], 1_000_000 * COUNT + CHUNK * chunk) for chunk in range(COUNT or 6)], 1
    ),
)
def test_programs_have_the_bits_of_the_plain_optimizer(pool: RankPool, world: int, first: int):
    for wrong in pool.run(differences, first, world=world, gloo=True, timeout=300):
        assert not wrong, "\n".join(wrong)
