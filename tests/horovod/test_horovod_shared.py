"""Large gradients whose memory autograd still reads, or two parameters share, under hvd.DistributedOptimizer."""

import pytest
import torch
from horovod_ranks import run_with_hvd
from torch import nn

import syncengine.horovod as hvd
from syncengine._C import note_incoming, owns_gradient

SIDE = 512  # 1 MiB: a gradient that goes alone


class Positions(nn.Module):
    """`at.grad` is a view of the tensor from which `weight.grad` is still to be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIDE, SIDE))
        self.at = nn.Parameter(torch.zeros(SIDE * SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.at.view(SIDE, SIDE)


class SumOfViews(nn.Module):
    """Both gradients lie in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(SIDE * SIDE))
        self.b = nn.Parameter(torch.zeros(SIDE * SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a.view(SIDE, SIDE) + self.b.view(SIDE, SIDE)) * x


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    """Of small integers, so that sums are exact in any order."""
    x = torch.randint(-3, 4, (SIDE, SIDE), generator=torch.Generator().manual_seed(rank)).float()
    return (model(x) * (1.0 + rank)).sum()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 4.0}, {"op": hvd.Sum}])
@pytest.mark.parametrize("make", [Positions, SumOfViews])
@run_with_hvd()
def test_memory_that_is_not_of_one_gradient_alone(make: type[nn.Module], options: dict[str, object], passes: int):
    model = make()
    parameters = list(model.parameters())
    base = torch.optim.SGD(parameters, lr=0.1)
    optimizer = hvd.DistributedOptimizer(base, backward_passes_per_step=passes, **options)
    of_ranks = [torch.autograd.grad(loss(model, rank), parameters) for rank in range(hvd.size())]
    divisor = 1 if options.get("op") is hvd.Sum else hvd.size()
    expected = [torch.stack(of_parameter).sum(0) / divisor for of_parameter in zip(*of_ranks, strict=True)]
    for _ in range(3):
        loss(model, hvd.rank()).backward()
        optimizer.synchronize()  # which brings the gradients itself where more passes were to come
        assert all(torch.equal(p.grad, e) for p, e in zip(parameters, expected, strict=True))
        optimizer.zero_grad()


def owned(model: nn.Module, passes: int = 1) -> dict[str, bool]:
    """Of each parameter: whether `.grad` owns its memory in its hook, and all do when backward has ended."""
    found = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: found.update({name: owns_gradient(p)}))
    note_incoming(list(model.parameters()))
    for _ in range(passes):
        loss(model, 0).backward()
    return found


def test_what_a_gradient_owns():
    """Or else the copy would be made always."""
    assert owned(nn.Linear(SIDE, SIDE)) == {"weight": True, "bias": True}
    assert owned(nn.Linear(SIDE, SIDE), passes=2) == {"weight": True, "bias": True}
    model = Positions()
    assert owned(model) == {"weight": True, "at": False}
    assert owns_gradient(model.at)  # nobody reads it any more
    model = SumOfViews()
    assert owned(model) == {"a": False, "b": False}
    assert not owns_gradient(model.a)
    model.a.grad = None
    assert owns_gradient(model.b)


def test_what_others_hold_is_not_owned():
    model = nn.Linear(SIDE, SIDE)
    seen = []
    model.weight.register_hook(lambda gradient: seen.append(gradient.view(-1)))
    assert owned(model) == {"weight": False, "bias": True}
    model.zero_grad(set_to_none=False)
    assert owned(model) == {"weight": False, "bias": True}  # accumulated in the memory that is seen
    seen.clear()
    assert owned(model) == {"weight": True, "bias": True}  # what is seen now lies elsewhere
