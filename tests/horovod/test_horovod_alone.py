"""What one rank alone raises in a call of all ranks: the others hear it, by its rank and its reason, and none waits."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
import torch
from pool import run_on_ranks
from test_horovod_newcomers import freeze
from test_horovod_newcomers import sgd as sgd_of_layers
from test_horovod_optimizer import average, batch, gradients, loss_of, make_model, of_ranks, sgd
from torch import nn

import syncengine
import syncengine.horovod as hvd
from syncengine.errors import Aborted, InvalidUsage, Mismatch, SyncError

SETTINGS = {"timeout": 20.0}


class Broken(hvd.Compression.fp16):
    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise ArithmeticError("too small for this")


def stay() -> None:
    """Until the others have heard: a rank that leaves may be missed before it is read."""
    with suppress(SyncError):
        hvd.barrier()


def optimizer_with(wrong: bool, **options: object) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(make_model().parameters(), lr=0.1), **options if wrong else {})


def state_of(wrong: bool, option: object = lambda step: step) -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    if wrong:
        optimizer.param_groups[0]["rate"] = option
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)


def rows(wrong: bool) -> torch.Tensor:
    """A scalar has none."""
    return torch.ones(()) if wrong else torch.ones(2)


TWICE = [[p := torch.ones(2, requires_grad=True)], [p]]

# What a rank calls, rightly or wrongly; the call's name, the class of the error on the others, and the reason.
CALLS: dict[str, tuple[Callable[[bool], object], str, type[SyncError], str]] = {
    "dtype": (
        lambda wrong: hvd.allreduce(torch.ones(2, dtype=torch.complex64 if wrong else torch.float32)),
        *("allreduce", InvalidUsage, "view_as_real"),
    ),
    "layout": (
        lambda wrong: hvd.allreduce_(torch.eye(2).to_sparse() if wrong else torch.eye(2)),
        *("allreduce", InvalidUsage, "to_dense"),
    ),
    "op": (lambda wrong: hvd.allreduce(torch.ones(2), op="sum" if wrong else None), "allreduce", InvalidUsage, "'sum'"),
    "no tensor": (
        lambda wrong: hvd.broadcast_(3 if wrong else torch.ones(2), 0),
        *("broadcast", InvalidUsage, "needs a tensor, not int"),
    ),
    "name": (
        lambda wrong: hvd.allreduce(torch.ones(2), name=3 if wrong else None),
        *("allreduce", InvalidUsage, "name=3 is no text"),
    ),
    "factor": (
        lambda wrong: hvd.allreduce(torch.ones(2), prescale_factor="2" if wrong else 2.0),
        *("allreduce", InvalidUsage, "factor of '2' is no number"),
    ),
    "compression": (
        lambda wrong: hvd.allreduce(torch.ones(2), compression=Broken if wrong else hvd.Compression.fp16),
        *("allreduce", Aborted, "ArithmeticError: too small for this"),
    ),
    "grouped_allreduce": (
        lambda wrong: hvd.grouped_allreduce([] if wrong else [torch.ones(2)]),
        *("grouped_allreduce", InvalidUsage, "one or more"),
    ),
    "allgather": (lambda wrong: hvd.allgather(rows(wrong)), "allgather", InvalidUsage, r"reshape\(1\)"),
    "grouped_allgather": (
        lambda wrong: hvd.grouped_allgather(3 if wrong else [torch.ones(2)]),
        *("grouped_allgather", InvalidUsage, "a list of one or more"),
    ),
    "alltoall": (
        lambda wrong: hvd.alltoall(torch.ones(4), splits=[1, 1] if wrong else None),
        *("alltoall", InvalidUsage, "add up to 4"),
    ),
    "reducescatter": (
        lambda wrong: hvd.reducescatter(rows(wrong)),
        *("reducescatter", InvalidUsage, "cuts along the first dimension"),
    ),
    "grouped_allgather_async": (
        lambda wrong: hvd.synchronize(hvd.grouped_allgather_async([torch.ones(2), rows(wrong), torch.ones(2)])),
        *("grouped_allgather", InvalidUsage, r"reshape\(1\)"),
    ),
    "a list with a name": (
        lambda wrong: hvd.grouped_allgather(3 if wrong else [torch.ones(2), torch.ones(2)], name="both"),
        *("grouped_allgather", InvalidUsage, "a list of one or more"),
    ),
    "the process set of a list": (
        lambda wrong: hvd.grouped_allgather([torch.ones(2)], process_set=[0] if wrong else None),
        *("grouped_allgather", InvalidUsage, "is no hvd.ProcessSet"),
    ),
    "sparse_allreduce_async": (
        lambda wrong: hvd.sparse_allreduce_async(torch.eye(2) if wrong else torch.eye(2).to_sparse(), "sparse")(),
        *("sparse_allreduce_async", InvalidUsage, "needs a sparse tensor"),
    ),
    "grouped_reducescatter": (
        lambda wrong: hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(2), rows(wrong)])),
        *("grouped_reducescatter", InvalidUsage, "cuts along the first dimension"),
    ),
    "barrier": (
        lambda wrong: hvd.barrier(process_set=[0] if wrong else None),
        *("barrier", InvalidUsage, "is no hvd.ProcessSet"),
    ),
    "broadcast": (
        lambda wrong: hvd.broadcast(torch.ones(2), 7 if wrong else 0),
        *("broadcast", InvalidUsage, "root_rank=7"),
    ),
    "broadcast_object": (
        lambda wrong: hvd.broadcast_object((lambda: 3) if wrong else None, root_rank=1),
        *("broadcast_object", Aborted, "pickle"),
    ),
    "allgather_object": (
        lambda wrong: hvd.allgather_object((lambda: 3) if wrong else None),
        *("allgather_object", Aborted, "pickle"),
    ),
    "broadcast_parameters": (
        lambda wrong: hvd.broadcast_parameters({"weight": torch.ones(2), **({"extra": 3} if wrong else {})}, 0),
        *("broadcast_parameters", InvalidUsage, "extra is of type int"),
    ),
    "expanded parameters": (
        lambda wrong: hvd.broadcast_parameters([torch.ones(1).expand(2) if wrong else torch.ones(2)], 0),
        *("broadcast_parameters", InvalidUsage, "elements that share memory"),
    ),
    "broadcast_optimizer_state": (state_of, "broadcast_optimizer_state", Aborted, "pickle"),
    "a state with other objects": (
        lambda wrong: state_of(wrong, Fraction(1, 2)),
        *("broadcast_optimizer_state", InvalidUsage, "more than tensors and numbers"),
    ),
    "DistributedOptimizer": (
        lambda wrong: optimizer_with(wrong, op=hvd.Min),
        *("DistributedOptimizer", InvalidUsage, "give hvd.Average or hvd.Sum"),
    ),
    "named_parameters": (
        lambda wrong: optimizer_with(wrong, named_parameters=[("one", torch.ones(2))]),
        *("DistributedOptimizer", InvalidUsage, "named_parameters lacks parameter 0"),
    ),
    "groups": (
        lambda wrong: hvd.DistributedOptimizer(torch.optim.SGD(TWICE[0], lr=0.1), groups=TWICE if wrong else TWICE[:1]),
        *("DistributedOptimizer", InvalidUsage, "more than one group"),
    ),
    "SyncBatchNorm": (
        lambda wrong: hvd.SyncBatchNorm(3)(torch.ones(3) if wrong else torch.ones(4, 3)),
        *("SyncBatchNorm", Aborted, "ValueError: expected at least 2D input"),
    ),
}


@pytest.mark.parametrize("case", CALLS)
@run_on_ranks(settings=SETTINGS)
def test_a_call_that_one_rank_can_not_make(case: str):
    hvd.init()
    call, name, kind, reason = CALLS[case]
    wrong = hvd.rank() == 1
    before = syncengine.default_communicator()
    with pytest.raises(Exception) as caught:
        call(wrong)
    said = str(caught.value)
    if wrong:
        assert re.search(reason.partition(": ")[2] or reason, said), said
    else:
        assert type(caught.value) is kind, repr(caught.value)
        assert re.match(rf"rank 1 in {name}, while rank 0 called .*: .*{reason}", said), said
    hvd.init()
    assert syncengine.default_communicator() is before, "this call alone has failed"
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@run_on_ranks(world=3, settings=SETTINGS)
def test_what_all_ranks_refuse_has_not_happened():
    """Also if they refuse different calls, and while one of them is in join()."""
    hvd.init()
    for joined in (False, True):
        if joined and hvd.rank() == 0:
            assert hvd.join() == 2
            return
        for _ in range(3):
            with pytest.raises(InvalidUsage, match="one or more" if hvd.rank() == 1 else "give splits="):
                hvd.grouped_allreduce([]) if hvd.rank() == 1 else hvd.alltoall(torch.ones(4))
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == (2 if joined else 3)
    assert hvd.join() == 2


@run_on_ranks(settings=SETTINGS)
def test_a_handle_that_another_rank_has_refused_is_at_its_end():
    hvd.init()
    if hvd.rank() == 1:
        with pytest.raises(InvalidUsage, match=r"^allreduce: dtype"):
            hvd.allreduce_async(torch.ones(2, dtype=torch.complex64))
        stay()
    else:
        handle = hvd.allreduce_async(torch.ones(2))
        while not hvd.poll(handle):
            pass
        with pytest.raises(InvalidUsage, match="rank 1 in allreduce"):
            hvd.synchronize(handle)


@run_on_ranks(settings=SETTINGS)
def test_parameters_on_one_rank_alone_are_a_mismatch():
    hvd.init()
    with pytest.raises(Mismatch, match=r"rank 0 called .*tensors on cpu, but rank 1 called .*tensors on no device"):
        hvd.broadcast_parameters([] if hvd.rank() == 1 else [torch.ones(2)], 0)


class Words(nn.Module):
    """The gradient of `embedding` comes last, when a large one is on its way already if there is `large`."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 300)
        self.linear = nn.Linear(300, 300 if large else 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(x)).square().mean()


@pytest.mark.parametrize("large", [False, True])
@run_on_ranks(settings=SETTINGS)
def test_a_gradient_that_one_rank_can_not_bring(large: bool):
    hvd.init()
    wrong = hvd.rank() == 1
    model = Words(large=large)
    optimizer = sgd(model)
    hvd.barrier()  # the other rank has made its own
    x = torch.tensor([1, 2])

    for said in ("has a graph of its own", "") if wrong else ("^rank 1 in .*has a graph of its own",):
        with pytest.raises(InvalidUsage, match=said):
            model(x).backward(create_graph=wrong)
            optimizer.step()
        model.zero_grad()
    stay()


@run_on_ranks(settings=SETTINGS)
def test_a_gradient_that_one_rank_takes_away():
    hvd.init()
    model = make_model()
    optimizer = sgd(model, groups=1)
    hvd.barrier()
    wrong = hvd.rank() == 1
    if wrong:
        model[0](batch(0, 1)).sum().backward()  # so that the only bucket is not complete
        model[0].weight.grad = None
    else:
        loss_of(model, 0).backward()
    with pytest.raises(InvalidUsage, match="0.weight was set to None between backward") as caught:
        optimizer.step()
    assert wrong or str(caught.value).startswith("rank 1 in ")
    stay()


@run_on_ranks(settings=SETTINGS)
def test_a_new_optimizer_while_one_rank_is_in_a_step():
    hvd.init()
    model = make_model()
    earlier = sgd(model)
    wrong = hvd.rank() == 1
    if wrong:
        loss_of(model, 0).backward()
    with pytest.raises(InvalidUsage, match=r"between backward and step\(\)") as caught:
        sgd(model)
    assert wrong or str(caught.value).startswith("rank 1 in DistributedOptimizer, while rank 0 called")
    stay()
    del earlier


@run_on_ranks(settings=SETTINGS)
def test_the_state_of_an_optimizer_in_a_step_is_refused_on_the_root_too():
    """Which it would not disturb: but the others can't take it."""
    hvd.init()
    model = make_model()
    optimizer = sgd(model)
    expected = of_ranks(model, 0)
    loss_of(model, 0).backward()
    with pytest.raises(InvalidUsage, match=r"broadcast_optimizer_state\(\) between backward and step"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer.step()
    assert all(map(torch.equal, gradients(model), map(average, expected)))


@run_on_ranks(settings=SETTINGS)
def test_a_newcomer_that_has_another_optimizer_on_one_rank():
    hvd.init()
    model = make_model()
    freeze(model, 2)
    first, second = sgd_of_layers(model, 0, 2), sgd_of_layers(model, 4, 2)
    model[2].requires_grad_(True)
    loss_of(model, 1).backward()
    first.step()
    wrong = hvd.rank() == 1
    if not wrong:
        del first
    with pytest.raises(InvalidUsage, match="2.weight needs a gradient now") as caught:
        second.step()
    assert wrong or str(caught.value).startswith("rank 1 in add_param_group or requires_grad_, while rank 0 called")
    stay()


@run_on_ranks(settings=SETTINGS)
def test_join_between_backward_and_step_of_one_rank():
    """Those who have joined serve its step when it comes; those who have not are told."""
    hvd.init()
    model = make_model()
    optimizer = sgd(model)
    if hvd.rank() == 1:
        loss_of(model, 0).backward()
        with pytest.raises(InvalidUsage, match=r"join\(\) between backward and step"):
            hvd.join()
        optimizer.step()
    assert hvd.join() == 1
    if hvd.rank() == 1:
        loss_of(model, 0).backward()
    with pytest.raises(InvalidUsage, match=r"join\(\) between backward and step") as caught:
        hvd.join() if hvd.rank() == 1 else hvd.barrier()
    assert hvd.rank() == 1 or str(caught.value).startswith("rank 1 in join, while rank 0 called barrier")
    stay()
