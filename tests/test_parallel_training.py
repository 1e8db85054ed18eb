"""The ways people train, each with the bits of DDP: checkpointing, autograd in its corners, optimizers, odd modules."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from parallel_models import CAP, Conv, Mlp, both, data, gradients
from pool import RankPool, run_on_ranks
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import syncengine
from syncengine.errors import SyncError

Step = Callable[[nn.Module], Any]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))


def backwards(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Plain steps; as many as the buckets need to settle."""
    losses = []
    for i in range(steps):
        model.zero_grad()
        losses.append(model(data(i)).square().mean())
        losses[-1].backward()
    return losses


# --- Activation checkpointing


class Nested(nn.Module):
    """A checkpoint inside a checkpoint, and one beside them."""

    def __init__(self, outer: bool, inner: bool) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner  # whether they are reentrant
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.layers

        def part(x: torch.Tensor) -> torch.Tensor:
            return layers[2](checkpoint(layers[1], layers[0](x), use_reentrant=self.inner).tanh())

        x = checkpoint(part, x.requires_grad_(), use_reentrant=self.outer).tanh()
        return layers[4](checkpoint(layers[3], x, use_reentrant=self.outer))


@run_on_ranks(gloo=True)
def test_nested_checkpoints():
    for outer in (True, False):
        for inner in (True, False):
            both(partial(Nested, outer, inner), backwards, **CAP)
            both(partial(Nested, outer, inner), backwards)


class Segments(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(self, 3, x, use_reentrant=False)


class Selective(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            save = operation is torch.ops.aten.addmm.default
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


@run_on_ranks(gloo=True)
def test_sequential_and_selective_checkpoints():
    both(lambda: Segments(*(nn.Linear(24, 24) for _ in range(7))), backwards, **CAP)
    both(Selective, backwards, **CAP)
    both(Selective, backwards, find_unused_parameters=True)


@run_on_ranks(gloo=True)
def test_a_checkpoint_around_the_wrapper():
    def step(model: nn.Module, reentrant: bool) -> None:
        for i in range(3):
            model.zero_grad()
            checkpoint(model, data(i).requires_grad_(), use_reentrant=reentrant).square().sum().backward()

    for reentrant in (True, False):
        both(Mlp, partial(step, reentrant=reentrant))
    both(Mlp, partial(step, reentrant=False), find_unused_parameters=True)


@run_on_ranks(gloo=True)
def test_checkpoints_and_accumulation():
    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            with model.no_sync():
                model(data(i)).sum().backward()
            model(data(i + 5)).square().sum().backward()

    for reentrant in (True, False):
        both(partial(Nested, reentrant, reentrant), step)


# --- Autograd's corners


@run_on_ranks(gloo=True)
def test_higher_order_gradients():
    def penalty_on_inputs(model: nn.Module, with_loss: bool) -> None:
        for i in range(3):
            model.zero_grad()
            x = data(i).requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            (penalty + out.square().mean() if with_loss else penalty).backward()

    def penalty_on_gradients(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            loss = model(data(i)).square().sum()
            slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + sum(s.square().sum() for s in slopes)).backward()

    def hessian_times_vector(model: nn.Module) -> tuple[torch.Tensor, ...]:
        loss = model(data()).square().sum()
        parameters = list(model.parameters())
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(slopes, parameters, [torch.ones_like(s) for s in slopes])

    both(Mlp, partial(penalty_on_inputs, with_loss=True))
    both(Mlp, partial(penalty_on_inputs, with_loss=False))
    both(small, penalty_on_gradients, **CAP)
    both(small, hessian_times_vector)


@run_on_ranks()
def test_gradients_keep_their_graph_on_this_rank():
    """With create_graph=True the average has this rank's own graph: DDP fails in such a backward."""
    torch.manual_seed(0)
    model = syncengine.Parallel(small())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about reference cycles
        with model.no_sync():
            model(data()).square().sum().backward(create_graph=True)
    slopes = [p.grad for p in model.parameters()]
    model.zero_grad()
    (model(data(1)).sum() + sum(s.square().sum() for s in slopes)).backward()
    everyone = torch.empty(2, 24, 24)
    for layer in (model.module[0], model.module[2]):
        syncengine.all_gather(everyone, layer.weight.grad)
        assert torch.equal(everyone[0], everyone[1])


@run_on_ranks(gloo=True)
def test_a_retained_graph():
    def under_no_sync(model: nn.Module) -> None:
        with model.no_sync():
            out = model(data(1))
            out.sum().backward(retain_graph=True)
            out.square().sum().backward()
        model(data(2)).sum().backward()

    def looked_at_later(model: nn.Module) -> tuple[torch.Tensor, ...]:
        x = data().requires_grad_()
        out = model(x)
        out.square().sum().backward(retain_graph=True)
        return torch.autograd.grad(out.sum(), [x, *model.parameters()])

    both(Mlp, under_no_sync)
    both(Mlp, looked_at_later)


@run_on_ranks(gloo=True)
def test_backward_with_chosen_inputs():
    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            model(data(i)).square().sum().backward(inputs=list(model.parameters()))

    both(Mlp, step)


@run_on_ranks(gloo=True)
def test_hooks_on_modules_and_tensors():
    def step(model: nn.Module) -> list[torch.Tensor]:
        seen = []
        model.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model.register_forward_hook(lambda module, args, out: out * 2)
        head = model.module.head
        head.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
        head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0].clone()))
        head.weight.register_hook(lambda grad: grad * 3)
        return [*backwards(model), *seen]

    assert len(both(Mlp, step)) == 3 + 2 * 3
    both(Mlp, step, find_unused_parameters=True)


@run_on_ranks(gloo=True)
def test_autograd_modes():
    def anomaly(model: nn.Module) -> list[torch.Tensor]:
        with torch.autograd.detect_anomaly(check_nan=True):
            return backwards(model)

    def saved_elsewhere(model: nn.Module) -> list[torch.Tensor]:
        with torch.autograd.graph.save_on_cpu():
            return backwards(model)

    def evaluation_between(model: nn.Module) -> list[torch.Tensor]:
        results = []
        for i in range(3):
            results += backwards(model.train(), 1)
            with torch.inference_mode() if i % 2 else torch.no_grad():
                results.append(model.eval()(data(i)))
        return results

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that anomaly mode is slow
        both(Mlp, anomaly)
    both(Mlp, saved_elsewhere)
    both(Conv, evaluation_between)


@run_on_ranks(gloo=True)
def test_functional_calls():
    def reparametrized(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            doubled = {name: 2 * p for name, p in model.named_parameters()}
            torch.func.functional_call(model, doubled, (data(i),)).square().sum().backward()

    def function_transforms(model: nn.Module) -> Any:
        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().sum()

        parameters = {name: p.detach() for name, p in model.named_parameters()}
        results = [torch.func.grad(loss)(parameters, data())]
        with torch.no_grad():
            results += [torch.func.vmap(model)(data()), torch.func.jacrev(model)(data())]
        backwards(model)
        return results

    both(Mlp, reparametrized)
    both(small, function_transforms)


# --- Precision and optimizers


@run_on_ranks(gloo=True)
def test_autocast_and_gradient_scaler():
    def step(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for i in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = model(data(i)).float().square().mean()
            if i == 2 and syncengine.rank() == 1:
                loss = loss * float("inf")  # on one rank: both must skip the step
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
        return scales

    for dtype in (torch.bfloat16, torch.float16):
        scales = both(Mlp, partial(step, dtype=dtype))
        assert [scale.item() for scale in scales] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "sgd foreach": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, foreach=True),
    "adagrad fused": partial(torch.optim.Adagrad, lr=0.01, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True),
    "sgd maximize": partial(torch.optim.SGD, lr=0.05, maximize=True, weight_decay=0.1),
}


@run_on_ranks(gloo=True)
def test_optimizers():
    def step(model: nn.Module, name: str) -> None:
        groups = [{"params": model.module.layers.parameters()}, {"params": model.module.head.parameters(), "lr": 0.1}]
        optimizer = OPTIMIZERS[name](groups)
        for i in range(3):
            optimizer.zero_grad(set_to_none=i != 1)
            model(data(i)).square().mean().backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            nn.utils.clip_grad_norm_(model.parameters(), 0.02, foreach=i == 2)
            optimizer.step()

    for name in OPTIMIZERS:
        both(Mlp, partial(step, name=name))


@run_on_ranks(gloo=True)
def test_optimizers_that_call_the_model():
    def step(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data()).square().mean()
            loss.backward()
            syncengine.all_reduce(shared := loss.detach().clone())  # the line search must decide alike
            return shared

        return [optimizer.step(closure) for _ in range(2)]

    both(small, step)


@run_on_ranks(gloo=True)
def test_averaged_models():
    def step(model: nn.Module) -> list[torch.Tensor]:
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)  # a deep copy of the wrapper
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(3):
            optimizer.zero_grad()
            model(data(i)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
        torch.optim.swa_utils.update_bn([data(9)], average)
        return [*average.state_dict().values(), average(data())]

    both(Conv, step)


# --- Kinds of modules and outputs


class Reparametrized(nn.Module):
    """Weights that are computed from others at each use, some of them with state that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations = nn.utils.parametrizations
        self.old = nn.utils.weight_norm(nn.Linear(24, 24))
        self.new = parametrizations.weight_norm(nn.Linear(24, 24))
        self.spectral = parametrizations.spectral_norm(nn.Linear(24, 24))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(24, 24))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(24, 24))
        self.pruned = prune.l1_unstructured(nn.Linear(24, 24), "weight", amount=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x).tanh()
        return x


@run_on_ranks(gloo=True)
def test_parametrizations():
    def step(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for i in range(3):
            optimizer.zero_grad()
            losses.append(model(data(i)).square().mean())
            losses[-1].backward()
            optimizer.step()
        return losses

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the old weight_norm is deprecated
        both(Reparametrized, step)


@run_on_ranks(gloo=True)
def test_scripted_and_traced_modules():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scripting is deprecated
        both(lambda: torch.jit.script(small()), backwards)
        both(lambda: torch.jit.trace(small(), torch.zeros(5, 24)), backwards)


class Named(NamedTuple):
    first: torch.Tensor
    rest: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    named: Named
    more: dict[str, Any]
    nothing: None = None


class Rich(nn.Module):
    """Nested outputs with things in them that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(24, 4) for name in "abcd"})
        self.free = nn.ParameterDict({"scale": nn.Parameter(torch.ones(4))})

    def forward(self, x: torch.Tensor, *, names: str, scale: float = 1.0) -> Frozen:
        a, b, c, d = (
            part(x) * self.free["scale"] * scale if name in names else None for name, part in self.parts.items()
        )
        return Frozen(Named(a, [b, "text"]), {"c": (c, 3), "none": None, "d": {"deep": d}})


@run_on_ranks(gloo=True)
def test_nested_outputs_and_none():
    def step(model: nn.Module, names: str) -> None:
        for i in range(3):
            model.zero_grad()
            out = model(data(i), names=names, scale=0.5)
            parts = [out.named.first, out.named.rest[0], out.more["c"][0], out.more["d"]["deep"]]
            sum(part.square().sum() for part in parts if part is not None).backward()

    both(Rich, partial(step, names="abcd"))
    for names in ("abcd", "bd"):
        both(Rich, partial(step, names=names), find_unused_parameters=True)


class Forked(nn.Module):
    """Gives back its input, no result at all, and the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, kind: str) -> Any:
        y = self.linear(x)
        return {"identity": (x, y), "twice": [y, y], "detached": (y, y.detach()), "view": (y, y[:, 3:])}[kind]


@run_on_ranks(gloo=True)
def test_outputs_that_share_memory():
    def step(model: nn.Module, kind: str) -> list[torch.Tensor]:
        x = data().requires_grad_()
        first, second = model(x, kind)
        (first.square().sum() + second.sum()).backward()
        return [first, second, x.grad]

    for find_unused in (False, True):
        for kind in ("identity", "twice", "detached", "view"):
            both(Forked, partial(step, kind=kind), find_unused_parameters=find_unused)


class SideEffect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> None:
        self.kept = self.linear(x)


@run_on_ranks(gloo=True)
def test_a_forward_that_returns_nothing():
    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            assert model(data(i)) is None
            model.module.kept.square().sum().backward()
        model.module.kept = None

    both(SideEffect, step)


# --- Changes after wrapping, of which DDP's reducer hears nothing: its ranks go on with gradients of their own


@run_on_ranks()
def test_dtype_may_change_after_wrapping():
    for dtype in (torch.float64, torch.bfloat16):
        model = syncengine.Parallel(Mlp(), **CAP)
        backwards(model, 2)
        model.to(dtype)
        with model.no_sync():
            model(data().to(dtype)).sum().backward()
        for i in range(3):
            model.zero_grad()
            model(data(i).to(dtype)).square().sum().backward()
            for grad in gradients(model):
                everyone = torch.empty(2, *grad.shape, dtype=dtype)
                syncengine.all_gather(everyone, grad)
                assert grad.dtype == dtype
                assert torch.equal(everyone[0], everyone[1])


def replace_parameters() -> str:
    model = syncengine.Parallel(small())
    with pytest.raises(SyncError) as error:  # this rank's own, or what the other says, who may be one backward ahead
        backwards(model)
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        backwards(model)
    return str(error.value)


def test_replaced_parameters_are_an_error(pool: RankPool):
    for text in pool.run(replace_parameters):
        assert "Parallel(Sequential) depend on none of the parameters that it was made with" in text
        assert "load_state_dict(assign=True)" in text


@run_on_ranks(gloo=True)
def test_a_backward_past_the_parameters():
    """No error: the outputs do depend on parameters, only this loss does not."""

    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            inputs = data(i).requires_grad_().sin()
            same, out = model(inputs, "identity")
            same.sum().backward(retain_graph=True)
            (same.sum() + out.square().sum()).backward()

    both(Forked, step)


@run_on_ranks(gloo=True)
def test_training_goes_on_after_pickling_a_trained_model():
    def step(model: nn.Module) -> list[torch.Tensor]:
        backwards(model)
        other = pickle.loads(pickle.dumps(model))
        return [*backwards(other), *gradients(other), *backwards(copy.deepcopy(other))]

    both(Conv, step)
