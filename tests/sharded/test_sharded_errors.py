"""What ShardedOptimizer refuses, and what step() finds before it writes anything."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from pool import RankPool, run_on_ranks
from sharded_training import (
    batch,
    differences,
    different_weights,
    error_of,
    is_common,
    make,
    plain,
    sharded,
    snapshot,
    train,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import syncengine
from syncengine.sharded.movable import why_not_shared
from syncengine.sharded.shard import GRAIN, cut_elements, deal_whole
from syncengine.sharded.weights import Named


class MySgd(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (MySgd, {}, "does not know MySgd: pass elements=True"),
        (torch.optim.Adafactor, {}, "does not know Adafactor"),
        (torch.optim.LBFGS, {}, "LBFGS can't be sharded: it evaluates its closure several times"),
        (torch.optim.LBFGS, {"elements": False}, "LBFGS can't be sharded"),
        (torch.optim.SparseAdam, {"elements": True}, "SparseAdam can't be sharded: it is for sparse gradients"),
        (torch.optim.Adam, {"differentiable": True}, "differentiable=True"),
        (nn.Linear, {}, "needs a class of optimizers"),
    ],
)
def test_what_can_not_be_sharded_is_refused(kind: type, options: dict, text: str):
    with pytest.raises(syncengine.errors.InvalidUsage, match=text.replace("(", r"\(")):
        syncengine.ShardedOptimizer([nn.Parameter(torch.ones(3))], kind, **options)


def test_arguments_are_checked_as_by_the_optimizer_itself():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        syncengine.ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW, lr=-1.0)
    with pytest.raises(TypeError, match="unexpected keyword"):
        syncengine.ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW, learning_rate=1.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[5], [64, 64, 64], [1000, 3, 0, 70_000, 129], [1] * 40, [0], []], ids=str)
def test_slices_cover_each_element_once(sizes: list[int], ranks: int):
    for divide in (cut_elements, deal_whole):
        parts = divide([(n, 4) for n in sizes], ranks)
        assert len(parts) == ranks
        slices = sorted(itertools.chain(*parts))
        for index, n in enumerate(sizes):
            own = [s for s in slices if s.parameter == index and s.begin < s.end]
            assert sum(s.end - s.begin for s in own) == n
            assert all(s.begin % GRAIN == 0 for s in own)
            assert all(a.end == b.begin for a, b in itertools.pairwise(own))
    work = [sum(s.end - s.begin for s in part) for part in cut_elements([(n, 4) for n in sizes], ranks)]
    assert max(work) - sum(work) / ranks <= 2 * GRAIN
    whole = [sum(s.end - s.begin for s in part) for part in deal_whole([(n, 4) for n in sizes], ranks)]
    assert max(whole) - sum(whole) / ranks <= max(sizes, default=0)


def test_only_weights_of_a_cpu_are_shared():
    elsewhere = nn.Parameter(torch.empty(3, device="meta"))
    assert "parameter w is on meta: ShardedOptimizer is for CPU models" in why_not_shared([Named("w", elsewhere)])
    expanded = nn.Parameter(torch.ones(1).expand(5))
    assert "parameter w of shape (5,) and strides (0,) has elements that share memory" in why_not_shared(
        [Named("w", expanded)]
    )


def test_cuda_parameters_are_refused_by_name():
    with FakeTensorMode(allow_non_fake_inputs=True):
        elsewhere = nn.Parameter(torch.empty(3, device="cuda"))
        for make_one in (
            lambda: syncengine.ShardedOptimizer([elsewhere], torch.optim.SGD, lr=0.1),
            lambda: syncengine.ShardedOptimizer([("w", elsewhere)], torch.optim.SGD, lr=0.1),
        ):
            with pytest.raises(syncengine.errors.InvalidUsage, match="for CPU models, but a parameter is on cuda"):
                make_one()


def broken(how: str) -> list[str]:
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)
    me = syncengine.rank()
    before = [p.detach().clone() for p in net.parameters()], snapshot(optimizer)
    optimizer.zero_grad()
    if how in ("no_sync", "no_sync on one"):
        if how == "no_sync" or me == 1:
            with model.no_sync():
                model(batch(2)).square().mean().backward()
    else:
        model(batch(2)).square().mean().backward()
    if how == "none" and me == 1:
        net.head.bias.grad = None
    if how == "rate" and me == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    if how == "option" and me == 0:
        optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    if how == "group" and me == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    text = error_of(optimizer.step)
    same = all(torch.equal(a, b) for a, b in zip(before[0], net.parameters(), strict=True))
    optimizer.param_groups[0].update(lr=1e-2, betas=(0.9, 0.999))
    del optimizer.param_groups[1:]
    wrong = differences(before[1], optimizer.state_dict())
    return [text, str(same), str(wrong), error_of(lambda: train(model, optimizer, 1))]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("no_sync", "the gradients of Mlp are not averages: the last backward was this rank's own (no_sync)"),
        ("no_sync on one", "not averages: the last backward was this rank's own (no_sync)"),
        ("none", "rank 0 has [head.bias: gradient], rank 1 has [head.bias: no gradient]"),
        ("rate", "'lr': 0.5"),
        ("option", "'betas': [0.8, 0.9]"),
        ("group", "rank 1 has [group 1 of 1 parameters"),
    ],
)
def test_step_raises_on_all_ranks_before_it_writes(pool: RankPool, how: str, text: str):
    for found, same, wrong, after in pool.run(broken, how):
        assert text in found
        assert (same, wrong, after) == ("True", "[]", "")  # and the next step is an ordinary one


@run_on_ranks()
def test_a_parameter_in_different_groups_is_named():
    """As many parameters in each group on both ranks, of which one that is shared is in another."""
    net = make("odd")
    weights, biases = [net.first.weight, net.second.weight], [net.first.bias, net.second.bias]
    for frozen in (biases[0], biases[1]):
        frozen.requires_grad_(False)
    groups = [[weights[0], biases[0]], [weights[1], biases[1]]]
    if syncengine.rank() == 1:
        groups = [[biases[1], biases[0]], [weights[0], weights[1]]]
    model = syncengine.Parallel(net)
    kinds = [{"params": groups[0], "weight_decay": 0.5}, {"params": groups[1], "weight_decay": 0.0}]
    optimizer = syncengine.ShardedOptimizer(kinds, torch.optim.AdamW, lr=1e-2)
    text = error_of(lambda: train(model, optimizer, 1))
    shared = str(is_common(net.first.weight))
    assert "Mismatch: what ShardedOptimizer is to share differs" in text
    assert "first.weight: float32 (97, 24), group 0" in text and "first.weight: float32 (97, 24), group 1" in text
    assert shared == "False"


@run_on_ranks()
def test_step_raises_after_a_backward_that_was_given_up():
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)

    def stop(grad: torch.Tensor) -> None:
        raise RuntimeError("stop")

    handle = net.layers[2].weight.register_hook(stop)
    assert "stop" in error_of(lambda: train(model, optimizer, 1))
    handle.remove()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert "not averages: the last backward was given up" in error_of(optimizer.step)
    assert error_of(lambda: train(model, optimizer, 1)) == ""


@pytest.mark.parametrize("how", ["detached", "numpy", "storage", "state_dict", "graph", "nothing"])
@run_on_ranks()
def test_views_from_before_are_refused_by_name(how: str):
    net = make()
    model, optimizer = sharded(net)
    held = {
        "detached": lambda: net.head.weight.detach(),
        "numpy": lambda: net.head.weight.detach().numpy()[1:],
        "storage": lambda: net.head.weight.untyped_storage(),
        "state_dict": net.state_dict,
        "graph": lambda: net(batch(0)).sum(),
        "nothing": lambda: None,
    }[how]()
    text = error_of(lambda: train(model, optimizer, 1))
    del held
    again = error_of(lambda: train(model, optimizer, 1))
    where = "shared" if all(is_common(p) for p in net.parameters()) else "private"
    assert (again, where) == ("", "shared")  # once nothing else holds them
    if how == "nothing":
        assert text == ""
    else:
        name = "head.weight" if how in ("detached", "numpy", "storage") else ""
        assert f"the memory of parameter {name}" in text and "is also held by 1 other" in text, text


class Views(nn.Module):
    """Parameters that lie in one storage."""

    def __init__(self, second_at: int) -> None:
        super().__init__()
        memory = torch.linspace(-1, 1, 24 * 8)
        self.first = nn.Parameter(memory[:96].view(24, 4))
        self.second = nn.Parameter(memory[second_at : second_at + 96].view(24, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first + x @ self.second


def in_one_storage(second_at: int) -> list[str]:
    ours, theirs = Views(second_at), Views(second_at)
    model, optimizer = sharded(ours)
    text = error_of(lambda: train(model, optimizer, 3))
    if text:
        return [text]
    train(*plain(theirs), 3)
    sizes = {p.untyped_storage().nbytes() for p in ours.parameters()}
    return [*different_weights(ours, theirs), *[f"{n} bytes" for n in sizes - {96 * 4}]]


def test_parameters_of_one_storage_follow_or_are_refused(pool: RankPool):
    assert pool.run(in_one_storage, 96) == [[]] * 2
    for (text,) in pool.run(in_one_storage, 95):
        assert "parameters first and second share memory" in text


@run_on_ranks()
def test_weights_that_differ_between_ranks_are_named():
    net = make()
    with torch.no_grad():
        net.head.bias.add_(syncengine.rank())
    model = syncengine.Parallel(net, init_sync=False)
    optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    text = error_of(lambda: train(model, optimizer, 1))
    assert text.startswith("Mismatch: a parameter of ShardedOptimizer differs between ranks")
    assert "head.bias: float32 (7,)" in text


@run_on_ranks()
def test_sparse_gradients_are_refused():
    net = nn.Sequential(nn.Embedding(5, 24, sparse=True), nn.Linear(24, 2))
    model = syncengine.Parallel(net)
    optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.tensor([1, 2])).sum().backward()
    text = error_of(optimizer.step)
    assert "the gradient of parameter 0.weight is sparse" in text


class RowSum(torch.optim.SGD):
    """Says it is elementwise, but keeps something else."""

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = p.grad.sum().view(1)


@run_on_ranks()
def test_state_that_is_not_elementwise_is_named():
    text = error_of(lambda: train(*sharded(make(), RowSum, elements=True), 1))
    assert "keeps 'sum' of shape (1,), which is not one number for each element" in text


@pytest.mark.parametrize("early", [True, False])
@run_on_ranks(world=3, timeout=20.0)
def test_a_loaded_state_that_is_not_elementwise_is_named_on_all_ranks(early: bool):
    """Two parameters over three ranks: the last has nothing of the first one, whose state it is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))
    other = copy.deepcopy(net)
    ordinary = torch.optim.AdamW(other.parameters())
    other(torch.ones(2, 24)).sum().backward()
    ordinary.step()
    state = ordinary.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(7)

    def step() -> None:
        optimizer.zero_grad()
        model(batch(0)[:, :24]).sum().backward()
        optimizer.step()

    model, optimizer = sharded(net)
    if not early:
        step()
    optimizer.load_state_dict(state)
    text = error_of(step)
    after = error_of(lambda: syncengine.barrier())
    assert "keeps 'exp_avg' of shape (7,), which is not one number for each element" in text
    assert after == ""


def backward_under_no_sync(way: str, ranks: list[int]) -> tuple[str, list[str]]:
    ours, theirs = make(), make()
    (model, optimizer), (reference, plain_optimizer) = sharded(ours), plain(theirs)
    text = ""
    for net, wrapped, one in ((ours, model, optimizer), (theirs, reference, plain_optimizer)):
        for step in range(3):
            one.zero_grad()
            wrapped(batch(step)).square().mean().backward()
            probe = batch(7).requires_grad_()
            if syncengine.rank() in ranks:
                with wrapped.no_sync():
                    loss = wrapped(probe).sum()
                    if way == "grad":
                        torch.autograd.grad(loss, probe)
                    elif way == "grad of a parameter":
                        torch.autograd.grad(loss, net.head.weight)
                    elif way == "inputs":
                        loss.backward(inputs=[probe])
                    elif way == "inputs with a parameter":
                        loss.backward(inputs=[probe, net.head.weight])
                    else:
                        loss.backward()
            text = text or error_of(one.step)
    return text, different_weights(ours, theirs)


@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["one", "all"])
@pytest.mark.parametrize("way", ["grad", "grad of a parameter", "inputs"])
def test_what_accumulates_nothing_leaves_averages(pool: RankPool, way: str, ranks: list[int]):
    assert pool.run(backward_under_no_sync, way, ranks) == [("", [])] * 2


@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["one", "all"])
@pytest.mark.parametrize("way", ["inputs with a parameter", "all"])
def test_what_accumulates_is_refused(pool: RankPool, way: str, ranks: list[int]):
    for text, _ in pool.run(backward_under_no_sync, way, ranks):
        assert "the gradients of Mlp are not averages: the last backward was this rank's own (no_sync)" in text
