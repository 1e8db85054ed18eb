"""Errors in the middle of training: every rank gets one with a name, soon, and no gradient is half averaged."""

import time

import pytest
import torch
from faults import wait_for_failure
from marks import mostly_nightly
from parallel_models import CAP, Mlp, assert_averaged, backwards, data
from pool import run_on_ranks
from raising_model import InBackward
from torch import nn

import syncengine
from syncengine.errors import Aborted, InvalidUsage, Mismatch, SyncError, Timeout

LATER = 1.0  # seconds until all ranks have come as far


@pytest.mark.thorough
@pytest.mark.usefixtures("kinds_of_buckets")
@pytest.mark.parametrize(
    ("world", "part"), mostly_nightly([(2, "layers"), (3, "layers"), (8, "layers"), (2, "head")], 1)
)
@run_on_ranks(gloo=True)
def test_an_error_in_backward_reaches_all_ranks(world: int, part: str):
    """Behind this part's outputs: in the middle, or before the first gradient of a parameter."""
    torch.manual_seed(0)
    module = Mlp()
    model = syncengine.Parallel(module, **CAP)

    def act() -> None:
        if syncengine.rank() == 1:
            time.sleep(LATER)
            raise KeyError("the batch is bad")

    hook = module.get_submodule(part).register_forward_hook(lambda part, inputs, out: InBackward.apply(out, act))
    loss = model(data()).square().sum()
    kind, text = (KeyError, "the batch is bad") if syncengine.rank() == 1 else (Aborted, "rank 1: backward aborted")
    with pytest.raises(kind, match=text):
        loss.backward()
    assert all(p.grad is None for p in module.parameters())
    hook.remove()
    model(data()).square().sum().backward()
    assert_averaged(module, module(data()).square().sum())


@pytest.mark.thorough
@run_on_ranks(world=3)
def test_an_error_in_forward_reaches_all_ranks():
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no such token: {x.shape}")

    model = syncengine.Parallel(Mlp())
    if syncengine.rank() == 1:
        model.module.forward = forward
        with torch.no_grad(), pytest.raises(ValueError, match="no such token"):
            model(data())  # evaluation concerns nobody else
    syncengine.barrier()
    if syncengine.rank() == 1:
        time.sleep(LATER)
    kind, prefix = (ValueError, "^") if syncengine.rank() == 1 else (Aborted, "rank 1 raised in forward: ValueError: ")
    with pytest.raises(kind, match=rf"{prefix}no such token: torch.Size\(\[5, 24\]\)"):
        model(data()).sum().backward()


class Halves(nn.Module):
    """One half is always used, behind these other modules."""

    def __init__(self, *before: nn.Module) -> None:
        super().__init__()
        self.before = nn.Sequential(*before)
        self.always, self.sometimes = nn.Linear(24, 2), nn.Linear(24, 2)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        x = self.before(x)
        return self.always(x) + (self.sometimes(x) if both else 0)


@pytest.mark.parametrize("forgetful", [[0], [1], [0, 1], [0, 2]], ids=str)
@run_on_ranks(world=3, gloo=True)
def test_unfinished_reduction_names_the_parameters(forgetful: list[int]):
    """An unfinished reduction costs all ranks that step, and the next ones have averages."""
    other = syncengine.Parallel(Mlp())
    model = syncengine.Parallel(Halves(nn.Linear(24, 24).requires_grad_(False)))
    trained = nn.ModuleList([model.module.always, model.module.sometimes])
    forgets = syncengine.rank() in forgetful
    for later in (0, LATER / 4):  # the second time, the others wait in backward by then
        if forgets:
            model(data(), both=False).sum().backward()
            time.sleep(later)
        with pytest.raises(InvalidUsage if forgets else Aborted) as error:
            model(data()) if forgets else model(data()).sum().backward()
        (text,) = error.value.args
        assert "Expected to have finished reduction in the prior iteration before starting a new one" in text
        assert error.type is (InvalidUsage if forgets else Aborted)
        culprit = syncengine.rank() if forgets else next(rank for rank in forgetful if f"for rank {rank}: " in text)
        # Lightning replaces the line with the indices.
        assert f"Parameter indices which did not receive grad for rank {culprit}: 2 3\n" in text
        assert f"Parameters which did not receive grad for rank {culprit}: sometimes.weight, sometimes.bias" in text
        other(data()).sum().backward()  # the other model is not disturbed
        model.zero_grad()
        model(data()).sum().backward()
        assert_averaged(trained, model.module(data()).sum())
    syncengine.barrier()


@pytest.mark.thorough
@run_on_ranks(settings={"timeout": 2.0})
def test_a_missing_backward_names_bucket_and_parameters():
    model = syncengine.Parallel(Mlp())
    loss = model(data()).sum()
    if syncengine.rank() == 1:
        wait_for_failure()
        return
    with pytest.raises(Timeout, match="rank 1") as error:
        loss.backward()
    assert "bucket 0 of Parallel(Mlp) (head.bias, head.weight, layers.5.bias, ...)" in str(error.value)


@run_on_ranks()
def test_different_buckets_are_a_mismatch():
    model = syncengine.Parallel(Mlp(), init_sync=False, bucket_cap_mb=[100.0, 0.1][syncengine.rank()])
    with pytest.raises(Mismatch, match=r"bucket 0 of Parallel\(Mlp\)"):
        model(data()).sum().backward()


@run_on_ranks()
def test_removed_hooks_end_that_wrapper():
    """The others hear of that, too; but local backwards go on."""
    model = syncengine.Parallel(nn.Linear(24, 2))
    backwards(model, 5)
    if syncengine.rank() == 1:
        model._remove_autograd_hooks()
    model.zero_grad()
    with model.no_sync():
        model(torch.full((1, 24), 1.0 + syncengine.rank())).sum().backward()
    assert model.module.weight.grad.unique().tolist() == [1.0 + syncengine.rank()]
    own = "" if syncengine.rank() == 1 else "rank 1: "
    for _ in range(2):
        with pytest.raises(SyncError, match=rf"{own}the hooks of Parallel\(Linear\) were removed"):
            model(data()).sum().backward()
    again = syncengine.Parallel(model.module)
    again(data()).sum().backward()
    syncengine.barrier()


@run_on_ranks()
def test_a_step_that_is_lost_behind_its_last_gradient_is_an_error():
    """All hooks have fired by then: the end of the backward alone can tell."""
    model = syncengine.Parallel(nn.Linear(24, 2))
    model(data()).sum().backward()
    inputs = data().requires_grad_() * 1
    inputs.register_hook(lambda _: model._remove_autograd_hooks())
    with pytest.raises(SyncError, match=r"the hooks of Parallel\(Linear\) were removed"):
        model(inputs).sum().backward()
    assert model.module.weight.grad is None
    syncengine.barrier()
