"""What Parallel means: each habit of DistributedDataParallel, and what is different here."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from parallel_models import Conv, Mlp, Run, different_bits, train
from pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import InvalidUsage, Mismatch, SyncError

CAP = {"bucket_cap_mb": 1e-6}  # one bucket a parameter


def run_on_ranks(world: int = 2, **options: Any) -> Callable[[Callable[[], Any]], Callable[[RankPool], None]]:
    """Makes a function for rank processes into a test, which passes if the function returns on every rank."""

    def decorate(function: Callable[[], Any]) -> Callable[[RankPool], None]:
        def test(pool: RankPool) -> None:
            pool.run(_call, function.__name__, world=world, **options)

        test.on_ranks = function
        test.__doc__ = function.__doc__
        return test

    return decorate


def _call(name: str) -> None:
    globals()[name].on_ranks()


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + syncengine.rank()))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]


def both(make: Callable[[], nn.Module], step: Callable[[nn.Module], Any], **options: Any) -> None:
    """The same steps with Parallel and with DDP leave the same gradients."""
    results = []
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        torch.manual_seed(0)
        model = wrap(make(), **options)
        step(model)
        results.append(gradients(model))
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


# --- What it looks like


@run_on_ranks()
def test_it_looks_like_ddp():
    model = syncengine.Parallel(Conv())
    assert isinstance(model, DistributedDataParallel)
    assert all(name.startswith("module.") for name in model.state_dict())
    for name in [
        "module",
        "reducer",
        "logger",
        "process_group",
        "device",
        "device_ids",
        "device_type",
        "output_device",
        "static_graph",
        "find_unused_parameters",
        "require_backward_grad_sync",
        "require_forward_param_sync",
        "parameters_to_ignore",
        "bucket_bytes_cap",
        "modules_buffers",
        "named_module_buffers",
        "broadcast_buffers",
        "join_device",
        "join_process_group",
    ]:
        getattr(model, name)
    assert model.will_sync_module_buffers()
    assert model.train(False) is model
    assert not model.module.training
    model._check_reducer_finalized()


@run_on_ranks()
def test_rank_0_state_reaches_all_ranks():
    torch.manual_seed(syncengine.rank())
    module = Conv()
    module.register_buffer("large", torch.randn(40_000))
    module.register_buffer("strided", torch.randn(300, 200).t())
    module.register_buffer("scalar", torch.tensor(syncengine.rank() == 0))
    before = copy.deepcopy(module.state_dict())
    model = syncengine.Parallel(module)
    torch.manual_seed(0)
    expected = Conv().state_dict()
    expected.update(large=torch.randn(40_000), strided=torch.randn(300, 200).t(), scalar=torch.tensor(True))
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.stride() == before[name].stride()


@run_on_ranks()
def test_init_sync_false_leaves_state_alone():
    torch.manual_seed(syncengine.rank())
    module = Mlp()
    before = copy.deepcopy(module.state_dict())
    syncengine.Parallel(module, init_sync=False)
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), before.values(), strict=True))


@dataclasses.dataclass
class Difference:
    """A change to one rank's model, and what the error says."""

    change: Callable[[nn.Module], Any]
    texts: tuple[str, ...]


DIFFERENCES = {
    "shape": Difference(lambda m: setattr(m, "head", nn.Linear(500, 8)), ("head.weight", "(7, 500)", "(8, 500)")),
    "dtype": Difference(lambda m: m.head.double(), ("head.weight", "float32", "float64")),
    "strides": Difference(
        lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(500, 7).t())),
        ("head.weight", "(500, 1)", "(1, 7)"),
    ),
    "frozen": Difference(lambda m: m.head.bias.requires_grad_(False), ("head.bias", "trained")),
    "number": Difference(lambda m: setattr(m, "extra", nn.Linear(2, 2)), ("extra.weight", "nothing")),
    "buffer": Difference(lambda m: m.register_buffer("mask", torch.ones(3)), ("mask", "nothing")),
}


def mismatch_text(name: str) -> str:
    module = Mlp()
    if syncengine.rank() == 1:
        DIFFERENCES[name].change(module)
    with pytest.raises(Mismatch) as error:
        syncengine.Parallel(module)
    return str(error.value)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_different_models_are_a_mismatch_that_names_both_sides(pool: RankPool, name: str):
    first, *others = pool.run(mismatch_text, name, world=3, timeout=20.0)
    assert others == [first, first]
    assert all(text in first for text in ("rank 0 has", "rank 1 has", "Parallel(Mlp)", *DIFFERENCES[name].texts))


def mismatch_of_arguments() -> None:
    with pytest.raises(
        Mismatch, match=r"rank 0 has .find_unused_parameters=False.*rank 1 has .find_unused_parameters=True"
    ):
        syncengine.Parallel(Mlp(), find_unused_parameters=syncengine.rank() == 1)


def test_different_arguments_are_a_mismatch(pool: RankPool):
    pool.run(mismatch_of_arguments)


# --- no_sync, several forwards


@run_on_ranks(gloo=True)
def test_no_sync_is_decided_at_forward():
    def forward_inside(model: nn.Module) -> None:
        with model.no_sync():
            loss = model(data()).square().mean()
        loss.backward()

    def backward_inside(model: nn.Module) -> None:
        loss = model(data()).square().mean()
        with model.no_sync():
            loss.backward()

    both(Mlp, forward_inside)
    both(Mlp, backward_inside)


@run_on_ranks(gloo=True)
def test_several_forwards_share_one_backward():
    def step(model: nn.Module) -> None:
        for _ in range(3):
            losses = [model(data(i)).square().mean() for i in range(3)]
            sum(losses).backward()

    both(Mlp, step)
    both(Mlp, step, find_unused_parameters=True)


@run_on_ranks()
def test_a_parameter_is_used_if_any_of_several_forwards_uses_it():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True, **CAP)
    (model(data(1), True) + model(data(2), False)).sum().backward()
    assert model.sync_stats()["copied_bytes"]["unused"] == 4 * (24 * 24 + 24)  # `never` alone


@run_on_ranks(gloo=True)
def test_a_forward_without_backward_changes_nothing():
    def step(model: nn.Module) -> None:
        model(data(1))
        with torch.no_grad():
            model(data(2))
        model(data(3)).square().mean().backward()

    both(Mlp, step)


@run_on_ranks()
def test_a_consumed_forward_raises():
    """DDP would go on with gradients that differ between ranks."""
    model = syncengine.Parallel(Mlp())
    first, second = model(data(1)).sum(), model(data(2)).sum()
    first.backward()
    with pytest.raises(InvalidUsage, match=r"already synchronized.*no_sync"):
        second.backward()
    loss = model(data()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidUsage, match="already synchronized"):
        loss.backward()
    hidden = syncengine.Parallel(Outputs(lambda a, b: iter([a, b])))  # outputs that can't be found
    loss = sum(hidden(data())).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidUsage, match="already synchronized"):
        loss.backward()


@run_on_ranks()
def test_a_backward_past_the_wrapper_stays_local():
    model = syncengine.Parallel(nn.Linear(24, 3))
    model(data()).sum().backward()
    model.zero_grad()
    model.module(data()).sum().backward()
    local = nn.Linear(24, 3)
    local(data()).sum().backward()
    assert torch.equal(model.module.weight.grad, local.weight.grad)


@run_on_ranks()
def test_after_a_step_the_forward_decides_again():
    model = syncengine.Parallel(nn.Linear(24, 3))
    model(data()).sum().backward()
    model.zero_grad()
    with model.no_sync():
        model(data()).sum().backward()  # must stay local, though the one before was synchronized
    local = nn.Linear(24, 3)
    local.load_state_dict(model.module.state_dict())
    local(data()).sum().backward()
    assert torch.equal(model.module.weight.grad, local.weight.grad)


# --- Unused parameters


class Branches(nn.Module):
    """Uses one branch or the other; `never` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.never = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(self.stem(x))


@run_on_ranks(gloo=True)
def test_unused_parameters():
    rank = syncengine.rank()

    def step(model: nn.Module, choose: Callable[[int], bool], set_to_none: bool) -> None:
        model.zero_grad(set_to_none=set_to_none)
        for i in range(3):
            with torch.no_grad():
                for p in model.parameters():
                    p.grad = p.grad if p.grad is None else torch.ones_like(p.grad)
            model(data(i), choose(i)).square().mean().backward()

    choices = (lambda i: True, lambda i: rank == 0, lambda i: i % 2 == 0, lambda i: (rank + i) % 2 == 0)
    for choose in choices:
        for set_to_none in (True, False):
            both(Branches, partial(step, choose=choose, set_to_none=set_to_none), find_unused_parameters=True)


@run_on_ranks()
def test_a_parameter_used_elsewhere_gets_the_average_everywhere():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    model(data(), syncengine.rank() == 0).sum().backward()
    inner = model.module
    assert inner.never.weight.grad is None
    everyone = torch.empty(2, 24, 24)
    for layer in (inner.left, inner.right, inner.stem):
        syncengine.all_gather(everyone, layer.weight.grad)
        assert everyone[0].any()
        assert torch.equal(everyone[0], everyone[1])
    assert model.sync_stats()["copied_bytes"]["unused"] == 2 * 4 * (24 * 24 + 24)


@run_on_ranks(gloo=True)
def test_accumulated_gradients_of_parameters_unused_later():
    rank = syncengine.rank()

    def step(model: nn.Module) -> None:
        with model.no_sync():
            model(data(1), rank == 0).square().mean().backward()
        model(data(2), True).square().mean().backward()

    both(Branches, step, find_unused_parameters=True)


class Outputs(nn.Module):
    """Gives its two results in the container that is asked for."""

    def __init__(self, container: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.container = nn.Linear(24, 4), nn.Linear(24, 4), container

    def forward(self, x: torch.Tensor) -> Any:
        return self.container(self.a(x), self.b(x))


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda a, b: (a, (b, "text")), lambda out: out[0]),
    "dict": (lambda a, b: {"a": a, "more": [b, None]}, lambda out: out["a"]),
    "dataclass": (Pair, lambda out: out.a + 0 * out.b),
}


def backward_of_one_output(model: nn.Module, choose: Callable[[Any], torch.Tensor]) -> None:
    choose(model(data())).sum().backward()


@run_on_ranks(gloo=True)
def test_outputs_in_containers():
    for container, choose in CONTAINERS.values():
        step = partial(backward_of_one_output, choose=choose)
        both(partial(Outputs, container), step, find_unused_parameters=True)
    model = syncengine.Parallel(Outputs(lambda a, b: {"a": a, "b": b}))
    out = model(data())
    (out["a"] + out["b"]).sum().backward()
    assert model.module.a.weight.grad is not None


@run_on_ranks(gloo=True)
def test_an_output_changed_in_place():
    def step(model: nn.Module) -> None:
        out = model(data())
        out["a"].mul_(2)
        out["a"].sum().backward()

    both(lambda: Outputs(lambda a, b: {"a": a, "b": b}), step, find_unused_parameters=True)


@run_on_ranks()
def test_a_loss_that_uses_no_parameter_on_one_rank():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    x = data().requires_grad_()
    if syncengine.rank() == 0:
        model.module.forward = lambda x, left: x * 1
    model(x, True).sum().backward()
    assert model.module.stem.weight.grad is not None


# --- Checkpointing, threads, several models


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second, self.third = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant).tanh()
        return self.third(checkpoint(self.second, x, use_reentrant=self.reentrant).tanh())


@run_on_ranks(gloo=True)
def test_checkpointing():
    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            model(data(i)).square().sum().backward()

    for reentrant in (True, False):
        both(partial(Checkpointed, reentrant), step, **CAP)
        both(partial(Checkpointed, reentrant), step)


@run_on_ranks()
def test_a_parameter_in_two_reentrant_checkpoints_raises():
    class Twice(Checkpointed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.second = self.first
            return super().forward(x)

    model = syncengine.Parallel(Twice(True), **CAP)
    time.sleep(0.5)  # until all ranks have come as far
    with pytest.raises(SyncError, match="ready only once"):
        model(data()).sum().backward()


@run_on_ranks()
def test_ranks_may_be_ready_in_opposite_orders():
    """Buckets complete in any order: ranks that wait for each other's next bucket would hang."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(24, 200) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = list(self.layers)[:: 1 if syncengine.rank() == 0 else -1]
            return sum(layer(x) for layer in order)

    torch.manual_seed(0)
    module = Crossed()
    expected = [sum(rank_gradient(module, r)[i] for r in range(2)) / 2 for i in range(12)]
    module.zero_grad()
    model = syncengine.Parallel(module, **CAP)
    for _ in range(3):
        model.zero_grad()
        model(data()).square().sum().backward()
        for grad, mean in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(grad, mean)


def rank_gradient(module: nn.Module, rank: int) -> list[torch.Tensor]:
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
    return list(torch.autograd.grad(module(x).square().sum(), list(module.parameters())))


@run_on_ranks(gloo=True)
def test_two_models_in_one_backward():
    results = []
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        torch.manual_seed(0)
        first, second = wrap(nn.Linear(24, 24)), wrap(Mlp(), bucket_cap_mb=0.1)
        for i in range(3):
            (second(first(data(i))).sum() + first(data(i + 10)).square().sum()).backward()
        results.append(gradients(first) + gradients(second))
    assert not different_bits(*results)


@run_on_ranks(gloo=True)
def test_backward_in_another_thread():
    def step(model: nn.Module) -> None:
        loss = model(data()).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    both(Mlp, step)


@run_on_ranks(world=4)
def test_a_sub_communicator():
    rank = syncengine.rank()
    pair = syncengine.default_communicator().split([0, 2] if rank % 2 == 0 else [1, 3])
    model = syncengine.Parallel(nn.Linear(2, 1, bias=False), process_group=pair)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0] if rank % 2 == 0 else [2.0, 2.0]]


# --- Frozen, ignored, complex; buckets


@run_on_ranks(gloo=True)
def test_frozen_parameters():
    def make() -> nn.Module:
        module = Mlp()
        module.head.weight.requires_grad_(False)
        return module

    both(make, lambda m: [m(data(i)).sum().backward() for i in range(3)])


@run_on_ranks()
def test_freezing_and_unfreezing_after_wrapping():
    model = syncengine.Parallel(Mlp())
    head, body = model.module.head, model.module.layers[0]
    for frozen in (None, head, body, None):
        for layer in (head, body):
            layer.requires_grad_(layer is not frozen)
        for i in range(3):
            model.zero_grad()
            model(data(i)).square().sum().backward()
            for layer in (head, body):
                assert (layer.weight.grad is None) == (layer is frozen)
            everyone = torch.empty(2, 600, 600)
            syncengine.all_gather(everyone, model.module.layers[2].weight.grad)
            assert torch.equal(everyone[0], everyone[1])


def freeze_on_one_rank() -> str:
    model = syncengine.Parallel(Mlp())
    model(data()).sum().backward()
    if syncengine.rank() == 1:
        model.module.head.bias.requires_grad_(False)
    with pytest.raises(SyncError) as error:
        model(data()).sum().backward()
    return str(error.value)


def test_freezing_on_one_rank_only_is_an_error_on_all(pool: RankPool):
    for text in pool.run(freeze_on_one_rank, timeout=20.0):
        assert "head.bias requires a gradient on rank 0, but not on rank 1" in text


@run_on_ranks()
def test_ignored_parameters_stay_local():
    rank = syncengine.rank()
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.bias.fill_(rank)
    syncengine.Parallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    model = syncengine.Parallel(module)
    assert module.bias.item() == rank
    (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
    assert module.bias.grad.item() == rank + 1
    assert module.weight.grad.tolist() == [[1.5, 1.5]]


@run_on_ranks(gloo=True)
def test_complex_parameters():
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(24, 3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex64) @ self.weight).abs()

    both(Complex, lambda m: m(data()).sum().backward())


@run_on_ranks()
def test_buckets_follow_the_cap_and_the_order_of_readiness():
    model = syncengine.Parallel(Mlp())
    model(data()).sum().backward()
    default = model.sync_stats()["buckets"]
    small = syncengine.Parallel(Mlp(), **CAP)
    assert not small._has_rebuilt_buckets
    for _ in range(2):
        small(data()).sum().backward()
    assert small._has_rebuilt_buckets
    assert small.sync_stats()["buckets"] == len(list(small.parameters())) > default > 1
    assert small.reducer.ready_order()[0] > small.reducer.ready_order()[-1]  # the head's gradients come first


@run_on_ranks()
def test_buckets_are_rebuilt_with_unused_parameters_too():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    for _ in range(2):
        model(data(), True).sum().backward()
    assert model._has_rebuilt_buckets


# --- Buffers


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += syncengine.rank() + 1
        self.steps = self.steps + syncengine.rank() + 1  # a new tensor each time
        return self.weight * x.sum()


@run_on_ranks(gloo=True)
def test_buffers_are_rank_0s_at_every_forward():
    def seen(**options: Any) -> list[list[float]]:
        states = []
        for wrap in (syncengine.Parallel, DistributedDataParallel):
            model = wrap(Counter(), **options)
            state = []
            for i in range(6):
                if i == 2:
                    with model.no_sync():
                        model(data(i)).backward()
                elif i == 4:
                    with torch.no_grad():
                        model(data(i))
                else:
                    model(data(i)).backward()
                state += [*model.module.seen.tolist(), model.module.steps.item()]
            states.append(state)
        assert states[0] == states[1]
        return states[0]

    synced, local = seen(), seen(forward_sync_buffers=False)
    assert (synced == local) == (syncengine.rank() == 0)


@run_on_ranks()
def test_broadcast_buffers_is_deprecated_but_works():
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        model = syncengine.Parallel(Counter(), broadcast_buffers=False)
    assert model.broadcast_buffers is False
    assert not model.will_sync_module_buffers()


# --- Copies and hooks


@run_on_ranks()
def test_pickled_and_copied_models_train_on():
    torch.manual_seed(1)
    model = syncengine.Parallel(Mlp(), bucket_cap_mb=0.1)
    model(data()).sum().backward()
    others = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for m in (model, *others):
        m.zero_grad()
        m(data(1)).square().sum().backward()
    for other in others:
        assert other.reducer is not model.reducer
        assert other.bucket_bytes_cap == model.bucket_bytes_cap
        assert not different_bits(gradients(model), gradients(other))
    split = syncengine.default_communicator().split([0, 1])
    with pytest.raises(InvalidUsage, match="default communicator"):
        pickle.dumps(syncengine.Parallel(Mlp(), process_group=split))


@run_on_ranks()
def test_post_accumulate_hooks_see_the_average():
    """So an optimizer in backward steps on averages, and may drop the gradient."""
    model = syncengine.Parallel(nn.Linear(2, 1, bias=False))
    weight = model.module.weight
    start, seen = weight.detach().clone(), []

    def step(parameter: torch.Tensor) -> None:
        seen.append(parameter.grad.tolist())
        with torch.no_grad():
            parameter -= parameter.grad
        parameter.grad = None

    handle = weight.register_post_accumulate_grad_hook(step)
    x = torch.full((1, 2), float(syncengine.rank()))
    model(x).sum().backward()
    assert seen == [[[0.5, 0.5]]]
    assert weight.grad is None
    assert torch.equal(weight, start - 0.5)
    with model.no_sync():
        model(x).sum().backward()
    assert seen[1] == x.tolist()
    handle.remove()
    model(x).sum().backward()
    assert len(seen) == 2
    assert weight.grad.tolist() == [[0.5, 0.5]]


@run_on_ranks()
def test_hooks_go_with_the_model():
    module = Mlp()
    model = syncengine.Parallel(module)
    model(data()).sum().backward()
    del model
    module.zero_grad()
    module(data()).sum().backward()  # no reducer to complain about a consumed forward
    again = syncengine.Parallel(module)
    again._remove_autograd_hooks()
    module(data()).sum().backward()


@run_on_ranks(gloo=True)
def test_training_can_be_wrapped_twice():
    """Two Parallel on one module: both listen, only the one whose forward ran synchronizes."""
    module = Mlp()
    first, second = syncengine.Parallel(module), syncengine.Parallel(module)
    first(data()).sum().backward()
    expected = gradients(module)
    module.zero_grad()
    second(data()).sum().backward()
    assert not different_bits(gradients(module), expected)


@run_on_ranks()
def test_create_graph_gives_averages_too():
    """DDP can't: it writes its bucket in place where autograd forbids it."""
    results = []
    for create_graph in (False, True):
        torch.manual_seed(0)
        model = syncengine.Parallel(nn.Linear(24, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about reference cycles
            for i in range(2):
                model(data(i)).square().sum().backward(create_graph=create_graph)
        results.append(gradients(model))
    assert not different_bits(*results)


# --- World size 1, and what is refused


def alone() -> None:
    module = Mlp()
    model = syncengine.Parallel(module)
    assert model.reducer is None
    assert isinstance(model, DistributedDataParallel)
    with model.no_sync():
        model(torch.ones(2, 24)).sum().backward()
    assert not any(p.grad is None for p in module.parameters())
    assert threading.active_count() == 1
    pickle.loads(pickle.dumps(model))(torch.ones(2, 24)).sum().backward()
    with pytest.raises(InvalidUsage, match="static_graph"):
        syncengine.Parallel(module, static_graph=True)


def test_alone_it_is_the_module(pool: RankPool):
    pool.run(alone, world=1)


REFUSED_ARGUMENTS: dict[str, Any] = {
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "check_reduction": True,
    "batched_grad_copy": True,
    "skip_all_reduce_unused_params": True,
    "mixed_precision": object(),
    "device_mesh": object(),
    "delay_all_reduce_named_params": [],
    "param_to_hook_all_reduce": torch.zeros(1),
    "bucket_cap_mb_list": [1],
    "bucket_cap_mb": 0,
    "device_ids": [0],
    "output_device": 0,
    "process_group": object(),
}


def refused_arguments() -> None:
    for name, value in REFUSED_ARGUMENTS.items():
        with pytest.raises(InvalidUsage, match=name):
            syncengine.Parallel(nn.Linear(1, 1), **{name: value})


REFUSED_MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse": (lambda: nn.Sequential(nn.Embedding(3, 3, sparse=True)), "sparse gradients .0, sparse=True"),
    "lazy": (lambda: nn.LazyLinear(3), "weight is not initialized"),
    "frozen": (lambda: nn.Linear(1, 1).requires_grad_(False), "doesn't have any parameter that requires a gradient"),
    "meta": (lambda: nn.Linear(1, 1, device="meta"), "weight on meta"),
    "sync batch norm": (lambda: nn.Sequential(nn.SyncBatchNorm(3)), "SyncBatchNorm"),
}


def refused_modules() -> None:
    for make, text in REFUSED_MODULES.values():
        with pytest.raises(InvalidUsage, match=text):
            syncengine.Parallel(make())


def refused_methods() -> None:
    model = syncengine.Parallel(nn.Linear(1, 1))
    for name in ("join", "register_comm_hook", "_set_static_graph", "_register_fused_optim", "_get_ddp_logging_data"):
        with pytest.raises(InvalidUsage, match=f"{name}.*not support|not support.*{name}"):
            getattr(model, name)()


@pytest.mark.parametrize("check", [refused_arguments, refused_modules, refused_methods])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_not_supported_is_refused_by_name(pool: RankPool, check: Callable[[], None], world: int):
    pool.run(check, world=world)


def test_every_argument_of_ddp_is_known():
    import inspect

    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    ours = inspect.signature(syncengine.Parallel.__init__).parameters
    assert [(p.name, p.default) for p in ours.values()][: len(theirs)] == [(p.name, p.default) for p in theirs.values()]


def digests(run: Run) -> int:
    return different_bits(train(syncengine.Parallel, run), train(syncengine.Parallel, run))


def test_training_twice_gives_the_same_bits(pool: RankPool):
    assert pool.run(digests, Run(model="conv"), world=3) == [0, 0, 0]
