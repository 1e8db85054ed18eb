"""Random programs: what Parallel leaves has the bits of DDP, and of a plain loop over the batches of all ranks.

The grammar is that of docs/ddp_parity.md: layers, outputs, the wrapper's options, hooks, accumulation, forwards without
a backward, freezing, errors that all ranks catch. What DDP can't do is held against the loop alone, and the loop is
left out where DDP rounds or sends otherwise. Each program follows from its number, which a failure names.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from flat import flat
from models.workload import same_bits
from pool import RankPool
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_versions import IS_SINCE_2_13

import syncengine

CHUNK = 12  # programs for each call of ranks
COUNT = int(os.environ.get("SYNCENGINE_TEST_PROGRAMS", "0"))  # more of them, other ones for another number
WIDTH = 24


class As(nn.Module):
    """A layer in a dtype of its own, or with its memory in another order."""

    def __init__(self, layer: nn.Module, into: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.into = layer, into

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.into(x)).flatten(1).to(x.dtype)


class Position(nn.Module):
    """Its gradient shares memory with others."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.row


class Odd(nn.Module):
    """Parameters without dimensions or elements, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, WIDTH))
        self.order = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * self.scale, x @ self.empty.t()], 1)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).real


class Table(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, WIDTH, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows((x.detach().abs() * 10).long().clamp(max=10)[:, :3]).mean(1)


class Checkpoint(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.layer = reentrant, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


class Branch(nn.Module):
    """Uses one or the other; `never` is for nothing."""

    left = True

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one if self.left else self.other)(x)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 3000), nn.ReLU(), nn.Linear(3000, WIDTH)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "position": Position,
    "odd": Odd,
    "double": lambda: As(linear().double(), torch.Tensor.double),
    "bfloat16": lambda: As(linear().bfloat16(), torch.Tensor.bfloat16),
    "complex": Complex,
    "table": lambda: Table(False),
    "checkpoint": lambda: Checkpoint(False),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "channels last": lambda: As(
        nn.Conv2d(2, 6, (2, 3)).to(memory_format=torch.channels_last), lambda x: x.view(-1, 2, 3, 4)
    ),
}
BUFFERS = "batch norm"
UNUSED = "branch"
BEFORE = ("dropped", "no_grad", "inference", "eval")
SPECIAL: dict[str, Callable[[], nn.Module]] = {
    BUFFERS: lambda: nn.BatchNorm1d(WIDTH),
    UNUSED: Branch,
    "reentrant": lambda: Checkpoint(True),
    "sparse table": lambda: Table(True),
}
CHOICES: dict[str, Callable[[int, int], bool]] = {
    "left": lambda step, rank: True,
    "by rank": lambda step, rank: rank == 0,
    "in turns": lambda step, rank: step % 2 == 0,
    "crosswise": lambda step, rank: (step + rank) % 2 == 0,
}


class Pair(NamedTuple):
    first: torch.Tensor
    rest: Any


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda out: out, lambda out: out),
    "dict": (lambda out: {"a": out, "more": [None, "text"]}, lambda out: out["a"]),
    "named": (lambda out: Pair(out, (out[:, 1:], None)), lambda out: out.first),
    "twice": (lambda out: [out, out], lambda out: out[1]),
}


class Failed(Exception):
    """What a program raises on all ranks, and catches."""


@dataclass(frozen=True)
class Step:
    micro: int = 0  # backwards under no_sync before the one that synchronizes
    uneven: bool = False  # one more of them on rank 0
    forwards: int = 1  # that share that one
    before: str = ""  # a forward that has no backward
    penalty: bool = False  # on the gradient of the input
    frozen: int | None = None  # a layer
    freezes: str = "all"  # for the whole step; "after" those backwards; or on "one" rank alone
    fails: str = ""  # where
    zero: str = "none"  # what becomes of gradients then
    clips: bool = False
    optimizes: bool = True


@dataclass(frozen=True)
class Program:
    number: int
    layers: tuple[str, ...]
    output: str
    choice: str
    options: dict[str, Any] = field(default_factory=dict)
    hook: str = ""
    optimizer: str = "sgd"
    tied: bool = False
    steps: tuple[Step, ...] = ()

    @property
    def is_ddps(self) -> bool:
        """Whether DDP can do that."""
        finds = "find_unused_parameters" in self.options
        if any(step.fails == "backward" or (step.frozen is not None and not finds) for step in self.steps):
            return False  # it waits for gradients that do not come
        # It fails in an assertion of its own; and leaves what was accumulated on each rank.
        cannot = {"static_graph", "skip_all_reduce_unused_params"} & self.options.keys()
        return not (cannot and any(step.micro for step in self.steps))

    @property
    def is_the_loops(self) -> bool:
        """Whether a loop over ranks knows what becomes of buffers, of compressed and of sparse gradients."""
        if any((step.micro or step.uneven) and step.before == "dropped" for step in self.steps):
            return False  # the backward that is due, and averaged, is the first to come, here as in DDP
        return not self.hook.startswith("fp16") and not {BUFFERS, "sparse table"} & set(self.layers)


def draw(number: int, fails: bool = True) -> Program:
    """The program of this number; `fails`: it may raise, and go on (docs/errors.md says where that is not so)."""
    dice = random.Random(number)

    def chance(of: float) -> bool:
        return dice.random() < of

    layers = dice.choices(list(ORDINARY), k=dice.randint(2, 5)) + [name for name in SPECIAL if chance(0.2)]
    dice.shuffle(layers)
    finds = UNUSED in layers or chance(0.3)
    if finds:  # of which DDP sees no parameters in a reentrant checkpoint
        layers = ["checkpoint" if name == "reentrant" else name for name in layers]
    has = set(layers)
    sparse, static = "sparse table" in has, chance(0.2)
    options: dict[str, Any] = {"find_unused_parameters": True} if finds and not (static and chance(0.5)) else {}
    if static:
        options["static_graph"] = True
    if chance(0.5):
        options["bucket_cap_mb"] = dice.choice([1e-6, 0.05, 100])
    elif chance(0.3):
        options["bucket_cap_mb_list"] = [0.02, 0.3]
    if not sparse and chance(0.3):
        options["gradient_as_bucket_view"] = True
    if not sparse and chance(0.2):
        options["batched_grad_copy"] = True
    choice, hook = dice.choice(["left", "by rank"] if static else list(CHOICES)), ""
    if "find_unused_parameters" in options and not sparse and not static and chance(0.3):
        options["skip_all_reduce_unused_params"], choice = True, "in turns"  # ranks skip the same buckets
    elif not sparse and not static and "complex" not in has and chance(0.3):
        hook = dice.choice(["all-reduce", "fp16"])
    if not IS_SINCE_2_13:
        for name in ("bucket_cap_mb_list", "batched_grad_copy", "skip_all_reduce_unused_params"):
            options.pop(name, None)
    once, finds = static or "reentrant" in has, "find_unused_parameters" in options
    skips = "skip_all_reduce_unused_params" in options
    fails = fails and not (static or hook or BUFFERS in has or skips)
    steps = []
    for place in range(dice.randint(3, 6)):
        frozen = None
        if not static and chance(0.25):
            frozen = dice.randrange(len(layers))
            frozen = None if len(layers) < 3 or layers[frozen] == "sparse table" else frozen
        freezes = dice.choice(["all", "after", "one"]) if finds and not skips else "all"
        steps.append(
            Step(
                micro=dice.choice([0, 0, 0, 1, 2]) if frozen is None or freezes == "after" else 0,
                uneven=not (static or skips) and (frozen is None or freezes == "after") and chance(0.1),
                forwards=1 if once else dice.choice([1, 1, 1, 2, 3]),
                before="" if static else dice.choice(["", "", "", *BEFORE, *(() if finds or once else ("pending",))]),
                penalty=not ({"reentrant", "sparse table", "complex"} & has) and not static and chance(0.15),
                frozen=frozen,
                freezes=freezes,
                fails=dice.choice(["forward", "backward"]) if place and fails and chance(0.12) else "",
                zero="none" if frozen is not None else dice.choice(["none", "none", "zeros", "kept"]),
                clips=not sparse and chance(0.2),
                optimizes=chance(0.8),
            )
        )
    for place, step in enumerate(steps):
        changes: dict[str, Any] = {}
        if place + 1 < len(steps) and (steps[place + 1].frozen is not None or steps[place + 1].fails):
            changes["zero"] = "none"  # what was frozen or has failed begins anew
        if step.fails:
            changes |= {"zero": "none", "optimizes": False, "clips": False}
        if step.before == "dropped" and (step.fails or (finds and step.micro)):
            changes["before"] = ""
        if step.before == "dropped" or any(each.fails for each in steps):
            changes["uneven"] = False  # of a backward that is due all ranks make the first
        steps[place] = replace(step, **changes)
    tied = chance(0.5 if once and static else 0.2) and (static or not once)
    if tied and "reentrant" in layers:  # its hooks run twice in a backward, which takes a static graph
        layers.remove("reentrant")
        layers.insert(0, "reentrant")
    kind = "sgd" if sparse else dice.choice(["sgd", "momentum", "adamw"])
    output = dice.choice(list(OUTPUTS))
    return Program(number, tuple(layers), output, choice, options, hook, kind, tied, tuple(steps))


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layers = nn.ModuleList({**ORDINARY, **SPECIAL}[name]() for name in program.layers)
        self.tied = program.tied  # the first is used once more
        self.head = nn.Linear(WIDTH, 7)
        self.output = OUTPUTS[program.output][0]

    def forward(self, x: torch.Tensor, fails: str = "") -> Any:
        if not x.requires_grad and not x.is_inference() and torch.is_grad_enabled():
            x.requires_grad_()  # for reentrant checkpoints
        for layer in [*self.layers, *self.layers[: self.tied]]:
            x = x + layer(x).tanh()
        if fails == "forward":
            raise Failed
        if fails == "backward":
            x.register_hook(fail)
        return self.output(self.head(x))


def fail(gradient: torch.Tensor) -> None:
    raise Failed


HOOKS: dict[str, Callable[..., Any]] = {
    "all-reduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def make_optimizer(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=0.01)
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)


def forward_without_backward(model: nn.Module, kind: str, x: torch.Tensor) -> None:
    if kind == "dropped":
        model(x)
    elif kind == "inference":
        with torch.inference_mode():
            model(x)
    else:
        with torch.no_grad():
            model.train(kind != "eval")(x)
            model.train()


def run_step(model: nn.Module, program: Program, number: int, rank: int) -> list[torch.Tensor]:
    """One rank's part of a step, to the end of its backward; its losses."""
    step = program.steps[number]
    generator = torch.Generator().manual_seed(1000 * program.number + 10 * number + rank)
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)
    net = getattr(model, "module", model)

    def choose(turn: int) -> None:
        for layer in net.layers:
            if isinstance(layer, Branch):
                layer.left = CHOICES[program.choice](turn, rank)

    def loss_of(x: torch.Tensor, fails: str = "") -> torch.Tensor:
        return OUTPUTS[program.output][1](model(x, fails)).float().square().mean()

    def batch() -> torch.Tensor:
        return torch.randn(5, WIDTH, generator=generator)

    if step.before in BEFORE:
        forward_without_backward(model, step.before, batch())
    freezes = step.frozen is not None and (step.freezes != "one" or rank == 0)
    train_layer(net, step.frozen, not freezes or step.freezes == "after")
    for k in range(step.micro + (step.uneven and rank == 0)):
        choose(number + k + 1)
        with no_sync():
            loss_of(batch()).backward()
    train_layer(net, step.frozen, not freezes)
    choose(number)
    try:
        x = batch().requires_grad_()
        losses = [loss_of(x, step.fails)]
        losses += [loss_of(batch()) for _ in range(step.forwards - 1)]
        total = sum(losses)
        if step.penalty:
            (slope,) = torch.autograd.grad(losses[0], x, create_graph=True)
            total = total + slope.square().sum()
        if step.before == "pending":  # as a GAN's discriminator, for another forward
            train_layer(net, 0, False)
            other = loss_of(batch())
            train_layer(net, 0, step.frozen != 0)
            del other
        total.backward()
    except Failed:
        return []
    finally:
        train_layer(net, step.frozen, True)
    return [loss.detach() for loss in losses]


def train_layer(net: Net, place: int | None, trains: bool) -> None:
    for p in net.layers[place].parameters() if place is not None else ():
        p.requires_grad_(trains and (p.is_floating_point() or p.is_complex()))


def average(nets: list[nn.Module]) -> None:
    """What ranks with these models would do: an average where any of them has a gradient."""
    for parameters in zip(*(net.parameters() for net in nets), strict=True):
        brought = [p.grad for p in parameters]
        if all(grad is None for grad in brought):
            continue
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total = sum(part / len(nets) for part in parts)
        for p in parameters:
            p.grad = total.clone()


def train(program: Program, wrap: Callable[..., nn.Module] | None) -> list[tuple[str, torch.Tensor | None]]:
    """All losses and gradients of this rank, and its last parameters and buffers. Without `wrap`: the plain loop."""
    torch.manual_seed(program.number)
    net, own = Net(program), syncengine.rank()
    if wrap is None:
        models = {rank: copy.deepcopy(net) for rank in range(syncengine.world_size())}
    else:
        models = {own: wrap(net, **program.options)}
        if program.hook:
            models[own].register_comm_hook(None, HOOKS[program.hook])
    nets = {rank: getattr(model, "module", model) for rank, model in models.items()}
    optimizers = [make_optimizer(program.optimizer, net) for net in nets.values()]
    found: list[tuple[str, torch.Tensor | None]] = []
    for number, step in enumerate(program.steps):
        for rank, model in models.items():
            losses = run_step(model, program, number, rank)
            if rank == own:
                found += [(f"loss {i} of step {number}", loss) for i, loss in enumerate(losses)]
        if wrap is None and not step.fails:
            average(list(nets.values()))
        if not step.fails:
            for name, p in nets[own].named_parameters():
                found.append((f"gradient of {name} in step {number}", None if p.grad is None else p.grad.clone()))
        for one, optimizer in zip(nets.values(), optimizers, strict=True):
            if step.clips:
                torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            if step.optimizes:
                optimizer.step()
            if step.zero != "kept":
                optimizer.zero_grad(set_to_none=step.zero == "none")
    return found + [(name, value.clone()) for name, value in nets[own].state_dict().items()]


def difference(program: Program, reference: Callable[..., nn.Module] | None) -> str:
    ours, theirs = train(program, syncengine.Parallel), train(program, reference)
    assert len(ours) == len(theirs)
    return next((name for (name, a), (_, b) in zip(ours, theirs, strict=True) if not same_bits(a, b)), "")


def differences(first: int, loop: bool, fails: bool = True) -> list[str]:
    """Of these programs, those that have other bits than the references."""
    wrong = []
    for number in range(first, first + CHUNK):
        program = draw(number, fails)
        references = [DistributedDataParallel] * program.is_ddps + [None] * (loop and program.is_the_loops)
        for reference in references:
            try:
                where = difference(program, reference)
            except Exception as error:
                raise AssertionError(f"{program} beside {reference or 'a loop'}") from error
            if where:
                wrong.append(f"{where}, beside {reference or 'a loop'}: {program}")
    return wrong


def numbers(kind: int, chunks: int) -> list[int]:
    """Where chunks begin."""
    chunks = COUNT or chunks
    return [100_000 * kind + 1_000_000 * COUNT + CHUNK * chunk for chunk in range(chunks)]


@pytest.mark.parametrize("first", numbers(0, 8))
def test_programs_of_two_ranks(pool: RankPool, first: int):
    for wrong in pool.run(differences, first, True, gloo=True):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("first", numbers(1, 4))
def test_programs_of_three_ranks_in_ring(pool: RankPool, first: int):
    settings = {"timeout": 60.0, "numerics": "ring"}
    for wrong in pool.run(differences, first, False, world=3, gloo=True, settings=settings):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("first", numbers(2, 3))
def test_programs_with_flat_buckets(pool: RankPool, first: int):
    for wrong in pool.run(flat, differences, first, True, False, gloo=True):
        assert not wrong, "\n".join(wrong)


def test_the_grammar_draws_everything():
    """Guards the tests above."""
    programs = [draw(number) for number in range(8 * CHUNK)]
    assert {name for program in programs for name in program.layers} == {*ORDINARY, *SPECIAL}
    assert {name for program in programs for name in program.options} >= {"static_graph", "gradient_as_bucket_view"}
    assert {program.output for program in programs} == {*OUTPUTS}
    assert {step.fails for program in programs for step in program.steps} == {"", "forward", "backward"}
    assert sum(program.is_ddps for program in programs) > 3 * CHUNK < sum(program.is_the_loops for program in programs)
