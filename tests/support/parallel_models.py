"""Models and training loops that the tests of Parallel share. Every function here runs inside rank processes."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from models.workload import same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import syncengine

Wrap = Callable[..., nn.Module]

CAP = {"bucket_cap_mb": 1e-6}  # one bucket a parameter


class Mlp(nn.Module):
    """About 0.7 million parameters in layers of very different sizes: several buckets once they are rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(24, 600),
            nn.ReLU(),
            nn.Linear(600, 600),
            nn.ReLU(),
            nn.LayerNorm(600),
            nn.Linear(600, 500),
            nn.Tanh(),
        )
        self.head = nn.Linear(500, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


class Conv(nn.Module):
    """Buffers (BatchNorm) and a channels_last parameter layout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3)).to(
            memory_format=torch.channels_last
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.view(-1, 3, 4, 2).repeat(1, 1, 2, 4)).mean((2, 3))


class Tied(nn.Module):
    """One weight used twice, a position table added to activations (its gradient shares memory with others)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 24)
        self.positions = nn.Parameter(torch.randn(1, 24))
        self.mix = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 10).long().clamp(max=10)[:, :5]
        hidden = self.mix(self.embedding(tokens).mean(1) + self.positions)
        return nn.functional.linear(hidden, self.embedding.weight)


class Mixed(nn.Module):
    """Parameters of three dtypes: several buckets fill at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 30).double()
        self.third = nn.Linear(30, 9).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).double()).bfloat16())


class Waves(nn.Module):
    """Parameters that are complex, and that have no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 40), nn.Linear(40, 9)
        self.waves = nn.Parameter(torch.randn(40, dtype=torch.complex64))
        self.gain, self.turn = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor(0.6 + 0.8j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x) * self.waves * self.turn).real * self.gain)


class Branches(nn.Module):
    """Uses one branch or the other; `never` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.never = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(self.stem(x))


class AllBranches(Branches):
    """Uses all, or all but one branch."""

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return super().forward(x, True) + (super().forward(x, False) if both else 0) + self.never(x)


class Opposite(nn.Module):
    """Gradients become ready in the opposite order on odd ranks."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(24, 24) for _ in range(parts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = list(self.parts)[:: 1 if syncengine.rank() % 2 else -1]
        return torch.stack([part(x) for part in order])


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": Mlp, "conv": Conv, "tied": Tied, "mixed": Mixed, "waves": Waves}


@dataclass(frozen=True)
class Run:
    """One training run, the same for every way to wrap the model."""

    model: str = "mlp"
    dtype: torch.dtype | None = torch.float32  # None: as the model is made
    optimizer: str = "sgd"
    steps: int = 4
    accumulate: int = 1  # backwards per step, all but the last under no_sync
    set_to_none: bool = True
    batch: int = 6
    options: tuple[tuple[str, Any], ...] = ()


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(wrap: Wrap, run: Run) -> list[torch.Tensor]:
    """Trains from a fixed seed; returns all gradients of all steps, and the final parameters and buffers."""
    torch.manual_seed(7)
    module = MODELS[run.model]()
    model = wrap(module.to(run.dtype) if run.dtype else module, **dict(run.options))
    optimizer = make_optimizer(run.optimizer, model)
    data = torch.Generator().manual_seed(1000 + syncengine.rank())
    history: list[torch.Tensor] = []
    for _ in range(run.steps):
        for micro in range(run.accumulate):
            batch = torch.randn(run.batch, 24, generator=data).to(run.dtype or torch.float32)
            if micro < run.accumulate - 1:
                with model.no_sync():
                    model(batch).float().square().mean().backward()
            else:
                model(batch).float().square().mean().backward()
        history += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=run.set_to_none)
    return history + [t.detach().clone() for t in model.state_dict().values()]


def different_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> int:
    """How many bytes differ."""
    assert len(ours) == len(theirs)
    as_bytes = ([t.contiguous().view(-1).view(torch.uint8) for t in tensors] for tensors in (ours, theirs))
    return sum(int((a != b).sum()) for a, b in zip(*as_bytes, strict=True))


def data(step: int = 0, rank: int | None = None) -> torch.Tensor:
    """A batch of this rank's own, or of another's."""
    rank = syncengine.rank() if rank is None else rank
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]


def average(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that the engine knows nothing of."""
    syncengine.all_reduce(bucket.buffer(), "avg")
    return syncengine.hooks.completed(bucket.buffer())


def averages(module: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """By nothing but autograd and torch's all-reduce; a rank that does not use a parameter counts as zeros."""
    found = [grad.clone() for grad in torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True)]
    for gradient in found:
        dist.all_reduce(gradient)
    return [gradient / dist.get_world_size() for gradient in found]


def assert_averages(
    model: nn.Module, plain: torch.Tensor, loss: Callable[[Any], torch.Tensor], *inputs: torch.Tensor
) -> None:
    """A backward through the wrapper leaves the averages of the gradients that the plain module's loss has."""
    expected = averages(model.module, plain)
    model.zero_grad()
    loss(model(*inputs)).backward()
    assert not different_bits(gradients(model), expected)


def assert_averaged(module: nn.Module, loss: torch.Tensor) -> None:
    """The gradients are the averages of those of `loss`, which each rank has made past the wrapper."""
    for gradient, expected in zip(gradients(module), averages(module, loss), strict=True):
        torch.testing.assert_close(gradient, expected)


def flat_gradients(module: nn.Module) -> torch.Tensor:
    """Zeros, of which each parameter's `.grad` is a view."""
    flat = torch.zeros(sum(p.numel() for p in module.parameters()))
    for parameter, part in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def of_both(step: Callable[[nn.Module], Any], make: Callable[[], nn.Module] = Mlp, **options: Any) -> list[Any]:
    """What `step` gives for Parallel and for DDP."""
    results = []
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        torch.manual_seed(0)
        results.append(step(wrap(make(), **options)))
    return results


def both(make: Callable[[], nn.Module], step: Callable[[nn.Module], Any], **options: Any) -> list[torch.Tensor]:
    """`step` has the same bits with Parallel and with DDP: what it returns, the gradients and the state that it leaves.

    Returns the tensors that our `step` returned, in a row.
    """

    def left(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor | None], dict[str, Any]]:
        returned = [leaf for leaf in tree_leaves(step(model)) if isinstance(leaf, torch.Tensor)]
        return returned, gradients(model), copy.deepcopy(model.state_dict())

    (ours, our_gradients, our_state), (theirs, their_gradients, their_state) = of_both(left, make, **options)
    assert list(our_state) == list(their_state)
    for name, mine, other in [
        *((f"result {i}", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))),
        *((f"gradient {i}", a, b) for i, (a, b) in enumerate(zip(our_gradients, their_gradients, strict=True))),
        *((name, our_state[name], value) for name, value in their_state.items() if isinstance(value, torch.Tensor)),
    ]:
        assert same_bits(mine, other), name
    return ours


def small() -> nn.Module:
    """Two layers that take `data`."""
    return nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))


def backwards(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Plain steps without an optimizer, as many as the buckets need to settle; returns the losses."""
    losses = []
    for i in range(steps):
        model.zero_grad()
        losses.append(model(data(i)).square().mean())
        losses[-1].backward()
    return losses


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """("returned", what) or (the error's type, its text)."""
    try:
        return "returned", str(call())
    except Exception as error:
        return type(error).__name__, str(error)


def trained(module: nn.Module, steps: int = 3, **options: Any) -> syncengine.Parallel:
    """The wrapped module after some steps."""
    model = syncengine.Parallel(module, **options)
    backwards(model, steps)
    return model


def warned_of(text: str, call: Callable[[], Any]) -> list[str]:
    """The warnings that `call` gives with this text in them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if text in str(warning.message)]
