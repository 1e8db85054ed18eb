"""What ShardedOptimizer refuses, and what step() finds before it writes anything."""

import copy
import itertools
import re
from collections.abc import Callable

import pytest
import torch
from pool import run_on_ranks
from sharded_training import (
    backward,
    batch,
    copies,
    differences,
    different_weights,
    error_of,
    is_common,
    is_unchanged,
    make,
    plain,
    sharded,
    snapshot,
    train,
    trained,
    unlike_plain,
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
    ("arguments", "options", "text"),
    [
        ([MySgd], {}, "does not know MySgd: pass elements=True"),
        ([torch.optim.Adafactor], {}, "does not know Adafactor"),
        ([torch.optim.LBFGS], {}, "LBFGS can't be sharded: it evaluates its closure several times"),
        ([torch.optim.LBFGS], {"elements": False}, "LBFGS can't be sharded"),
        ([torch.optim.SparseAdam], {"elements": True}, "SparseAdam can't be sharded: it is for sparse gradients"),
        ([torch.optim.Adam], {"differentiable": True}, "differentiable=True"),
        ([nn.Linear], {}, "needs a class of optimizers"),
        ([torch.optim.AdamW], {"elements": 1}, "elements=1 is none of True, False and None"),
        ([torch.optim.AdamW], {"checksum": True}, "checksum= is gone"),
        # Arguments of torch's ZeroRedundancyOptimizer.
        ([torch.optim.AdamW], {"overlap_with_ddp": True}, "overlap_with_ddp=True"),
        ([torch.optim.AdamW], {"process_group": "world"}, "process_group of type str"),
        ([torch.optim.AdamW], {"parameters_as_bucket_view": 3}, "parameters_as_bucket_view=3"),
        ([torch.optim.Muon, object()], {}, "(a group goes by its name, process_group=)"),
    ],
)
def test_what_can_not_be_sharded_is_refused(arguments: list, options: dict, text: str):
    with pytest.raises(syncengine.errors.InvalidUsage, match=re.escape(text)):
        syncengine.ShardedOptimizer([nn.Parameter(torch.ones(3))], *arguments, **options)


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
    refused = why_not_shared([Named("w", expanded)])
    assert "parameter w of shape (5,) and strides (0,) has elements that share memory" in refused


def test_cuda_parameters_are_refused_by_name():
    with FakeTensorMode(allow_non_fake_inputs=True):
        elsewhere = nn.Parameter(torch.empty(3, device="cuda"))
        for parameters in ([elsewhere], [("w", elsewhere)]):
            with pytest.raises(syncengine.errors.InvalidUsage, match="for CPU models, but a parameter is on cuda"):
                syncengine.ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1)


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
@run_on_ranks()
def test_step_raises_on_all_ranks_before_it_writes(how: str, text: str):
    net, model, optimizer = trained(2)
    me = syncengine.rank()
    weights, state = copies(net), snapshot(optimizer)
    optimizer.zero_grad()
    if how == "no_sync" or (how == "no_sync on one" and me == 1):
        with model.no_sync():
            backward(model, 2)
    elif how != "no_sync on one":
        backward(model, 2)
    if how == "none" and me == 1:
        net.head.bias.grad = None
    if how == "rate" and me == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    if how == "option" and me == 0:
        optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    if how == "group" and me == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert text in error_of(optimizer.step)
    assert is_unchanged(net, weights)
    optimizer.param_groups[0].update(lr=1e-2, betas=(0.9, 0.999))
    del optimizer.param_groups[1:]
    assert differences(state, optimizer.state_dict()) == []
    train(model, optimizer, 1)  # an ordinary step


@run_on_ranks()
def test_a_parameter_in_different_groups_is_named():
    """As many parameters in each group on both ranks, of which one that is shared is in another."""
    net = make("odd")
    weights, biases = [net.first.weight, net.second.weight], [net.first.bias, net.second.bias]
    for frozen in biases:
        frozen.requires_grad_(False)
    groups = [[weights[0], biases[0]], [weights[1], biases[1]]]
    if syncengine.rank() == 1:
        groups = [[biases[1], biases[0]], [weights[0], weights[1]]]
    kinds = [{"params": groups[0], "weight_decay": 0.5}, {"params": groups[1], "weight_decay": 0.0}]
    text = error_of(lambda: trained(1, net, torch.optim.AdamW, kinds))
    assert "Mismatch: what ShardedOptimizer is to share differs" in text
    assert "first.weight: float32 (97, 24), group 0" in text and "first.weight: float32 (97, 24), group 1" in text
    assert not is_common(net.first.weight)


@run_on_ranks()
def test_step_raises_after_a_backward_that_was_given_up():
    net, model, optimizer = trained(2)

    def stop(grad: torch.Tensor) -> None:
        raise RuntimeError("stop")

    handle = net.layers[2].weight.register_hook(stop)
    assert "stop" in error_of(lambda: train(model, optimizer, 1))
    handle.remove()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert "not averages: the last backward was given up" in error_of(optimizer.step)
    train(model, optimizer, 1)


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
    train(model, optimizer, 1)
    assert all(map(is_common, net.parameters()))  # once nothing else holds them
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


@run_on_ranks()
def test_parameters_of_one_storage_follow_or_are_refused():
    ours, *_ = trained(3, Views(96))
    train(*plain(theirs := Views(96)), 3)
    assert different_weights(ours, theirs) == []
    assert {p.untyped_storage().nbytes() for p in ours.parameters()} == {96 * 4}
    assert "parameters first and second share memory" in error_of(lambda: trained(3, Views(95)))


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
    model, optimizer = sharded(nn.Sequential(nn.Embedding(5, 24, sparse=True), nn.Linear(24, 2)), torch.optim.SGD)
    model(torch.tensor([1, 2])).sum().backward()
    assert "the gradient of parameter 0.weight is sparse" in error_of(optimizer.step)


class RowSum(torch.optim.SGD):
    """Says it is elementwise, but keeps something else."""

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = p.grad.sum().view(1)


@run_on_ranks()
def test_state_that_is_not_elementwise_is_named():
    text = error_of(lambda: trained(1, make(), RowSum, elements=True))
    assert "keeps 'sum' of shape (1,), which is not one number for each element" in text


@pytest.mark.parametrize("early", [True, False])
@run_on_ranks(world=3)
def test_a_loaded_state_that_is_not_elementwise_is_named_on_all_ranks(early: bool):
    """Two parameters over three ranks: the last has nothing of the first one, whose state it is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))
    model, ordinary = plain(copy.deepcopy(net))
    train(model, ordinary, 1)
    state = ordinary.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(7)
    model, optimizer = sharded(net)
    if not early:
        train(model, optimizer, 1)
    optimizer.load_state_dict(state)
    text = error_of(lambda: train(model, optimizer, 1))
    assert "keeps 'exp_avg' of shape (7,), which is not one number for each element" in text
    syncengine.barrier()


BACKWARDS: dict[str, Callable[[torch.Tensor, torch.Tensor, nn.Parameter], object]] = {
    "grad": lambda loss, probe, weight: torch.autograd.grad(loss, probe),
    "grad of a parameter": lambda loss, probe, weight: torch.autograd.grad(loss, weight),
    "inputs": lambda loss, probe, weight: loss.backward(inputs=[probe]),
    "inputs with a parameter": lambda loss, probe, weight: loss.backward(inputs=[probe, weight]),
    "all": lambda loss, probe, weight: loss.backward(),
}


@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["one", "all"])
@pytest.mark.parametrize("way", BACKWARDS)
@run_on_ranks()
def test_what_accumulates_under_no_sync_is_refused(way: str, ranks: list[int]):
    """And what accumulates nothing leaves averages."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            probe = batch(7).requires_grad_()
            if syncengine.rank() in ranks:
                with model.no_sync():
                    BACKWARDS[way](model(probe).sum(), probe, model.module.head.weight)
            optimizer.step()

    if "grad" in way or way == "inputs":
        return unlike_plain(steps)
    text = error_of(lambda: steps(*sharded(make())))
    assert "the gradients of Mlp are not averages: the last backward was this rank's own (no_sync)" in text
    return []


@run_on_ranks()
def test_weights_are_private_again_after_an_interrupt_while_they_are_shared():
    class Interrupted(torch.optim.SGD):
        is_made = False

        def __init__(self, *arguments: object, **options: object) -> None:
            if Interrupted.is_made:
                raise KeyboardInterrupt
            super().__init__(*arguments, **options)

    net = nn.Linear(4, 4)
    model, optimizer = sharded(net, Interrupted, elements=True)
    Interrupted.is_made = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4))
    assert not any(map(is_common, net.parameters()))
    syncengine.barrier()
    with torch.no_grad():
        net.weight.fill_(syncengine.rank())  # nobody else sees it
    syncengine.barrier()
    assert bool((net.weight == syncengine.rank()).all())
    del optimizer
