"""What a real model is trained on, and the training itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import syncengine


class Workload:
    """A model, its loss on one batch of this rank, and its optimizer."""

    options: dict[str, Any] = {}  # noqa: RUF012 - of Parallel and DDP
    steps = 3

    def model(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, model: nn.Module, generator: torch.Generator, step: int) -> torch.Tensor:
        """Draws a batch and runs forward."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


@dataclass
class Trained:
    """All that a training computed on this rank."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)  # of all parameters in all steps
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    first_state: dict[str, torch.Tensor] = field(default_factory=dict)

    def difference(self, other: "Trained") -> str:
        """Where the two differ first, in bits; "" if nowhere."""
        if list(self.state) != list(other.state):
            return f"state_dict keys: {set(self.state) ^ set(other.state)}"
        pairs = [
            *((f"loss {i}", a, b) for i, (a, b) in enumerate(zip(self.losses, other.losses, strict=True))),
            *((f"gradient {i}", a, b) for i, (a, b) in enumerate(zip(self.gradients, other.gradients, strict=True))),
            *((f"state {name}", tensor, other.state[name]) for name, tensor in self.state.items()),
        ]
        return next((name for name, a, b in pairs if not same_bits(a, b)), "")

    def moved(self) -> list[str]:
        """Names of what training has changed."""
        return [name for name, tensor in self.state.items() if not torch.equal(tensor, self.first_state[name])]


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.layout is not b.layout or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout is torch.sparse_coo:
        a, b = a.coalesce(), b.coalesce()
        return torch.equal(a.indices(), b.indices()) and same_bits(a.values(), b.values())
    # contiguous() would leave a single element its stride, which view(torch.uint8) refuses if it is not 1.
    dense = (t.clone(memory_format=torch.contiguous_format) for t in (a, b))
    return torch.equal(*(t.view(-1).view(torch.uint8) for t in dense))


def train(wrap: Callable[..., nn.Module], workload: Workload) -> Trained:
    """The same on every call: seeds, batches (different ones per rank) and dropout."""
    torch.manual_seed(3)
    model = wrap(workload.model(), **workload.options)
    optimizer = workload.optimizer(model)
    trained = Trained(first_state={name: t.clone() for name, t in model.state_dict().items()})
    torch.manual_seed(100 + syncengine.rank())  # for dropout
    generator = torch.Generator().manual_seed(1000 + syncengine.rank())
    for step in range(workload.steps):
        optimizer.zero_grad()
        loss = workload.loss(model, generator, step)
        loss.backward()
        trained.losses.append(loss.detach())
        trained.gradients += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    trained.state = model.state_dict()
    return trained
