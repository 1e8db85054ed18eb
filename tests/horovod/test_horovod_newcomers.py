"""Parameters that a DistributedOptimizer gets later: unfrozen ones, and added ones."""

import pytest
import torch
from horovod_ranks import run_with_hvd
from test_horovod_optimizer import CASES, average, loss_of, make_model, of_ranks
from torch import nn

import syncengine.horovod as hvd
from syncengine.errors import InvalidUsage, Mismatch


def freeze(model: nn.Module, *layers: int) -> None:
    for i, layer in enumerate(model):
        layer.requires_grad_(i not in layers)


def sgd(model: nn.Module, *layers: int, **options: object) -> torch.optim.Optimizer:
    """With the parameters of these layers of `model`; all of them if none are named."""
    parameters = [p for i in layers or range(len(model)) for p in model[i].parameters()]
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), model.named_parameters(), **options)


@pytest.mark.parametrize(
    ("case", "passes", "world"), [("average", 2, 3), ("sum", 1, 2), ("fp16", 1, 2), ("groups", 1, 2)]
)
@run_with_hvd()
def test_gradual_unfreezing(case: str, passes: int, world: int):
    """From the last layer to the first: frozen, then added by the optimizer, by its base, or by hand."""
    options, oracle = CASES[case]
    model = make_model()
    layers = [4, 2, 0]
    freeze(model, 2, 0)
    base = torch.optim.SGD([*model[4].parameters(), *model[2].parameters()], lr=0.1)
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), backward_passes_per_step=passes, **options)
    for step in range(8):
        if step == 2:
            model[2].requires_grad_(True)
        if step == 4:
            model[0].weight.requires_grad_(True)
            (optimizer if passes == 1 else base).add_param_group({"params": [model[0].weight], "lr": 0.2})
        if step == 6:
            model[0].bias.requires_grad_(True)
            optimizer.param_groups[1]["params"].append(model[0].bias)
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        steps = [10 * step + i for i in range(passes)]
        found = of_ranks(model, *steps)
        expected = {name: oracle(of) for (name, _), of in zip(model.named_parameters(), found, strict=True)}
        for one in steps:
            loss_of(model, one).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, expected[name]) if name in names else p.grad is None, (step, name)
        optimizer.zero_grad()
    assert len(names) == 2 * len(layers)


@run_with_hvd(settings={"timeout": 60.0})
def test_a_rank_where_parameters_stay_frozen_is_named():
    model = make_model()
    freeze(model, 0)
    optimizer = sgd(model)
    called = r"add_param_group or requires_grad_ of SGD, 0.weight: float32 \(300, 24\), 0.bias"
    with pytest.raises(Mismatch, match=rf"rank 0 called {called}.*rank 1 called step of SGD"):
        for step in range(3):
            if step == 1 and hvd.rank() == 0:
                model[0].requires_grad_(True)
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("joined_before", [True, False])
@run_with_hvd(settings={"timeout": 60.0})
def test_unfreezing_beside_join(joined_before: bool):
    """A rank that joins after it has all of them serves them, too."""
    model = make_model()
    freeze(model, 0)
    optimizer = sgd(model)

    def train() -> None:
        for step in range(3):
            if hvd.rank() == 1 and step == (1 if joined_before else 2):
                break
            if step == 1:
                model[0].requires_grad_(True)
            found = of_ranks(model, step)
            expected = [average([own, torch.zeros_like(own) if step == 2 else other]) for own, other in found]
            loss_of(model, step).backward()
            optimizer.step()
            for p, wanted in zip(model.parameters(), expected, strict=True):
                assert p.grad is None or torch.equal(p.grad, wanted)
            optimizer.zero_grad()
        hvd.join()

    if not joined_before:
        train()
        return
    says = r"add_param_group or requires_grad_ needs every rank, but rank 1 has called join\(\)"
    with pytest.raises(InvalidUsage, match=says):
        train()


@run_with_hvd()
def test_a_frozen_parameter_that_two_have_is_named_once_it_is_unfrozen():
    model = make_model()
    freeze(model, 2)
    first, second = sgd(model, 0, 2), sgd(model, 4, 2)
    loss_of(model, 0).backward()
    first.step()
    second.step()
    model[2].requires_grad_(True)
    loss_of(model, 1).backward()
    first.step()
    with pytest.raises(InvalidUsage, match="2.weight needs a gradient now, and is a parameter of two"):
        second.step()
