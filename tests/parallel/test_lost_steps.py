"""Errors that the user catches: which ranks lose the step, by which text, and that training goes on."""

import contextlib
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.workload import same_bits
from parallel_models import Mlp, assert_averaged, data, different_bits, gradients, outcome
from pool import RankPool, run_on_ranks
from raising_model import Bad, InBackward, Raising
from test_parallel_faults import Halves
from test_sparse_gradients import Functional
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.optim.optimizer import _global_optimizer_pre_hooks as step_hooks

import syncengine
from syncengine.errors import Aborted, InvalidUsage, PeerLost, SyncError


def assert_goes_on(model: nn.Module) -> None:
    """A step leaves averages."""
    model.zero_grad()
    model(data()).sum().backward()
    assert_averaged(model.module, model.module(data()).sum())


def lose_step(model: nn.Module, where: str) -> str:
    """What this rank is told of a step that it loses by its own error, or by another rank's where this has none."""
    model.module.where = where
    kind, text = outcome(lambda: model(data(1)).sum().backward())
    model.module.where = ""
    assert kind == ("Bad" if where else "Aborted"), (kind, text)
    return text


def raise_bad(*_: Any) -> None:
    raise Bad("at once")


@run_on_ranks(gloo=True)
def test_a_forward_that_is_pending_when_its_step_is_lost_says_so():
    """As contrastive pairs, or two losses: it is no forward that a backward has synchronized."""
    for container in (iter, list):  # outputs that are not found, and that are
        model = syncengine.Parallel(Raising())
        model.module.register_forward_hook(lambda module, inputs, out, container=container: container([out]))
        for where, reason in (("forward", "Bad: the batch is bad: forward"), ("middle", "backward aborted")):
            first = sum(model(data()))
            with model.module.raising(where):
                sum(model(data(1))).sum().backward()
            with pytest.raises(InvalidUsage, match=rf"given up \(.*{reason}\).*[Rr]un the forward again"):
                first.sum().backward()
            model.zero_grad()  # a refused backward through outputs that are not found has brought a gradient
            loss = sum(model(data(2))).sum()  # the next step is none of this
            loss.backward(retain_graph=True)
            assert_averaged(model.module, sum(model.module(data(2))).sum())
            with pytest.raises(InvalidUsage, match="already synchronized"):
                loss.backward()
    loss = sum(model(data())).sum()
    loss.backward(retain_graph=True)
    lose_step(model, "forward")  # which gives up none that was synchronized before
    with pytest.raises(InvalidUsage, match="already synchronized"):
        loss.backward()
    syncengine.barrier()


@pytest.mark.parametrize("world", [2, 3])
@run_on_ranks(gloo=True)
def test_a_refused_step_disturbs_no_call_of_the_users(world: int):
    """Rank 1 raises in forward; the others hear of that where they wait for this model, and not before."""
    model = syncengine.Parallel(Raising())
    with model.module.raising("forward" if syncengine.rank() == 1 else ""):
        loss = model(data()).sum()
    for _ in range(3):
        syncengine.all_reduce(ones := torch.ones(100))
        assert ones[7] == world
    other = syncengine.Parallel(Mlp())
    other(data()).sum().backward()
    if syncengine.rank() != 1:
        with pytest.raises(Aborted, match="rank 1 raised in forward: Bad"):
            loss.backward()
    assert_goes_on(model)


@pytest.mark.parametrize("asks", ["step", "evaluation"])
@pytest.mark.parametrize(("raising", "world"), [([0, 1], 2), ([1], 2), ([0, 2], 3), ([0, 1, 2], 3)])
@run_on_ranks()
def test_sums_outlive_an_error_in_forward_on_all_ranks_or_on_none(raising: list[int], asks: str, world: int):
    """There are gradients of a micro-batch under no_sync when some ranks raise in the forward behind it."""
    torch.manual_seed(0)
    module = Raising()
    model = syncengine.Parallel(module)
    kept = len(raising) == world
    # Where the sums are kept, an optimizer of other parameters steps, and must leave them.
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))] if kept else module.parameters(), 0.1)
    with model.no_sync():
        model(data(0)).square().mean().backward()
    hooks = len(step_hooks)  # those of who looks at steps always
    sums, weights = gradients(module), [p.detach().clone() for p in module.parameters()]
    raises = syncengine.rank() in raising
    lose_step(model, "forward" if raises else "")
    assert len(step_hooks) == hooks + raises
    assert all((p.grad is not None) == (kept or raises) for p in module.parameters())
    if asks == "step":
        optimizer.step()
    else:
        with torch.no_grad():
            model(data())
        assert len(step_hooks) == hooks
    assert all(map(same_bits, gradients(module), sums if kept else [None] * len(sums)))
    assert not different_bits([p.detach() for p in module.parameters()], weights)
    expected = [torch.autograd.grad(module(data(i)).square().mean(), list(module.parameters())) for i in (0, 2)]
    model(data(2)).square().mean().backward()
    assert len(step_hooks) == hooks
    for p, *own in zip(module.parameters(), *expected, strict=True):
        syncengine.all_reduce(mean := (own[0] + own[1] if kept else own[1]).clone(), "avg")
        torch.testing.assert_close(p.grad, mean)


@run_on_ranks(gloo=True)
def test_a_refusal_is_forgotten_with_its_communicator():
    """Other optimizers step, and the module is wrapped anew."""
    module = Raising()
    with module.raising("forward"):
        syncengine.Parallel(module)(data())
    dist.barrier()  # both have raised
    if syncengine.rank() == 1:
        with pytest.raises((Aborted, PeerLost)):  # rank 0's refusal may be read before it leaves, or after
            syncengine.barrier()
    syncengine.shutdown()
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], 1.0).step()
    assert other.tolist() == [0.0, 0.0]
    syncengine.init()
    assert_goes_on(syncengine.Parallel(module))


@pytest.mark.parametrize("most", [{0: 16, 1: 16}, {0: 100, 1: 8}, {0: 3, 1: 20}], ids=str)
@run_on_ranks(gloo=True)
def test_all_ranks_find_the_batch_size_that_fits_each(most: dict[int, int]):
    """As Accelerate's find_executable_batch_size: it goes by the error's text."""

    class Limited(Raising):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > most[syncengine.rank()]:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().forward(x)

    model = syncengine.Parallel(Limited())
    for size in (64, 32, 16, 8, 4, 2, 1):
        try:
            model.zero_grad()
            few, many = (torch.full((rows, 24), 1.0 + syncengine.rank()) for rows in (1, size))
            with model.no_sync():
                model(few).sum().backward()
            model(many).sum().backward()
            assert_averaged(model.module, model.module(few).sum() + model.module(many).sum())
            break
        except RuntimeError as error:
            if len(error.args) != 1 or " out of memory." not in error.args[0]:
                raise
    assert min(most.values()) / 2 < size <= min(most.values())  # one power of two


@pytest.mark.usefixtures("kinds_of_buckets")
@pytest.mark.parametrize("raising", [[1], [0, 1]], ids=str)
@run_on_ranks(gloo=True)
def test_an_error_in_forward_before_buffers_are_synchronized_costs_a_step(raising: list[int]):
    module = Raising()
    module.register_buffer("seen", torch.zeros(3))
    model = syncengine.Parallel(module)
    model._register_buffer_comm_hook(
        None, lambda _, buffers: syncengine.all_reduce(buffers["seen"]), _BufferCommHookLocation.POST_FORWARD
    )
    assert_goes_on(model)
    raises = syncengine.rank() in raising
    text = lose_step(model, "forward" if raises else "")
    assert text == ("" if raises else "rank 1 raised in forward: Bad: ") + "the batch is bad: forward"
    assert_goes_on(model)
    assert syncengine.default_communicator().exception() is None


@pytest.mark.parametrize("caught", [True, False])
@run_on_ranks(world=3, gloo=True, settings={"timeout": 20.0})
def test_a_rank_without_a_batch_follows_over_a_refused_step(caught: bool):
    """Rank 0 has no batch left, and follows; rank 1 raises in one of the others' steps."""
    model = syncengine.Parallel(Raising())
    rank, text = syncengine.rank(), ""
    with contextlib.suppress(*[] if caught else [Bad, Aborted]), model.join():
        for i in range(2 if rank == 0 else 5):
            model.module.where = "middle" if rank == 1 and i == 3 else ""
            try:
                model(data(i)).sum().backward()
            except (Bad, Aborted) as error:
                text = str(error)
                if not caught:
                    raise
    assert syncengine.default_communicator().exception() is None
    model.module.where = ""
    assert_goes_on(model)
    assert text == ("", "the batch is bad: middle", "rank 1: backward aborted")[rank]


def dies_after_refusing() -> list[str]:
    model = syncengine.Parallel(Raising())
    model(data()).sum().backward()
    if syncengine.rank() == 1:
        lose_step(model, "forward")
        os.kill(os.getpid(), signal.SIGKILL)
    texts = [lose_step(model, "") for _ in range(2)]  # the second one waits for rank 1 to end the step
    with pytest.raises(Aborted):
        syncengine.barrier()
    return texts


def test_a_rank_that_dies_after_it_has_refused_ends_the_others_with_its_reason(pool: RankPool):
    with pool.spawn_ranks(dies_after_refusing, world=3) as ranks:
        for rank in (0, 2):
            assert ranks[rank].result() == ["rank 1 raised in forward: Bad: the batch is bad: forward"] * 2


@run_on_ranks()
def test_a_rank_that_leaves_after_an_error_that_it_caught_says_so():
    model = syncengine.Parallel(Raising())
    syncengine.barrier()
    text = lose_step(model, "middle" if syncengine.rank() == 1 else "")
    assert ("the batch is bad" if syncengine.rank() == 1 else "rank 1: backward aborted") in text, text


@run_on_ranks()
def test_an_error_between_calls_that_others_wait_in_is_fatal_and_named():
    module = nn.Sequential(nn.Linear(24, 8), nn.SyncBatchNorm(8), nn.Identity())
    model = syncengine.Parallel(module)
    model(data()).sum().backward()
    if syncengine.rank() == 1:
        module[2].register_forward_pre_hook(raise_bad)
    with pytest.raises((Bad, SyncError)):
        model(data()).sum().backward()
    with pytest.raises(SyncError, match="rank 1 raised in forward: Bad: at once"):
        for _ in range(2):
            model(data()).sum().backward()


@run_on_ranks()
def test_a_bad_gradient_costs_a_step():
    """Which the reducer itself finds: it is sparse."""
    model = syncengine.Parallel(Functional())
    text = "Expected variable to have dense gradient: parameter table got a Sparse one"
    with pytest.raises(InvalidUsage, match=text):
        model(torch.tensor([1, 2]), True).sum().backward()
    model.zero_grad()
    model(torch.tensor([syncengine.rank()]), False).sum().backward()
    assert model.module.table.grad[:, 0].tolist() == [0.5, 0.5, 0, 0, 0]
    syncengine.barrier()


@run_on_ranks()
def test_an_error_when_only_sparse_gradients_are_missing_is_told():
    table = nn.Embedding(9, 24, sparse=True)
    model = syncengine.Parallel(nn.Sequential(table, nn.Linear(24, 2)))
    x, raises = torch.arange(5), syncengine.rank() == 0
    model(x).sum().backward()
    model.zero_grad()
    act = raise_bad if raises else lambda: None
    hook = table.register_forward_hook(lambda table, inputs, rows: InBackward.apply(rows, act))
    with pytest.raises(Bad if raises else Aborted, match="at once|rank 0: backward aborted"):
        model(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    hook.remove()
    model(x).sum().backward()
    assert table.weight.grad.is_sparse
    syncengine.barrier()


@run_on_ranks(gloo=True)
def test_an_unfinished_reduction_beside_an_error_costs_a_step():
    model = syncengine.Parallel(Halves())
    model(data()).sum().backward()
    if syncengine.rank() == 0:
        model(data(), both=False).sum().backward()
        with pytest.raises(InvalidUsage, match="Expected to have finished reduction"):
            model(data())
    else:
        with pytest.raises(Bad):  # before backward has reached the model: nobody hears of that
            InBackward.apply(model(data()), raise_bad).sum().backward()
        with pytest.raises(Aborted, match="rank 0: Expected to have finished reduction"):
            model(data()).sum().backward()
    assert_goes_on(model)


@run_on_ranks(world=3)
def test_the_weight_of_a_forward_that_raised_is_not_a_shadows():
    module = Raising()
    model = syncengine.Parallel(module)
    averages = [grad * (1 / 3) for grad in torch.autograd.grad(module(data()).sum(), list(module.parameters()))]
    with model.join():
        model.weight(3 + 2 * syncengine.rank())
        lose_step(model, "forward")
        if syncengine.rank() == 1:
            model(data()).sum().backward()
            assert all(map(torch.equal, gradients(module), averages))  # a shadow counts as a rank does, and adds zeros
    syncengine.barrier()


@run_on_ranks()
def test_an_error_in_forward_of_a_model_that_is_wholly_frozen_costs_nothing():
    """No rank waits for its gradients: not even one that has not raised."""
    module = Raising()
    model = syncengine.Parallel(module)
    kept = syncengine.default_communicator()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for i, raising in enumerate([(0, 1), (0,), ()]):
        optimizer.zero_grad()
        model(data(i)).square().mean().backward()
        optimizer.step()
        module.requires_grad_(False)
        with module.raising("forward" if syncengine.rank() in raising else ""):
            model(data(i).requires_grad_()).sum().backward()
        module.requires_grad_(True)
        module.zero_grad()
        module(data(i)).sum().backward()  # past the wrapper: averaged, as DDP still waits for one
        for parameter in module.parameters():
            syncengine.all_reduce(mean := parameter.grad.clone(), op="avg")
            assert torch.equal(mean, parameter.grad)
    assert syncengine.default_communicator() is kept
    assert kept.exception() is None
