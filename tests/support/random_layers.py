"""Layers, outputs and optimizers of random programs (tests/parallel/test_random_programs.py): what people train."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

BATCH, WIDTH = 5, 24


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    """``parts`` as attributes, and a forward of them."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.calculate = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.calculate(self, *inputs)


def cast(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    return Layer(lambda self, x: self.layer(x.to(dtype)).to(x.dtype), layer=layer.to(dtype))


class Odd(nn.Module):
    """Tensors without elements, without dimensions and of rare dtypes, as parameters and as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(1 + torch.rand(())), nn.Parameter(torch.zeros(0, WIDTH))
        self.order = nn.Parameter(torch.randperm(4), requires_grad=False)
        self.flags = nn.Parameter(torch.rand(2) > 0.5, requires_grad=False)
        self.register_buffer("missing", None)
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("switch", torch.rand(()) > 0.5)
        self.register_buffer("waves", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("small", torch.randn(3).half())
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.register_buffer("strided", torch.randn(4, 6)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * self.scale + self.hidden.sum(), x @ self.empty.t()], 1)


class Counter(nn.Module):
    """Buffers that its forward changes: in place, and for a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x.detach().sum(0)
            self.steps = self.steps + 1 + (x.detach()[0, 0] > 0).long()  # another number on each rank
        return self.layer(x) * self.steps


def lazy(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Gradients whose memory holds the conjugate, or the negative, on ranks with some batches."""
    waves, imaginary = self.waves, torch.complex(torch.zeros_like(self.imaginary), self.imaginary)
    if x.detach().sum() > 0:
        waves, imaginary = waves.conj(), imaginary.conj()
    result = x * (1 + 1j) * self.always + x * (2 - 1j) * waves + x * imaginary
    return result.real + result.imag


class Delay(torch.autograd.Function):
    """Gives the engine time to write an average before backward goes on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return grad


def views(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Parameters whose gradients autograd makes as views of each other, or of what it still needs."""
    w, a, b = (nn.Parameter(torch.randn(shape) / 5) for shape in ((WIDTH, WIDTH), BATCH * WIDTH, BATCH * WIDTH))
    return Layer(forward, w=w, a=a, b=b)


VIEWS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "added": lambda m, x: Delay.apply(x @ m.w) + m.a.view_as(x) + (x @ m.w + m.b.view_as(x)),
    "concatenated": lambda m, x: x + torch.cat([m.a, m.b]).view(2, *x.shape).sum(0) @ Delay.apply(m.w),
    "stacked": lambda m, x: torch.stack([m.a.view_as(x), m.b.view_as(x), Delay.apply(x @ m.w)]).sum(0),
    "expanded": lambda m, x: m.a[:WIDTH].expand_as(x) + Delay.apply(x @ m.w) + m.b[:1].expand_as(x),
    "tied": lambda m, x: x @ m.w @ Delay.apply(m.w.t()) + m.a.view_as(x) + m.a.view_as(x) * m.b.view_as(x),
    "sliced": lambda m, x: Delay.apply(x @ m.w) + m.a.view(WIDTH, BATCH).t() + m.b.view_as(x).flip(0),
}


class Table(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, WIDTH, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows((x.detach().abs() * 10).long().clamp(0, 10)[:, :3]).mean(1)


def nested(outer: bool, inner: bool) -> nn.Module:
    """A checkpoint inside a checkpoint, and one beside them; whether they are reentrant."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers

        def part(x: torch.Tensor) -> torch.Tensor:
            return third(checkpoint(second, first(x), use_reentrant=inner).tanh())

        return checkpoint(fourth, checkpoint(part, x, use_reentrant=outer).tanh(), use_reentrant=outer)

    return Layer(forward, layers=nn.ModuleList(linear() for _ in range(4)))


def repeated(self: Any, x: torch.Tensor) -> torch.Tensor:
    """One layer in three reentrant checkpoints, another in two."""
    for layer in (self.one, self.other, self.one, self.other, self.one):
        x = checkpoint(layer, x, use_reentrant=True).tanh()
    return x


def save_products(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    saves = operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def selective(self: Any, x: torch.Tensor) -> torch.Tensor:
    contexts = partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint(self.layer, x, use_reentrant=False, context_fn=contexts)


class Branch(nn.Module):
    """Uses one or the other; `never` is for nothing."""

    left = True

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.never = (linear() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one if self.left else self.other)(x)


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 3000), nn.ReLU(), nn.Linear(3000, WIDTH)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "position": lambda: Layer(lambda self, x: x + self.row, row=nn.Parameter(torch.randn(1, WIDTH))),
    "odd": Odd,
    "double": lambda: cast(linear(), torch.float64),
    "bfloat16": lambda: cast(linear(), torch.bfloat16),
    "complex": lambda: Layer(
        lambda self, x: (x.to(torch.complex64) @ self.weight).real,
        weight=nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 5),
    ),
    "lazy": lambda: Layer(
        lazy,
        waves=nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)),
        always=nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)),
        imaginary=nn.Parameter(torch.randn(1)),
    ),
    "table": lambda: Table(False),
    "checkpoint": lambda: nested(False, False),
    "segments": lambda: Layer(
        lambda self, x: checkpoint_sequential(self.layers, 2, x, use_reentrant=False),
        layers=nn.Sequential(linear(), linear(), linear()),
    ),
    "selective": lambda: Layer(selective, layer=linear()),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "old weight norm": lambda: nn.utils.weight_norm(linear()),
    "pruned": lambda: prune.l1_unstructured(linear(), "weight", amount=0.5),
    "channels last": lambda: Layer(
        lambda self, x: self.layer(x.view(-1, 2, 3, 4)).flatten(1),
        layer=nn.Conv2d(2, 6, (2, 3)).to(memory_format=torch.channels_last),
    ),
}
UNUSED = "branch"
REENTRANT: dict[str, Callable[[], nn.Module]] = {
    "reentrant": lambda: nested(True, True),
    "reentrant around": lambda: nested(True, False),
    "reentrant within": lambda: nested(False, True),
}
# Buffers that a forward changes: of DDP's ranks rank 0's are right.
BUFFERED: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "counter": Counter,
}
SPECIAL: dict[str, Callable[[], nn.Module]] = {
    **{f"views {name}": partial(views, forward) for name, forward in VIEWS.items()},
    **BUFFERED,
    **REENTRANT,
    UNUSED: Branch,
    "sparse table": lambda: Table(True),
    "repeated": lambda: Layer(repeated, one=linear(), other=linear(), never=linear()),
}
# Those with a computed tensor as an attribute: it can't be copied, and autocast keeps its cast.
FIXED = {"old weight norm", "pruned"}


def make_layer(name: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old ones are deprecated
        return {**ORDINARY, **SPECIAL}[name]()


class Pair(NamedTuple):
    first: torch.Tensor
    rest: Any


@dataclass(frozen=True)
class Record:
    named: Pair
    more: dict[str, Any]
    nothing: None = None


# What a module returns for its input, its result and one that is not used (or None), and what a program takes of that.
Make = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Any]
OUTPUTS: dict[str, tuple[Make, Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda x, out, spare: out, lambda out: out),
    "dict": (lambda x, out, spare: {"a": out, "more": [spare, "text"]}, lambda out: out["a"]),
    "named": (lambda x, out, spare: Pair(out, (out[:, 1:], spare)), lambda out: out.first),
    "record": (
        lambda x, out, spare: Record(Pair(out, [spare, "text"]), {"c": (out[1:], 3), "none": None}),
        lambda out: out.named.first,
    ),
    "twice": (lambda x, out, spare: [out, out, spare], lambda out: out[1]),
    "input": (lambda x, out, spare: (x, out), lambda out: out[1] + out[0].square().sum()),
    "detached": (lambda x, out, spare: (out.detach(), out, spare), lambda out: out[1]),
    "in place": (lambda x, out, spare: {"a": out, "b": spare}, lambda out: out["a"].mul_(2)),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "maximize": partial(torch.optim.SGD, lr=0.05, maximize=True, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, foreach=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
}
