"""hvd.DistributedOptimizer: against DDP over Gloo, bit by bit, and against a naive oracle; and its wrong uses."""

from collections.abc import Callable

import pytest
import torch
from horovod_ranks import run_with_hvd
from parallel_models import Conv, Mixed, Tied, flat_gradients
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine
import syncengine.horovod as hvd
from syncengine.errors import InvalidUsage, Mismatch

WORLDS = pytest.mark.parametrize("world", [2, 3])


def make_model(seed: int = 0) -> nn.Module:
    """Small and large parameters (the large ones go alone), of two dtypes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 5))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step, hvd.rank())).square().mean()


def sgd(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def gradients_of_ranks(model: nn.Module, backward: Callable[[nn.Module, int], None]) -> list[list[torch.Tensor]]:
    """Of each parameter, every rank's own gradient, all computed here, by a model without hooks; zeros for none."""
    alone = make_model().to(next(model.parameters()).dtype)
    alone.load_state_dict(model.state_dict())
    found = []
    for rank in range(hvd.size()):
        alone.zero_grad()
        backward(alone, rank)
        found.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in alone.parameters()])
    return [list(of_ranks) for of_ranks in zip(*found, strict=True)]


def of_ranks(model: nn.Module, *steps: int) -> list[list[torch.Tensor]]:
    """Of each parameter, every rank's own gradient of `loss_of` in these steps."""

    def backward(alone: nn.Module, rank: int) -> None:
        for step in steps:
            alone(batch(step, rank)).square().mean().backward()

    return gradients_of_ranks(model, backward)


def add(tensors: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks, as docs/numerics.md has it."""
    return sum(tensors[1:], tensors[0])


def average(tensors: list[torch.Tensor]) -> torch.Tensor:
    return add(tensors) * (1.0 / len(tensors))


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@run_with_hvd(gloo=True)
def test_training_is_bit_equal_to_ddp(kind: str, passes: int):
    options = {"SGD": {"momentum": 0.9, "weight_decay": 0.01}}.get(kind, {})
    ours, theirs = make_model(), DistributedDataParallel(make_model())
    base, reference = (getattr(torch.optim, kind)(m.parameters(), lr=0.05, **options) for m in (ours, theirs))
    optimizer = hvd.DistributedOptimizer(base, ours.named_parameters(), backward_passes_per_step=passes)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        reference.zero_grad(set_to_none=step % 2 == 0)
        with theirs.no_sync():
            for micro in range(passes - 1):
                loss_of(ours, 10 * step + micro).backward()
                loss_of(theirs, 10 * step + micro).backward()
        loss_of(ours, 10 * step + 9).backward()
        loss_of(theirs, 10 * step + 9).backward()
        optimizer.step()
        reference.step()
        assert all(map(torch.equal, gradients(ours), gradients(theirs)))
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def as_fp16(tensors: list[torch.Tensor]) -> torch.Tensor:
    """What travels in 16 bits is added and averaged in 32, and rounded once."""
    return average([tensor.half().float() for tensor in tensors]).half().float()


def predivided(tensors: list[torch.Tensor]) -> torch.Tensor:
    return add([tensor * 0.25 for tensor in tensors]) * (4.0 / len(tensors))


CASES: dict[str, tuple[dict[str, object], Callable[[list[torch.Tensor]], torch.Tensor]]] = {
    "average": ({}, average),
    "sum": ({"op": hvd.Sum}, add),
    "fp16": ({"compression": hvd.Compression.fp16}, as_fp16),
    "predivide": ({"gradient_predivide_factor": 4.0}, predivided),
    "num_groups": ({"num_groups": 2}, average),
    "groups": ({"groups": 1}, average),
}


@WORLDS
@pytest.mark.parametrize("case", CASES)
@run_with_hvd()
def test_gradients_are_those_of_a_naive_oracle(case: str, world: int):
    options, oracle = CASES[case]
    model = make_model()
    optimizer = sgd(model, **options)
    for step in range(3):
        expected = of_ranks(model, step)
        loss_of(model, step).backward()
        optimizer.synchronize()
        assert all(map(torch.equal, gradients(model), map(oracle, expected)))
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


@run_with_hvd()
def test_groups_of_parameters_and_dtypes():
    """Lists of parameters, some in none; a model of three dtypes, strided gradients, and a weight used twice."""
    for make, rank_zero in [(Mixed, False), (Conv, False), (Tied, True)]:
        torch.manual_seed(0)
        plain, grouped = make(), make()
        grouped.load_state_dict(plain.state_dict())
        members = list(grouped.parameters())
        groups = [members[:2], members[3:4]] if not rank_zero else None
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1)),
            hvd.DistributedOptimizer(torch.optim.SGD(grouped.parameters(), lr=0.1), groups=groups),
        ]
        local = make()
        local.load_state_dict(plain.state_dict())
        for model in (plain, grouped, local):
            loss_of(model, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
        for p, g, own in zip(plain.parameters(), grouped.parameters(), local.parameters(), strict=True):
            assert torch.equal(p.grad, g.grad)
            assert torch.equal(p, g)
            assert p.grad.stride() == own.grad.stride()
            torch.testing.assert_close(p.grad, hvd.allreduce(own.grad))


class Branches(nn.Module):
    """Which branch is used depends on the rank; one is used nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(24, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](x) + self.branches[-2](x)


@WORLDS
@run_with_hvd()
def test_parameters_that_a_rank_has_no_gradient_for(world: int):
    """Other collectives between backward and step do not get mixed up with buckets that one rank still lacks."""
    torch.manual_seed(0)
    model = Branches()
    model.branches[3].bias.requires_grad_(False)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(step, hvd.rank()), hvd.rank() % 2).mean()
        loss.backward()
        own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        total = hvd.allreduce(loss.detach(), op=hvd.Sum)
        optimizer.step()
        assert torch.equal(total, hvd.allreduce(loss.detach(), op=hvd.Sum))
        for p, mine in zip(model.parameters(), own, strict=True):
            if p.requires_grad:
                torch.testing.assert_close(p.grad, hvd.allreduce(mine))
            else:
                assert p.grad is None
    optimizer.zero_grad()
    if hvd.rank() == 0:
        model(batch(9, 0), 0).sum().backward()
    optimizer.step()  # a step without backward on the other ranks
    assert model.branches[0].bias.grad.tolist() == [pytest.approx(5 / hvd.size())] * 3


@run_with_hvd(world=3)
def test_two_optimizers_in_different_orders_on_different_ranks():
    """As in training of adversaries: two backwards, whose buckets meet whatever rank is first with which."""
    models = [make_model(1), make_model(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
    for step in range(2):
        expected = [of_ranks(m, step) for m in models]
        order = [0, 1] if hvd.rank() == 1 else [1, 0]
        for i in order:
            loss_of(models[i], step).backward()
        for i in (0, 1):
            optimizers[i].step()
            assert all(map(torch.equal, gradients(models[i]), map(average, expected[i])))
            optimizers[i].zero_grad()


@run_with_hvd()
def test_it_is_an_optimizer_of_the_given_class():
    model, alone = make_model(), make_model()
    given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given.register_step_post_hook(lambda *_: calls.append(1))
    calls: list[int] = []
    optimizer = hvd.DistributedOptimizer(given, model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.param_groups[0]["momentum"] == 0.9
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    their_scheduler = torch.optim.lr_scheduler.StepLR(reference, step_size=1, gamma=0.5)
    for step in range(3):
        expected = of_ranks(alone, step)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        for p, each in zip(alone.parameters(), expected, strict=True):
            p.grad = average(each)
        reference.step()
        scheduler.step()
        their_scheduler.step()
        assert all(map(torch.equal, model.parameters(), alone.parameters()))
        optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [1, 1, 1]
    with pytest.raises(InvalidUsage, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    optimizer.set_backward_passes_per_step(2)
    loss_of(model, 7).backward()
    optimizer.zero_grad()
    loss_of(model, 7).backward()
    with pytest.raises(InvalidUsage, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()


@run_with_hvd()
def test_closures():
    """A closure's backward is averaged each time that it is called, as LBFGS calls it several times."""
    for kind, options in [("SGD", {"lr": 0.1}), ("LBFGS", {"lr": 0.1, "max_iter": 3})]:
        model, alone = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(getattr(torch.optim, kind)(model.parameters(), **options))
        reference = getattr(torch.optim, kind)(alone.parameters(), **options)
        calls = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = loss_of(model, 0)  # noqa: B023
            loss.backward()
            calls.append(1)  # noqa: B023
            return loss

        def closure_of_all() -> torch.Tensor:
            for p, each in zip(alone.parameters(), of_ranks(alone, 0), strict=True):  # noqa: B023
                p.grad = average(each)
            return loss_of(alone, 0)  # noqa: B023

        optimizer.step(closure)
        reference.step(closure_of_all)
        assert len(calls) == options.get("max_iter", 1)
        assert all(map(torch.equal, model.parameters(), alone.parameters()))


@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
@pytest.mark.parametrize("as_dense", [False, True])
@run_with_hvd()
def test_sparse_gradients(as_dense: bool, kind: str):
    """Beside a dense embedding; one rank has none in the last step. They stay sparse, as SparseAdam needs them."""
    torch.manual_seed(0)
    sparse, dense = nn.Embedding(7, 3, sparse=True), nn.Embedding(7, 3)
    dense.load_state_dict(sparse.state_dict())
    given = getattr(torch.optim, kind)(list(sparse.parameters()), lr=0.1)
    optimizer = hvd.DistributedOptimizer(given, sparse_as_dense=as_dense)
    stream = hvd.process_sets.calls().optimizers[-1]
    for step in range(4):
        rows = torch.tensor([hvd.rank(), 3, 3])
        optimizer.zero_grad()
        dense.zero_grad()
        if step < 3 or hvd.rank() == 0:
            sparse(rows).square().sum().backward()
            dense.load_state_dict(sparse.state_dict())
            dense(rows).square().sum().backward()
        own = torch.zeros(7, 3) if dense.weight.grad is None else dense.weight.grad
        expected = hvd.allreduce(own)
        optimizer.synchronize()
        assert sparse.weight.grad.layout is torch.sparse_coo
        assert torch.equal(sparse.weight.grad.to_dense(), expected)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert stream.sparse == ([] if as_dense else [0]), "they travel as they are"


@run_with_hvd()
def test_wrong_use():
    model = make_model()
    optimizer = sgd(model)
    loss_of(model, 0).backward()
    with pytest.raises(InvalidUsage, match=r"zero_grad\(\) between backward and step.*synchronize\(\)"):
        optimizer.zero_grad()
    with pytest.raises(InvalidUsage, match=r"step\(\) inside skip_synchronize\(\)"), optimizer.skip_synchronize():
        optimizer.step()
    with pytest.raises(InvalidUsage, match=r"join\(\) between backward and step\(\)"):
        hvd.join()
    with pytest.raises(InvalidUsage, match="load_state_dict"):
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(InvalidUsage, match=r"4.bias was computed more than 1 times .* backward_passes_per_step"):
        loss_of(model, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="optimizer.skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(InvalidUsage, match="create_graph"):
        loss_of(model, 0).backward(create_graph=True)


@pytest.mark.parametrize("case", ["average", "predivide"])
@run_with_hvd()
def test_a_gradient_that_is_changed_too_early(case: str):
    """It would be overwritten by the average of what it was, or be half of each."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **CASES[case][0])
    loss_of(model, 0).backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    hvd.barrier()  # whoever fails ends what the other has not finished
    with pytest.raises(InvalidUsage, match=r"was changed between backward and step\(\).*synchronize\(\) before"):
        loss_of(model, 0).backward()  # in which the other rank's error may come
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


@run_with_hvd()
def test_gradients_that_are_views_of_one_tensor():
    """Torch counts autograd's own writes to one of them as writes to all."""
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    flat_gradients(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        plain.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        loss_of(reference, step).backward()
        for parameter in reference.parameters():
            parameter.grad = hvd.allreduce(parameter.grad)
        plain.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


@run_with_hvd()
def test_arguments_that_are_refused():
    model = make_model()
    named = list(model.named_parameters())
    for options, match in [
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=hvd.Average"),
        ({"compression": object()}, "communication hooks"),
        ({"backward_passes_per_step": 0}, "from 1 on"),
        ({"named_parameters": model.parameters()}, "pairs of name and parameter"),
        ({"named_parameters": named[:-1]}, "lacks parameter 5 of the optimizer"),
        ({"named_parameters": [*named, named[0]]}, "0.weight more than once"),
        ({"num_groups": 1, "groups": 1}, "only one of them"),
        ({"groups": -1}, "number of groups"),
        ({"groups": [["a"]]}, "lists of parameters"),
        ({"process_set": object()}, "hvd.add_process_set"),
    ]:
        with pytest.raises(InvalidUsage, match=match):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    with pytest.raises(InvalidUsage, match="op=hvd.Average or op=hvd.Sum"):
        hvd.Adasum  # noqa: B018


@run_on_ranks()
def test_models_and_arguments_that_differ_are_named():
    for make, match in [
        (lambda: (nn.Linear(3, 2 + hvd.rank()), {}), r"weight: float32 \(2, 3\).*weight: float32 \(3, 3\)"),
        (lambda: (nn.Linear(3, 2), {"backward_passes_per_step": 1 + hvd.rank()}), "per_step=1.*per_step=2"),
    ]:
        hvd.init()
        model, options = make()
        with pytest.raises(Mismatch, match=match):
            sgd(model, **options)


def train_alone(steps: list[int]) -> list[torch.Tensor]:
    """The same, with zeros for those who have joined, divided by all."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(steps)):
        found = []
        for rank, own in enumerate(steps):
            model.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            found.append([p.grad.clone() if step < own else torch.zeros_like(p) for p in model.parameters()])
        for p, each in zip(model.parameters(), zip(*found, strict=True), strict=True):
            p.grad = average(list(each))
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("steps", "world"), [([1, 3], 2), ([3, 0], 2), ([2, 2], 2), ([0, 4, 2], 3)], ids=str)
@run_with_hvd()
def test_join(steps: list[int], world: int):
    """Each rank trains for its number of steps, and sums something else in between."""
    model = make_model()
    optimizer = sgd(model)
    for step in range(steps[hvd.rank()]):
        loss_of(model, step).backward()
        total = hvd.allreduce_async(torch.ones(3, 2), op=hvd.Sum)
        optimizer.step()
        optimizer.zero_grad()
        group = hvd.grouped_allreduce([torch.ones(2, dtype=torch.int64), torch.ones(3)])
        hvd.barrier()
        active = sum(step < own for own in steps)
        assert (hvd.synchronize(total)[0, 0].item(), group[0][0].item()) == (active, active // world)
    last = hvd.join()
    assert last == max(rank for rank in range(world) if steps[rank] == max(steps))
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()  # all goes on after it
    assert all(map(torch.equal, model.parameters(), train_alone(steps)))


NEED_ALL: dict[str, Callable[[], object]] = {
    "allgather": lambda: hvd.allgather(torch.ones(1)),
    "broadcast": lambda: hvd.broadcast(torch.ones(1), 0),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(2)),
    "broadcast_object": lambda: hvd.broadcast_object(3),
    "alltoall": lambda: hvd.alltoall(torch.ones(2)),
    "broadcast_parameters": lambda: hvd.broadcast_parameters([torch.ones(2)], 0),
    "DistributedOptimizer": lambda: sgd(nn.Linear(2, 1)),
}


@pytest.mark.parametrize("call", NEED_ALL)
@run_with_hvd()
def test_what_needs_all_ranks_is_refused_after_a_join(call: str):
    """Those who have joined go on; so do the others, but for this call."""
    if hvd.rank() != 1:
        with pytest.raises(InvalidUsage, match=rf"{call} needs every rank, but rank 1 has called join\(\)"):
            NEED_ALL[call]()
    assert hvd.join() == 0
    assert hvd.allgather_object(hvd.rank()) == [0, 1]


@run_with_hvd()
def test_a_scaler_waits_for_gradients():
    """Its unscale_ leaves no trace in gradients that are being reduced, which would be delivered scaled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 300), nn.Linear(300, 300))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for how in ("unscale_", "step", "synchronize"):
        before = [p.detach().clone() for p in model.parameters()]
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(syncengine.rank()))
        scaler.scale(model(x).sum()).backward()
        if how != "synchronize":
            with pytest.raises(InvalidUsage, match=r"scaler\.unscale_.*call optimizer\.synchronize\(\)"):
                getattr(scaler, how)(optimizer)
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        for p, start, own in zip(model.parameters(), before, expected, strict=True):
            grad = own.double()
            syncengine.all_reduce(grad, "avg")
            torch.testing.assert_close(p.grad.double(), grad, rtol=1e-4, atol=1e-5)
            assert torch.equal(p, start)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
