"""Random programs: what Parallel leaves has the bits of DDP, and of a plain loop over the batches of all ranks.

The grammar is that of docs/ddp_parity.md: layers and outputs (`random_layers.py`), the wrapper's options, hooks,
accumulation, ways to run forward and backward, forwards without a backward, freezing, copies, and errors of some ranks
or all. What DDP can't do is held against the loop alone, and the loop is left out where DDP rounds or sends otherwise.
Each program follows from its number, which a failure names.
"""

import contextlib
import copy
import os
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from flat import flat
from marks import mostly_nightly
from models.workload import same_bits
from pool import run_on_ranks
from raising_model import Bad
from random_layers import (
    BATCH,
    BUFFERED,
    FIXED,
    OPTIMIZERS,
    ORDINARY,
    OUTPUTS,
    REENTRANT,
    SPECIAL,
    UNUSED,
    WIDTH,
    Branch,
    make_layer,
)
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_versions import IS_SINCE_2_13

import syncengine
from syncengine.errors import Aborted

CHUNK = 12  # programs for each call of ranks
COUNT = int(os.environ.get("SYNCENGINE_TEST_PROGRAMS", "0"))  # more of them, other ones for another number

BEFORE = ("dropped", "no_grad", "inference", "eval")
CALLS = ("autocast", "anomalies", "saved elsewhere", "functional", "checkpointed")
BACKWARDS = ("inputs", "thread", "inside", "retained")
PLACES = ("forward", "early", "middle", "late")
HOSTS = ("aaa", "ab", "aab", "aaaaa")
CHOICES: dict[str, Callable[[int, int], bool]] = {
    "left": lambda step, rank: True,
    "by rank": lambda step, rank: rank == 0,
    "in turns": lambda step, rank: step % 2 == 0,
    "crosswise": lambda step, rank: (step + rank) % 2 == 0,
}
NEW_OPTIONS = {"bucket_cap_mb_list", "batched_grad_copy", "skip_all_reduce_unused_params", "forward_sync_buffers"}
HOOKS = {"all-reduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}


@dataclass(frozen=True)
class Step:
    micro: int = 0  # backwards under no_sync before the one that synchronizes
    uneven: bool = False  # one more of them on rank 0
    forwards: int = 1  # that share that one
    before: str = ""  # a forward that has no backward
    calls: str = ""  # how that forward is called
    backward: str = ""  # and how its backward is run
    penalty: str = ""  # on the gradient of the "input" or of the "weights"
    frozen: int | None = None  # a layer
    freezes: str = "all"  # for the whole step; "after" those backwards; or on "one" rank alone
    fails: tuple[str, ...] = ()  # where, on each rank
    asks: str = "evaluation"  # what tells a rank then whether the others have failed, too
    zero: str = "none"  # what becomes of gradients then
    clips: bool = False
    optimizes: bool = True
    copies: bool = False  # the wrapper, for the steps to come


@dataclass(frozen=True)
class Program:
    number: int
    layers: tuple[str, ...]
    output: str
    choice: str
    spares: bool  # a part of the output
    options: dict[str, Any] = field(default_factory=dict)
    hook: str = ""
    optimizer: str = "sgd"
    tied: bool = False
    steps: tuple[Step, ...] = ()

    @property
    def is_ddps(self) -> bool:
        """Whether DDP can do that."""
        finds = "find_unused_parameters" in self.options
        if any(name.startswith("views") for name in self.layers):
            return False  # gradients that share memory get several averages, one over the other, by some options
        if any(set(step.fails) - {"forward"} or (step.frozen is not None and not finds) for step in self.steps):
            return False  # it waits for gradients that do not come
        if finds and "batched_grad_copy" in self.options:
            return False  # torch 2.13's raises "a bug in DDP implementation" in some programs, or leaves no averages
        # It fails in an assertion of its own; and leaves what was accumulated on each rank.
        cannot = {"static_graph", "skip_all_reduce_unused_params"} & self.options.keys()
        return not (cannot and any(step.micro for step in self.steps))

    @property
    def is_the_loops(self) -> bool:
        """Whether a loop over ranks knows what becomes of buffers, of compressed and of sparse gradients."""
        if any((step.micro or step.uneven) and step.before in ("dropped", "grad") for step in self.steps):
            return False  # the backward that is due, and averaged, is the first to come, here as in DDP
        return not (self.spares or self.hook.startswith("fp16") or {*BUFFERED, "sparse table"} & set(self.layers))


def draw(number: int, world: int = 2, fails: bool = True) -> Program:
    """The program of this number; `fails`: it may raise, and go on (docs/errors.md says where that is not so)."""
    dice = random.Random(number)

    def chance(of: float) -> bool:
        return dice.random() < of

    layers = dice.choices(list(ORDINARY), k=dice.randint(2, 5)) + [name for name in SPECIAL if chance(0.07)]
    dice.shuffle(layers)
    finds, static = UNUSED in layers or chance(0.3), chance(0.25)
    layers = ["checkpoint" if name == "repeated" and not static else name for name in layers]
    finds = finds or "repeated" in layers
    if finds:  # of which DDP sees no parameters in a reentrant checkpoint
        layers = ["checkpoint" if name in REENTRANT else name for name in layers]
    has = set(layers)
    sparse, reentrant, buffers = "sparse table" in has, has & {*REENTRANT, "repeated"}, has & {*BUFFERED}
    options: dict[str, Any] = {"static_graph": True} if static else {}
    if finds and not (static and chance(0.5)) and "repeated" not in has:
        options["find_unused_parameters"] = True
    if chance(0.5):
        options["bucket_cap_mb"] = dice.choice([1e-6, 0.05, 100])
    elif chance(0.3):
        options["bucket_cap_mb_list"] = [0.02, 0.3]
    if not sparse and chance(0.3):
        options["gradient_as_bucket_view"] = True
    if not sparse and chance(0.2):
        options["batched_grad_copy"] = True
    if buffers and chance(0.3):
        options["forward_sync_buffers"] = False
    choice, hook = dice.choice(["left", "by rank"] if static else list(CHOICES)), ""
    if "find_unused_parameters" in options and not sparse and not static and chance(0.3):
        options["skip_all_reduce_unused_params"], choice = True, "in turns"  # ranks skip the same buckets
    elif not sparse and not static and not {"complex", "lazy"} & has and chance(0.3):
        hook = dice.choice(["all-reduce", "fp16"])
    options = {name: value for name, value in options.items() if IS_SINCE_2_13 or name not in NEW_OPTIONS}
    once, finds = static or bool(reentrant), "find_unused_parameters" in options
    skips = "skip_all_reduce_unused_params" in options
    fails = fails and not (static or hook or buffers or skips)
    output = dice.choice(list(OUTPUTS))
    without = {"functional", "autocast"} if FIXED & has else set()
    without |= {"checkpointed"} if finds or buffers or output == "input" else set()
    calls = [] if static or reentrant or sparse or hook else [name for name in CALLS if name not in without]
    backwards = [name for name in BACKWARDS if not (once or finds or sparse)]
    befores = ["", "", "", *BEFORE, *(() if finds or once else ("pending", "grad"))]
    penalizes = not (static or reentrant or sparse or {"complex", "lazy"} & has)
    steps = []
    for place in range(dice.randint(3, 6)):
        frozen = dice.randrange(len(layers)) if not static and chance(0.25) else None
        if frozen is not None and (len(layers) < 3 or layers[frozen] == "sparse table"):
            frozen = None
        freezes = dice.choice(["all", "after", "one"]) if finds and not skips else "all"
        which: tuple[str, ...] = ()
        if place and fails and chance(0.2):
            places = ("forward", "early") if reentrant else PLACES
            which = tuple(dice.choice(places) if chance(0.6) else "" for _ in range(world))
            which = which if any(which) and chance(0.7) else ("forward",) * world
        steps.append(
            Step(
                micro=dice.choice([0, 0, 0, 1, 2]) if frozen is None or freezes == "after" else 0,
                uneven=not (static or skips) and (frozen is None or freezes == "after") and chance(0.1),
                forwards=1 if once else dice.choice([1, 1, 1, 2, 3]),
                before="" if static else dice.choice(befores),
                calls=dice.choice(calls) if calls and chance(0.3) else "",
                backward=dice.choice(backwards) if backwards and chance(0.3) else "",
                penalty=dice.choice(["input", "weights"]) if penalizes and chance(0.15) else "",
                frozen=frozen,
                freezes=freezes,
                fails=which,
                asks=dice.choice(["evaluation", "step"]),
                zero="none" if frozen is not None else dice.choice(["none", "none", "zeros", "kept"]),
                clips=not (sparse or "lazy" in has) and chance(0.2),
                optimizes=chance(0.8),
                copies=not (static or hook or FIXED & has) and chance(0.15),
            )
        )
    for place, step in enumerate(steps):
        changes: dict[str, Any] = {}
        if place + 1 < len(steps) and (steps[place + 1].frozen is not None or steps[place + 1].fails):
            changes["zero"] = "none"  # what was frozen or has failed begins anew
        if step.fails:
            changes |= {"zero": "none", "optimizes": False, "clips": False, "penalty": "", "calls": ""}
            changes |= {"backward": "", "copies": False, "forwards": 1}  # buffers are sent in each forward
        if step.penalty or step.frozen is not None:
            changes["calls"] = ""
        if step.before in ("dropped", "grad", "pending") and (step.fails or (finds and step.micro)):
            changes["before"] = ""
        if step.before in ("dropped", "grad") or any(each.fails for each in steps):
            changes["uneven"] = False  # of a backward that is due all ranks make the first
        if finds and "gradient_as_bucket_view" in options and world == 3 and step.zero == "kept":
            changes["zero"] = "none"  # else DDP divides by 3, and adds up again, an average that no rank has used since
        if any(name.startswith("views") for name in has):  # gradients share memory, and torch adds to it in place
            changes |= {"micro": 0, "uneven": False, "zero": "none", "clips": False}
        steps[place] = replace(step, **changes)
    tied = chance(0.5 if once and static else 0.2) and (static or not once)
    if tied and has & {*REENTRANT}:  # its hooks run twice in a backward, which takes a static graph
        first = next(place for place, name in enumerate(layers) if name in REENTRANT)
        layers.insert(0, layers.pop(first))
    if tied and layers[0] == "selective":  # autocast casts its weights in the first use alone, which torch refuses
        steps = [replace(step, calls="" if step.calls == "autocast" else step.calls) for step in steps]
    kind = "sgd" if sparse or "lazy" in has else dice.choice(list(OPTIMIZERS))
    # (DDP's sink, through which gradients of what is not used come, does not look into dataclasses.)
    spares = finds and not (static or hook) and output not in ("tensor", "input", "record") and chance(0.5)
    spares &= not any(step.copies or step.penalty for step in steps)
    return Program(number, tuple(layers), output, choice, spares, options, hook, kind, tied, tuple(steps))


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(name) for name in program.layers)
        self.tied = program.tied  # the first is used once more
        self.head = nn.Linear(WIDTH, 7)
        self.spare = nn.Linear(WIDTH, 3) if program.spares else None
        self.output = program.output

    def forward(self, x: torch.Tensor, fails: str = "") -> Any:
        if not x.requires_grad and not x.is_inference() and torch.is_grad_enabled():
            x.requires_grad_()  # for reentrant checkpoints
        start = x
        for place, layer in enumerate([*self.layers, *self.layers[: self.tied]]):
            x = x + layer(x).tanh()
            if fails == {0: "late", len(self.layers) // 2: "middle"}.get(place):
                x.register_hook(fail)
        if fails == "forward":
            raise Bad
        if fails:  # for the others, too, in case that there are few layers
            x.register_hook(fail)
        return OUTPUTS[self.output][0](start, self.head(x), self.spare and self.spare(x))


def fail(gradient: torch.Tensor) -> None:
    raise Bad


def forward_without_backward(model: nn.Module, kind: str, x: torch.Tensor) -> None:
    with {"dropped": contextlib.nullcontext, "inference": torch.inference_mode}.get(kind, torch.no_grad)():
        model.train(kind != "eval")(x)
        model.train()


def call(model: nn.Module, how: str, x: torch.Tensor, *others: Any) -> Any:
    if how == "functional":
        trained = {n: 2 * p for n, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
        return torch.func.functional_call(model, trained, (x, *others))
    if how == "checkpointed":
        return checkpoint(model, x, *others, use_reentrant=False)
    contexts = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "saved elsewhere": save_on_cpu}
    with contexts.get(how, contextlib.nullcontext)():
        return model(x, *others)


def run_backward(model: nn.Module, how: str, loss: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """What it computes besides what is in `.grad`."""
    if how == "thread":
        with ThreadPoolExecutor(1) as thread:
            thread.submit(loss.backward).result()
    elif how == "inside":
        with getattr(model, "no_sync", contextlib.nullcontext)():  # which forward decides about
            loss.backward()
    else:
        inputs = [p for p in model.parameters() if p.requires_grad]
        loss.backward(retain_graph=how == "retained", inputs=inputs if how == "inputs" else None)
    return list(torch.autograd.grad(loss, x)) if how == "retained" else []


def run_step(model: nn.Module, program: Program, number: int, rank: int) -> list[torch.Tensor]:
    """One rank's part of a step, to the end of its backward; its losses."""
    step = program.steps[number]
    generator = torch.Generator().manual_seed(1000 * program.number + 10 * number + rank)
    net = getattr(model, "module", model)
    place = step.fails[rank] if step.fails else ""
    expected = Bad if place else Aborted  # the latter where another rank fails

    def choose(turn: int) -> None:
        for branch in (layer for layer in net.layers if isinstance(layer, Branch)):
            branch.left = CHOICES[program.choice](turn, rank)

    def loss_of(x: torch.Tensor, fails: str = "", calls: str = "") -> torch.Tensor:
        return OUTPUTS[program.output][1](call(model, calls, x, fails)).float().square().mean()

    def batch() -> torch.Tensor:
        return torch.randn(BATCH, WIDTH, generator=generator)

    if step.before in BEFORE:
        forward_without_backward(model, step.before, batch())
    elif step.before == "grad":
        torch.autograd.grad(loss_of(batch()), net.head.weight)
    freezes = step.frozen is not None and (step.freezes != "one" or rank == 0)
    train_layer(net, step.frozen, not freezes or step.freezes == "after")
    for k in range(step.micro + (step.uneven and rank == 0)):
        choose(number + k + 1)
        with getattr(model, "no_sync", contextlib.nullcontext)():  # decided at forward
            loss = loss_of(batch())
        if step.backward == "retained":
            loss.square().backward(retain_graph=True)
        loss.backward()
    train_layer(net, step.frozen, not freezes)
    choose(number)
    try:
        x = batch().requires_grad_()
        with torch.autograd.set_detect_anomaly(step.calls == "anomalies"):
            losses = [loss_of(x, place, step.calls), *(loss_of(batch()) for _ in range(step.forwards - 1))]
            total = sum(losses)
            if step.penalty:
                of = [x] if step.penalty == "input" else [p for p in net.parameters() if p.requires_grad]
                slopes = torch.autograd.grad(losses[0], of, create_graph=True, allow_unused=True)
                total = total + sum(slope.float().square().sum() for slope in slopes if slope is not None)
            if step.before == "pending":  # as a GAN's discriminator, for another forward
                train_layer(net, 0, False)
                other = loss_of(batch())
                train_layer(net, 0, step.frozen != 0)
                del other
            more = run_backward(model, step.backward, total, x)
    except expected:
        if model is not net and step.asks == "step":  # by which this rank hears whether all have failed in forward
            torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
        elif model is not net:
            forward_without_backward(model, "no_grad", batch())
        return []
    finally:
        train_layer(net, step.frozen, True)
    assert model is net or not step.fails
    return [loss.detach() for loss in losses] + more


def train_layer(net: Net, place: int | None, trains: bool) -> None:
    for p in net.layers[place].parameters() if place is not None else ():
        p.requires_grad_(trains and (p.is_floating_point() or p.is_complex()))


def stamps(parameters: Iterable[nn.Parameter]) -> list[tuple[torch.Tensor | None, int]]:
    """Stamps that tell later whether anything was added to a gradient, be it zero."""
    return [(p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]


def average(nets: list[nn.Module], stamps_before: list[list[tuple[torch.Tensor | None, int]]]) -> None:
    """Averages as ranks with these models would, where any of them has brought a gradient (docs/numerics.md)."""
    for *parameters, then in zip(*(net.parameters() for net in nets), zip(*stamps_before, strict=True), strict=True):
        if all(a is b and i == j for (a, i), (b, j) in zip(stamps(parameters), then, strict=True)):
            continue
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        wide = [torch.view_as_real(p.resolve_conj()) if p.is_complex() else p for p in parts]
        wide = [p.float() if p.dtype in (torch.float16, torch.bfloat16) else p for p in wide]
        mean = sum(wide[1:], wide[0]) * (1 / len(nets))
        for p in parameters:
            p.grad = (torch.view_as_complex(mean) if p.is_complex() else mean.to(p.dtype)).clone()


def plain(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Row by row in memory, with no sign or conjugation still to be applied; a copy."""
    if grad is None or grad.is_sparse:
        return grad if grad is None else grad.clone()
    return grad.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def train(program: Program, wrap: Callable[..., nn.Module] | None) -> list[tuple[str, torch.Tensor | None]]:
    """All losses and gradients of this rank, and its last parameters and buffers. Without `wrap`: the plain loop."""
    own, everyone = syncengine.rank(), range(syncengine.world_size())
    models: dict[int, nn.Module] = {}
    for rank in everyone if wrap is None else [own]:  # rank 0's is everybody's
        torch.manual_seed(program.number + (0 if wrap is None else rank))
        models[rank] = Net(program) if wrap is None else wrap(Net(program), **program.options)
    if wrap is not None and program.hook:
        models[own].register_comm_hook(None, HOOKS[program.hook])
    optimizers = {rank: OPTIMIZERS[program.optimizer](model.parameters()) for rank, model in models.items()}
    found: list[tuple[str, torch.Tensor | None]] = []
    held: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []  # gradients that nobody adds to any more
    for number, step in enumerate(program.steps):
        before = [stamps(model.parameters()) for model in models.values()]
        for rank, model in models.items():
            losses = run_step(model, program, number, rank)
            if rank == own and not step.fails:
                found += [(f"loss {i} of step {number}", loss) for i, loss in enumerate(losses)]
        if wrap is None and not step.fails:
            average(list(models.values()), before)
        elif wrap is None and set(step.fails) != {"forward"}:  # else what was accumulated stays (docs/errors.md)
            for model in models.values():
                model.zero_grad()
        for name, p in getattr(models[own], "module", models[own]).named_parameters():
            found.append((f"gradient of {name} in step {number}", plain(p.grad)))
        for rank, model in models.items():
            if step.clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if step.optimizes:
                optimizers[rank].step()
            if step.zero == "none" and rank == own:
                held += [(p.grad, plain(p.grad)) for p in model.parameters()]
            if step.zero != "kept":
                optimizers[rank].zero_grad(set_to_none=step.zero == "none")
            if step.copies:
                models[rank] = copy.deepcopy(model)
                earlier, optimizers[rank] = optimizers[rank], OPTIMIZERS[program.optimizer](models[rank].parameters())
                optimizers[rank].load_state_dict(earlier.state_dict())
    assert wrap is not syncengine.Parallel or all(same_bits(plain(grad), then) for grad, then in held)
    net = getattr(models[own], "module", models[own])
    return found + [(name, t.detach().clone()) for name, t in [*net.named_parameters(), *net.named_buffers()]]


def difference(program: Program, reference: Callable[..., nn.Module] | None) -> str:
    pairs = zip(train(program, syncengine.Parallel), train(program, reference), strict=True)
    return next((name for (name, a), (_, b) in pairs if not same_bits(signed(a), signed(b))), "")


def signed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor with one kind of NaN: which one a sum has depends on its order, also for two summands."""
    if tensor is None or tensor.is_sparse or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    # A complex tensor's zeros are positive, too: torch multiplies them by a number with a zero.
    return (tensor + 0 if tensor.is_complex() else tensor).masked_fill(tensor.isnan(), torch.nan)


def differences(first: int, ddp: bool, loop: bool, fails: bool = True, count: int = CHUNK) -> list[str]:
    """Of these programs, those that have other bits than the references."""
    wrong = []
    for number in range(first, first + count):
        program = draw(number, syncengine.world_size(), fails)
        references = [DistributedDataParallel] * (ddp and program.is_ddps)
        references += [None] * (loop and program.is_the_loops and (ddp or not program.hook))
        for reference in references:
            try:
                where = difference(program, reference)
            except Exception as error:
                raise AssertionError(f"{program} beside {reference or 'a loop'}") from error
            if where and not (reference and program.is_the_loops and is_no_average(program)):
                wrong.append(f"{where}, beside {reference or 'a loop'}: {program}")
    return wrong


def is_no_average(program: Program) -> bool:
    """Whether DDP leaves other values than the loop, by more than rounding: such a DDP is no reference."""
    values = zip(train(program, DistributedDataParallel), train(program, None), strict=True)
    pairs = ((a.to_dense(), b.to_dense()) for (_, a), (_, b) in values if a is not None and b is not None)
    return not all(torch.allclose(a, b, rtol=0.05, equal_nan=True) for a, b in pairs)


def numbers(kind: int, chunks: int) -> list[int]:
    """Where chunks begin."""
    return [100_000 * kind + 1_000_000 * COUNT + CHUNK * chunk for chunk in range(COUNT or chunks)]


@pytest.mark.thorough
@pytest.mark.parametrize("first", mostly_nightly(numbers(0, 10), 0))
@run_on_ranks(gloo=True)
def test_programs_of_two_ranks(first: int):
    return differences(first, True, True)


@pytest.mark.thorough
@pytest.mark.parametrize("first", mostly_nightly(numbers(1, 4), 0))
@run_on_ranks(world=3, gloo=True, settings={"numerics": "ring"})
def test_programs_of_three_ranks_in_ring(first: int):
    return differences(first, True, False)


@pytest.mark.thorough
@pytest.mark.parametrize("first", mostly_nightly(numbers(2, 3), 0))
@run_on_ranks(gloo=True)
def test_programs_with_flat_buckets(first: int):
    return flat(differences, first, True, True, False)


@pytest.mark.thorough
@pytest.mark.parametrize(("hosts", "first"), mostly_nightly(zip(cycle(HOSTS), numbers(3, 4), strict=False), 2))
@run_on_ranks()
def test_programs_on_hosts(hosts: str, first: int):
    return differences(first, False, True)


def test_the_grammar_draws_everything():
    """Guards the tests above."""
    programs = [draw(number) for number in range(10 * CHUNK)]
    steps = [step for program in programs for step in program.steps]
    assert {name for program in programs for name in program.layers} == {*ORDINARY, *SPECIAL}
    assert {name for program in programs for name in program.options} >= {"static_graph", "gradient_as_bucket_view"}
    assert {program.output for program in programs} == {*OUTPUTS}
    assert {program.optimizer for program in programs} == {*OPTIMIZERS}
    assert {place for step in steps for place in step.fails} == {"", *PLACES}
    assert {step.calls for step in steps} == {"", *CALLS}
    assert {step.backward for step in steps} == {"", *BACKWARDS}
    assert {step.before for step in steps} == {"", "pending", "grad", *BEFORE}
    assert {step.copies for step in steps} == {False, True}
    assert {step.penalty for step in steps} == {"", "input", "weights"}
    assert any(program.hook and "find_unused_parameters" in program.options for program in programs)
    assert sum(program.is_ddps for program in programs) > 2 * CHUNK < sum(program.is_the_loops for program in programs)
