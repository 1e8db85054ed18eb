"""What belongs to a DistributedOptimizer ends with it; a parameter has one at a time."""

import gc
from unittest import mock

import pytest
import torch
from faults import Resources, memory_of_this_process
from horovod_ranks import run_with_hvd
from marks import mostly_nightly
from test_horovod_optimizer import add, average, gradients, loss_of, make_model, of_ranks, sgd, train_alone
from torch import nn

import syncengine
import syncengine.horovod as hvd
from syncengine.errors import Aborted, InvalidUsage, SyncError


@pytest.mark.thorough
@pytest.mark.parametrize("with_scheduler", mostly_nightly([False, True], 1))
@run_with_hvd(timeout=120)
def test_makings_leave_nothing(with_scheduler: bool):
    """What 1000 optimizers on one model leave: handles and threads, streams, hooks on a parameter, classes, bytes."""
    model = nn.Linear(3, 2)

    def make(count: int) -> None:
        for i in range(count):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            if with_scheduler:
                torch.optim.lr_scheduler.StepLR(optimizer, 1)  # a cycle: it lives until Python looks for such
            if i % 50 == 0:
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()

    def settle() -> None:
        gc.collect()
        make(2)  # each closes what was dropped before

    make(100)
    settle()
    before, bytes_before = Resources.now(), memory_of_this_process("Rss")
    classes_before = len(torch.optim.SGD.__subclasses__())
    make(1000)
    settle()
    left, grown = before.left(), memory_of_this_process("Rss") - bytes_before
    hooks = len(model.weight._post_accumulate_grad_hooks)
    assert left == []
    assert len(hvd.process_sets.calls().optimizers) <= 2
    assert hooks <= 2
    assert len(torch.optim.SGD.__subclasses__()) <= classes_before, "other tests have made some, too"
    assert grown < 2 * 2**20, "2 KiB for each"


@run_with_hvd()
def test_what_one_rank_alone_has_dropped_is_still_served():
    """As of a function that trains: its optimizer is gone when its rank joins, and the others still step by theirs."""
    model, steps = make_model(), [1, 3]

    def train() -> None:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(steps[hvd.rank()]):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    assert not hvd.process_sets.calls().optimizers[0].needed
    last = hvd.join()
    assert not hvd.process_sets.calls().optimizers
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    assert all(map(torch.equal, model.parameters(), train_alone(steps)))


@run_with_hvd()
def test_optimizers_dropped_on_one_rank_alone_stay_in_step():
    """Which are closed is agreed on: one rank still holds what the other has dropped."""
    models = [make_model(i) for i in range(3)]
    kept = []
    for model in models:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of(model, 0).backward()
        optimizer.step()
        if hvd.rank() == 0:
            kept.append(optimizer)
        del optimizer
    assert len(hvd.process_sets.calls().optimizers) == 3
    kept.clear()
    last = hvd.DistributedOptimizer(torch.optim.SGD(make_model(3).parameters(), lr=0.1))
    assert len(hvd.process_sets.calls().optimizers) == 1
    del last


@run_with_hvd()
def test_the_later_of_two_on_one_parameter_takes_over():
    """Also where Python still holds the earlier one: by a scheduler, or a name."""
    model = make_model()
    earlier = sgd(model, op=hvd.Sum)
    loss_of(model, 0).backward()
    earlier.step()
    earlier.zero_grad()
    scheduler = torch.optim.lr_scheduler.StepLR(earlier, 1)
    later = sgd(model, op=hvd.Sum)
    expected = of_ranks(model, 1)
    loss_of(model, 1).backward()
    with pytest.raises(InvalidUsage, match=r"0.weight is a parameter of a DistributedOptimizer made later.* made last"):
        earlier.step()
    later.step()
    assert all(map(torch.equal, gradients(model), map(add, expected)))
    later.zero_grad()
    with pytest.raises(InvalidUsage, match="made later"):
        earlier.step()
    with pytest.raises(InvalidUsage, match="made later"), earlier.skip_synchronize():
        earlier.step()
    scheduler.step()


@run_with_hvd()
def test_after_an_error_a_new_one_takes_over():
    """The earlier one, in the middle of its step, is still there."""
    model = make_model()
    earlier = sgd(model)
    loss_of(model, 0).backward()
    with pytest.raises(SyncError):
        hvd.barrier()
        syncengine.default_communicator().abort("by the test")
        earlier.step()
    hvd.init()
    model.zero_grad()
    later = sgd(model)
    expected = of_ranks(model, 1)
    loss_of(model, 1).backward()
    later.step()
    assert all(map(torch.equal, gradients(model), map(average, expected)))


@run_with_hvd()
def test_a_parameter_that_is_twice_in_a_group_counts_once():
    p = torch.zeros(70_000, requires_grad=True)  # reduced where its gradient lies
    with pytest.warns(UserWarning, match="duplicate parameters"):
        given = torch.optim.SGD([p, p], lr=0.1)
    optimizer = hvd.DistributedOptimizer(given, op=hvd.Sum)
    (p * (hvd.rank() + 1)).sum().backward()
    optimizer.synchronize()
    assert torch.equal(p.grad, torch.full_like(p, 3))


class InterruptedList(list[int]):
    """Raises behind its sixth element, as Ctrl-C does that comes between two lines."""

    def append(self, element: int) -> None:
        super().append(element)
        if len(self) == 6:
            raise KeyboardInterrupt


@run_with_hvd()
def test_a_step_goes_on_after_ctrl_c_in_the_last_hook_of_backward():
    model = make_model()
    optimizer = sgd(model)
    expected = of_ranks(model, 0)
    if hvd.rank() == 1:
        optimizer._gradients._step.order = InterruptedList()
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 0).backward()
    else:
        loss_of(model, 0).backward()
    optimizer.synchronize()
    assert all(map(torch.equal, gradients(model), map(average, expected)))


@run_with_hvd()
def test_ctrl_c_while_a_bucket_is_sent_ends_the_step_on_all_ranks():
    """The bucket is on its way, and its rank would send it once more."""
    model = make_model()
    optimizer = sgd(model)
    stream = optimizer._gradients._stream
    send = stream.reduce

    def interrupted(flat: torch.Tensor) -> None:
        send(flat)
        raise KeyboardInterrupt

    if hvd.rank() == 1:
        with mock.patch.object(stream, "reduce", interrupted), pytest.raises(KeyboardInterrupt):
            loss_of(model, 0).backward()
    with pytest.raises(Aborted, match=r"rank 1 was interrupted \(KeyboardInterrupt\) in a step of SGD"):
        if hvd.rank() == 0:
            loss_of(model, 0).backward()
        optimizer.synchronize()
