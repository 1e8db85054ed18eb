"""What Horovod's own tests of its torch interface ask for beyond the values of collectives."""

import sys
import threading
import time
import weakref
from types import FrameType

import pytest
import torch
from horovod_ranks import run_with_hvd
from pool import run_on_ranks
from test_horovod import of_rank

import syncengine.horovod as hvd
from syncengine.errors import InvalidUsage, Mismatch
from syncengine.horovod.streams import Plan

SETTINGS = {"timeout": 20.0}

STARTS = {
    "allreduce": lambda: hvd.allreduce_async(torch.ones(4), name="same"),
    "allgather": lambda: hvd.allgather_async(torch.ones(4), name="same"),
    "broadcast": lambda: hvd.broadcast_async(torch.ones(4), 0, name="same"),
    "reducescatter": lambda: hvd.reducescatter_async(torch.ones(4), name="same"),
    "alltoall": lambda: hvd.alltoall_async(torch.ones(4), name="same"),
}


@pytest.mark.parametrize("call", STARTS)
@run_with_hvd(settings=SETTINGS)
def test_a_second_operation_of_a_name_that_is_under_way(call: str):
    """One rank at first, while the other is at another call; so the calls meet by their names."""
    handle = None
    for turn in (0, 1):
        if hvd.rank() == turn:
            handle = STARTS[call]()
            with pytest.raises(ValueError, match="Requested to allreduce, allgather, or broadcast a tensor with the"):
                STARTS[call]()
        hvd.barrier()
    hvd.synchronize(handle)
    hvd.synchronize(STARTS[call]())


@run_with_hvd(world=3, settings=SETTINGS)
def test_named_calls_in_another_order_on_each_rank():
    names = [f"gradient.{i}" for i in range(7)]
    handles = {}
    for i in range(7):
        at = (i * (1 + hvd.rank()) + hvd.rank()) % 7
        handles[at] = hvd.allreduce_async(torch.full((3 + at,), float(hvd.rank())), name=names[at], op=hvd.Sum)
    for at in sorted(handles, reverse=hvd.rank() == 1):
        assert torch.equal(hvd.synchronize(handles[at]), torch.full((3 + at,), 3.0))


@run_with_hvd(settings=SETTINGS)
def test_an_operation_moves_while_its_rank_does_something_else():
    """The other rank's call ends although this one makes no further call."""
    store = hvd.process_sets.engine.default_communicator().split([0, 1])
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
        store.barrier()
        assert hvd.synchronize(handle).tolist() == [2.0] * 3
    else:
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
        store.barrier()


@pytest.mark.parametrize(
    "call", ["allreduce", "gather", "broadcast", "reducescatter", "sparse", "barrier", "optimizer"]
)
@run_with_hvd(world=3, settings=SETTINGS)
def test_process_sets(call: str):
    rank = hvd.rank()
    even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([1]))
    assert (even.size(), odd.size()) == (2, 1)
    own = even if rank % 2 == 0 else odd
    members = own.ranks
    assert own.rank() == members.index(rank)
    assert own.included()
    everyone = [of_rank(r, torch.float64, (4, 2)) for r in members]
    mine = everyone[own.rank()].requires_grad_()
    total = torch.stack([e.detach() for e in everyone]).sum(0)
    if call == "allreduce":
        result = hvd.allreduce(mine, op=hvd.Sum, process_set=own)
        result.sum().backward()
        assert torch.equal(mine.grad, torch.full((4, 2), float(len(members)), dtype=torch.float64))
        assert torch.equal(result, total)
        assert torch.equal(hvd.grouped_allreduce([mine], op=hvd.Sum, process_set=own)[0], total)
    elif call == "gather":
        result = hvd.allgather(mine, process_set=own)
        assert torch.equal(result, torch.cat(everyone))
        result.sum().backward()
        assert torch.equal(mine.grad, torch.ones(4, 2, dtype=torch.float64))
        got, counts = hvd.alltoall(mine.detach(), [4 // len(members)] * len(members), process_set=own)
        assert counts.tolist() == [4 // len(members)] * len(members)
        parts = [e.detach().chunk(len(members))[own.rank()] for e in everyone]
        assert torch.equal(got, torch.cat(parts))
    elif call == "broadcast":
        assert torch.equal(hvd.broadcast(mine, members[-1], process_set=own), everyone[-1])
        assert hvd.broadcast_object(rank, members[0], process_set=own) == members[0]
        assert hvd.allgather_object(rank, process_set=own) == members
        hvd.broadcast_parameters([mine], members[-1], process_set=own)
        assert torch.equal(mine, everyone[-1])
        with pytest.raises(InvalidUsage, match="root_rank=7, but there are ranks"):
            hvd.broadcast(mine, 7, process_set=own)
    elif call == "reducescatter":
        part = hvd.reducescatter(mine, op=hvd.Sum, process_set=own)
        assert torch.equal(part, total.tensor_split(len(members))[own.rank()])
        part.sum().backward()
        assert torch.equal(mine.grad, torch.full((4, 2), float(len(members)), dtype=torch.float64))
    elif call == "sparse":
        result = hvd.sparse_allreduce_async(mine.detach().to_sparse(), "s", hvd.Average, own)()
        torch.testing.assert_close(result.to_dense(), total / len(members))
    elif call == "barrier":
        everybody = hvd.process_sets.engine.default_communicator()
        if own is even:
            everybody.barrier()  # until rank 1 has been through its set's barrier
        hvd.barrier(own)
        if own is odd:
            everybody.barrier()
    elif call == "optimizer":
        model = torch.nn.Linear(2, 1)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=even)
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        optimizer.step()
        assert model.weight.grad.tolist() == [[2.0, 2.0]], "the average of 1 and 3 in the set, 2 outside"
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    with pytest.raises(InvalidUsage, match="Attempted to add a duplicate process set"):
        hvd.add_process_set([2, 0])
    other = odd if own is even else even
    with pytest.raises(InvalidUsage, match=f"rank {rank} is not in ProcessSet"):
        hvd.allreduce(torch.ones(1), process_set=other)
    assert hvd.remove_process_set(odd)
    assert hvd.remove_process_set(even)
    assert not hvd.remove_process_set(even)
    assert even.size() is None
    with pytest.raises(InvalidUsage, match="was not added, or is gone"):
        hvd.allreduce(torch.ones(1), process_set=own)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(InvalidUsage, match="was not added, or is gone"):  # on rank 1, too, which was none of `even`
        hvd.DistributedOptimizer(optimizer, process_set=even)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


@run_on_ranks(settings=SETTINGS)
def test_sets_given_to_init_and_join_in_them():
    own = hvd.ProcessSet([0, 1])
    with pytest.raises(InvalidUsage, match="duplicate"):
        hvd.init(process_sets=[own])
    hvd.shutdown()
    one = hvd.ProcessSet([1])
    hvd.init(process_sets=[one])
    assert one.size() == 1
    if hvd.rank() == 1:
        assert hvd.allreduce(torch.ones(1), process_set=one).item() == 1
    assert hvd.join() == 1


@run_with_hvd(settings=SETTINGS)
def test_what_is_no_tensor_is_refused_by_name():
    calls = ("allreduce", "allreduce_", "allreduce_async", "allgather", "alltoall", "reducescatter", "broadcast")
    for value in (None, [1.0, 2.0], 3):
        for name in calls:
            arguments = (0,) if name == "broadcast" else ()
            with pytest.raises(InvalidUsage, match=f"^{name.removesuffix('_async').rstrip('_')} needs a tensor, not"):
                getattr(hvd, name)(value, *arguments)
        for name in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"):
            with pytest.raises(InvalidUsage, match=f"^{name} needs a"):
                getattr(hvd, name)(value)
        with pytest.raises(InvalidUsage, match="needs a sparse tensor"):
            hvd.sparse_allreduce_async(value)
    for root in (None, "0", 1.5):
        with pytest.raises(InvalidUsage, match="root_rank="):
            hvd.broadcast(torch.ones(1), root)
    with pytest.raises(InvalidUsage, match="must be whole numbers"):
        hvd.alltoall(torch.ones(2), torch.ones(2))
    with pytest.raises(InvalidUsage, match="needs an optimizer"):
        hvd.DistributedOptimizer(None)
    with pytest.raises(InvalidUsage, match="needs an optimizer"):
        hvd.broadcast_optimizer_state(None, 0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@run_with_hvd(settings=SETTINGS)
def test_memory_of_an_operation_in_place_is_free_once_it_is_synchronized():
    x = torch.ones(4, 4)
    handle = hvd.allreduce_async_(x.t()[1:], op=hvd.Sum)
    for again in (x, x[:, 1], x.view(-1)[5:]):
        with pytest.raises(InvalidUsage, match=r"another operation still writes this tensor.*hvd.synchronize"):
            hvd.allreduce_async_(again, op=hvd.Sum)
    assert hvd.allreduce(x[0, :1], op=hvd.Sum).item() == 2
    hvd.synchronize(handle)
    assert hvd.allreduce_(x, op=hvd.Sum)[0].tolist() == [2.0, 4.0, 4.0, 4.0]


@run_with_hvd(settings=SETTINGS)
def test_memory_of_an_operation_in_place_is_free_once_it_has_failed():
    """Also if it did not even begin."""
    x = torch.ones(4)
    for call in (
        lambda: hvd.allreduce_(x[: 2 + hvd.rank()]),
        lambda: hvd.grouped_allreduce_([x[: 2 + hvd.rank()], torch.ones(1)]),
        lambda: hvd.synchronize(hvd.broadcast_async_(x, hvd.rank())),
        lambda: hvd.barrier() if hvd.rank() else hvd.allreduce_(x),
    ):
        with pytest.raises(Mismatch):
            call()
        assert hvd.allreduce_(x.fill_(1), op=hvd.Sum).tolist() == [2.0] * 4
    handle = hvd.allreduce_async(x, name="same")
    with pytest.raises(InvalidUsage, match="with the same name"):
        hvd.allreduce_async_(x, name="same")
    hvd.synchronize(handle)
    assert hvd.allreduce_(x.fill_(1), op=hvd.Sum).tolist() == [2.0] * 4


@run_with_hvd(settings=SETTINGS)
def test_what_is_just_being_begun_has_not_ended():
    """It begins on another thread, once the other rank has come."""
    entered, begun = threading.Event(), []

    def begin(_: object) -> tuple[()]:
        entered.set()
        time.sleep(0.5)
        begun.append(True)
        return ()

    time.sleep(0.2 * hvd.rank())
    operation = hvd.process_sets.calls().submit("slow", None, Plan(begin=begin), watched=True)
    entered.wait()
    completed = operation.is_completed()
    assert begun or not completed
    operation.result()


@run_with_hvd(settings=SETTINGS)
def test_nothing_is_kept_of_a_call_with_a_name():
    """Names that a script makes once (`f"loss.{step}"`) would fill the memory."""
    kept = []
    for call in (hvd.allreduce, hvd.allgather, lambda x, name: hvd.synchronize(hvd.allreduce_async_(x, name=name))):
        x = torch.ones(3)
        result = call(x, name="once")
        kept += [weakref.ref(x), weakref.ref(result)]
        del x, result
    assert [each() for each in kept] == [None] * 6


@run_with_hvd(settings=SETTINGS)
def test_parameters_have_names():
    model = torch.nn.Linear(2, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    names = set(optimizer._parameter_names.values())
    assert len(names) == 2
    assert hvd.allgather_object(names) == [names, names]


@run_with_hvd(settings=SETTINGS)
def test_an_allreduce_takes_few_calls_of_python():
    """Among others those of a step of a script that averages its metrics."""
    x, calls = torch.ones(8), 0
    hvd.allreduce(x)

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    hvd.barrier()
    sys.setprofile(count)
    hvd.allreduce(x)
    sys.setprofile(None)
    assert calls <= 30
