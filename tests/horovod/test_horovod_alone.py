"""What one rank alone raises in a call of all ranks: the others hear it, by its rank and its reason, and none waits."""

import re
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
import torch
from horovod_ranks import run_with_hvd
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
        raise ArithmeticError("tiny")


def stay() -> None:
    """Until the others have heard: a rank that leaves may be missed before it is read."""
    with suppress(SyncError):
        hvd.barrier()


def optimizer_with(**options: object) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(make_model().parameters(), lr=0.1), **options)


def send_state(more: dict[str, object]) -> None:
    """Broadcasts the state of an optimizer that has these options, too."""
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    optimizer.param_groups[0].update(more)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)


def groups_of(times: int) -> torch.optim.Optimizer:
    """The only parameter is in so many groups."""
    p = torch.ones(2, requires_grad=True)
    return hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), groups=[[p]] * times)


ONES, SCALAR, COMPLEX = torch.ones(2), torch.ones(()), torch.ones(2, dtype=torch.complex64)
SPARSE = ONES.to_sparse()

# By the call's name, perhaps with more words: the call, which argument is right, which is wrong, and the reason.
REFUSED: dict[str, tuple[Callable[[Any], object], Any, Any, str]] = {
    "allreduce: dtype": (hvd.allreduce, ONES, COMPLEX, "view_as_real"),
    "allreduce: layout": (hvd.allreduce_, torch.ones(2), SPARSE, "to_dense"),
    "allreduce: op": (lambda op: hvd.allreduce(ONES, op=op), None, "sum", "'sum'"),
    "allreduce: name": (lambda name: hvd.allreduce(ONES, name=name), None, 3, "name=3 is no text"),
    "allreduce: factor": (lambda x: hvd.allreduce(ONES, prescale_factor=x), 2.0, "2", "factor of '2' is no number"),
    "broadcast": (lambda root: hvd.broadcast(ONES, root), 0, 7, "root_rank=7"),
    "broadcast: no tensor": (lambda x: hvd.broadcast_(x, 0), torch.ones(2), 3, "needs a tensor, not int"),
    "grouped_allreduce": (hvd.grouped_allreduce, [ONES], [], "one or more"),
    "allgather": (hvd.allgather, ONES, SCALAR, r"reshape\(1\)"),
    "grouped_allgather": (hvd.grouped_allgather, [ONES], 3, "a list of one or more"),
    "grouped_allgather: name": (lambda x: hvd.grouped_allgather(x, name="x"), [ONES] * 2, 3, "a list of one or more"),
    "grouped_allgather: set": (
        lambda members: hvd.grouped_allgather([ONES], process_set=members),
        *(None, [0], "is no hvd.ProcessSet"),
    ),
    "grouped_allgather: async": (
        lambda x: hvd.synchronize(hvd.grouped_allgather_async([ONES, x, ONES])),
        *(ONES, SCALAR, r"reshape\(1\)"),
    ),
    "alltoall": (lambda splits: hvd.alltoall(torch.ones(4), splits=splits), None, [1, 1], "add up to 4"),
    "reducescatter": (hvd.reducescatter, ONES, SCALAR, "cuts along the first dimension"),
    "grouped_reducescatter": (
        lambda x: hvd.synchronize(hvd.grouped_reducescatter_async([ONES, x])),
        *(ONES, SCALAR, "cuts along the first dimension"),
    ),
    "sparse_allreduce_async": (lambda x: hvd.sparse_allreduce_async(x, "s")(), SPARSE, ONES, "needs a sparse tensor"),
    "barrier": (lambda members: hvd.barrier(process_set=members), None, [0], "is no hvd.ProcessSet"),
    "broadcast_parameters": (
        lambda more: hvd.broadcast_parameters({"weight": torch.ones(2), **more}, 0),
        *({}, {"extra": 3}, "extra is of type int"),
    ),
    "broadcast_parameters: expanded": (
        lambda x: hvd.broadcast_parameters([x], 0),
        *(torch.ones(2), torch.ones(1).expand(2), "elements that share memory"),
    ),
    "broadcast_optimizer_state: objects": (send_state, {}, {"rate": Fraction(1, 2)}, "more than tensors and numbers"),
    "DistributedOptimizer": (lambda op: optimizer_with(op=op), hvd.Average, hvd.Min, "give hvd.Average or hvd.Sum"),
    "DistributedOptimizer: names": (
        lambda named: optimizer_with(named_parameters=named),
        *(None, [("one", torch.ones(2))], "named_parameters lacks parameter 0"),
    ),
    "DistributedOptimizer: groups": (groups_of, 1, 2, "more than one group"),
}
ABORTED: dict[str, tuple[Callable[[Any], object], Any, Any, str]] = {
    "allreduce": (lambda x: hvd.allreduce(ONES, compression=x), hvd.Compression.fp16, Broken, "ArithmeticError: tiny"),
    "broadcast_object": (lambda x: hvd.broadcast_object(x, root_rank=1), None, lambda: 3, "pickle"),
    "allgather_object": (hvd.allgather_object, None, lambda: 3, "pickle"),
    "broadcast_optimizer_state": (send_state, {}, {"rate": lambda step: step}, "pickle"),
    "SyncBatchNorm": (lambda x: hvd.SyncBatchNorm(3)(x), torch.eye(3), ONES, "ValueError: expected at least 2D input"),
}


@pytest.mark.parametrize("case", [*REFUSED, *ABORTED])
@run_with_hvd(settings=SETTINGS)
def test_a_call_that_one_rank_can_not_make(case: str):
    call, right, wrong, reason = {**REFUSED, **ABORTED}[case]
    before = syncengine.default_communicator()
    with pytest.raises(Exception) as caught:
        call(wrong if hvd.rank() == 1 else right)
    said = str(caught.value)
    if hvd.rank() == 1:
        assert re.search(reason.partition(": ")[2] or reason, said), said
    else:
        assert type(caught.value) is (InvalidUsage if case in REFUSED else Aborted), repr(caught.value)
        name = case.partition(":")[0]
        assert re.match(rf"rank 1 in {name}, while rank 0 called .*: .*{reason}", said), said
    hvd.init()
    assert syncengine.default_communicator() is before, "this call alone has failed"
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@run_with_hvd(world=3, settings=SETTINGS)
def test_what_all_ranks_refuse_has_not_happened():
    """Also if they refuse different calls, and while one of them is in join()."""
    for joined in (False, True):
        if joined and hvd.rank() == 0:
            assert hvd.join() == 2
            return
        for _ in range(3):
            with pytest.raises(InvalidUsage, match="one or more" if hvd.rank() == 1 else "give splits="):
                hvd.grouped_allreduce([]) if hvd.rank() == 1 else hvd.alltoall(torch.ones(4))
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == (2 if joined else 3)
    assert hvd.join() == 2


@run_with_hvd(settings=SETTINGS)
def test_a_handle_that_another_rank_has_refused_is_at_its_end():
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


@run_with_hvd(settings=SETTINGS)
def test_parameters_on_one_rank_alone_are_a_mismatch():
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
@run_with_hvd(settings=SETTINGS)
def test_a_gradient_that_one_rank_can_not_bring(large: bool):
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


@run_with_hvd(settings=SETTINGS)
def test_a_gradient_that_one_rank_takes_away():
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


@run_with_hvd(settings=SETTINGS)
def test_a_new_optimizer_while_one_rank_is_in_a_step():
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


@run_with_hvd(settings=SETTINGS)
def test_the_state_of_an_optimizer_in_a_step_is_refused_on_the_root_too():
    """Which it would not disturb: but the others can't take it."""
    model = make_model()
    optimizer = sgd(model)
    expected = of_ranks(model, 0)
    loss_of(model, 0).backward()
    with pytest.raises(InvalidUsage, match=r"broadcast_optimizer_state\(\) between backward and step"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer.step()
    assert all(map(torch.equal, gradients(model), map(average, expected)))


@run_with_hvd(settings=SETTINGS)
def test_a_newcomer_that_has_another_optimizer_on_one_rank():
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


@run_with_hvd(settings=SETTINGS)
def test_join_between_backward_and_step_of_one_rank():
    """Those who have joined serve its step when it comes; those who have not are told."""
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
