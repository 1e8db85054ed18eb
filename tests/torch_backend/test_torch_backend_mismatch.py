"""The torch.distributed backend "syncengine": calls that differ between ranks, which Gloo and NCCL don't see."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pool import run_on_ranks
from torch.distributed import ReduceOp
from torch_backend_values import ours

from syncengine.errors import InvalidUsage, Mismatch

Call = Callable[[dist.ProcessGroup], object]


def sizes_of(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


def coalesced(*sizes: int) -> Call:
    return lambda group: dist.all_reduce_coalesced(sizes_of(*sizes), group=group)


def through_manager(*sizes: int) -> Call:
    def call(group: dist.ProcessGroup) -> None:
        with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu")):
            for tensor in sizes_of(*sizes):
                dist.all_reduce(tensor, group=group)

    return call


def gather_coalesced(*sizes: int) -> Call:
    return lambda group: dist.all_gather_coalesced([sizes_of(*sizes), sizes_of(*sizes)], sizes_of(*sizes), group)


def gather_of_parts(*sizes: int) -> Call:
    return lambda group: dist.all_gather(sizes_of(*sizes), torch.ones(sizes[dist.get_rank()]), group)


def scatter_of_parts(*sizes: int) -> Call:
    return lambda group: dist.reduce_scatter(torch.ones(sizes[dist.get_rank()]), sizes_of(*sizes), group=group)


def broadcasts(*sizes: int) -> Call:
    return lambda group: [dist.broadcast(t, root, group) for root, t in enumerate(sizes_of(*sizes))]


def all_reduce(op: ReduceOp.RedOpType = ReduceOp.SUM, dtype: torch.dtype = torch.float32) -> Call:
    return lambda group: dist.all_reduce(torch.ones(4, dtype=dtype), op, group)


def reduce(root: int, op: ReduceOp.RedOpType = ReduceOp.SUM, dtype: torch.dtype = torch.float32) -> Call:
    return lambda group: dist.reduce(torch.ones(4, dtype=dtype), root, op, group)


def reduce_scatter_of_bits(group: dist.ProcessGroup) -> None:
    ones = torch.ones(4, dtype=torch.int32)
    dist.reduce_scatter_tensor(ones[:2].clone(), ones, ReduceOp.BOR, group)


def by_root(call: Callable[..., object], root: int, size: int = 3) -> Call:
    def rooted(group: dist.ProcessGroup) -> None:
        parts = list(torch.ones(dist.get_world_size(), size))
        call(torch.ones(size), parts if dist.get_rank() == root else None, root, group)

    return rooted


gather, scatter = partial(by_root, dist.gather), partial(by_root, dist.scatter)


def all_to_all(group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty(4), torch.ones(4), group=group)


OR = ReduceOp.BOR, torch.int32
PREMUL_SUM = dist._make_nccl_premul_sum(2.0)
# What rank 0 and what rank 1 calls, and what is said of it, whichever of them notices.
DIFFERENT: dict[str, tuple[Call, Call, str]] = {
    "sizes of all_reduce_coalesced": (coalesced(2, 4), coalesced(4, 2), "all_reduce_coalesced(2 tensors of "),
    "sizes with nothing": (coalesced(2, 0, 4), coalesced(2, 4, 0), "all_reduce_coalesced(3 tensors of "),
    "sizes in a manager": (through_manager(2, 4), through_manager(4, 2), "all_reduce_coalesced(2 tensors of "),
    "all_reduce, coalesced": (coalesced(4), coalesced(2, 2), "where rank "),
    "sizes of all_gather_coalesced": (gather_coalesced(2, 4), gather_coalesced(4, 2), "all_gather_coalesced(2 tensors"),
    "sizes of all_gather": (gather_of_parts(2, 4), gather_of_parts(2, 5), "all_gather(2 tensors of 2, "),
    "all_gather, broadcasts": (gather_of_parts(2, 4), broadcasts(2, 4), "where rank "),
    "sizes of reduce_scatter": (scatter_of_parts(2, 4), scatter_of_parts(4, 2), "reduce_scatter(2 tensors of "),
    "reduce_scatter, coalesced": (scatter_of_parts(2, 4), coalesced(2, 4), "(2 tensors of 2, 4 elements)"),
    "roots of reduce": (reduce(0), reduce(1), "called reduce(sum, to rank 0 of the group, float32, 4 elements)"),
    "reduce, all_reduce": (reduce(0), all_reduce(), "called reduce(sum, to rank 0 of the group, float32, 4 elements)"),
    "roots of reduce of bits": (reduce(0, *OR), reduce(1, *OR), "called reduce(bitwise, to rank "),
    "reduce of bits, all_reduce": (reduce(1, *OR), all_reduce(*OR), "to rank 1 of the group"),
    "reduce_scatter of bits, all_reduce": (reduce_scatter_of_bits, all_reduce(*OR), "(bitwise) where rank "),
    "factor, none": (all_reduce(PREMUL_SUM), all_reduce(), "all_reduce(sum, float32, 4 elements)"),
    "factor, none, in reduce": (reduce(0, PREMUL_SUM), reduce(0), "reduce(sum, to rank 0 of the group"),
    "bits": (all_reduce(*OR), all_reduce(ReduceOp.BAND, torch.int32), "all_reduce(bitwise"),
    "average of integers": (all_reduce(ReduceOp.AVG, torch.int64), all_reduce(dtype=torch.int64), "all_reduce(sum"),
    "extremum of bools": (all_reduce(dtype=torch.bool), all_reduce(ReduceOp.MAX, torch.bool), "all_reduce(max, bool"),
    "all are roots of gather": (gather(0), gather(1), "called gather(to rank 0 of the group)"),
    "others are roots of gather": (gather(1), gather(0), "called gather(to rank 0 of the group)"),
    "others are roots of large gathers": (gather(1, 5000), gather(0, 5000), "called gather(to rank 1 of the group)"),
    "all are roots of scatter": (scatter(0), scatter(1), "called scatter(from rank 0 of the group)"),
    "others are roots of scatter": (scatter(1), scatter(0), "called scatter(from rank 0 of the group)"),
    "roots of large scatters": (scatter(0, 5000), scatter(1, 5000), "called scatter(from rank 1 of the group)"),
    "gather, scatter": (gather(1), scatter(1), "called gather(to rank 1 of the group)"),
    "gather, reduce": (gather(1), reduce(1), "called gather(to rank 1 of the group)"),
    "scatter, barrier": (scatter(0), dist.barrier, "called scatter(from rank 0 of the group)"),
    "all_to_all, barrier": (all_to_all, dist.barrier, "called all_to_all"),
}


BETWEEN_HOSTS = [how for how in DIFFERENT if "gather," in how or "roots of" in how]


@pytest.mark.parametrize(("how", "hosts"), [(how, "aa") for how in DIFFERENT] + [(how, "ab") for how in BETWEEN_HOSTS])
@run_on_ranks(gloo=True, settings=None)
def test_a_call_that_differs_is_a_mismatch(how: str, hosts: str):
    group = ours()
    with pytest.raises(Mismatch, match=re.escape(DIFFERENT[how][2])):
        DIFFERENT[how][dist.get_rank()](group)
        dist.barrier(group)  # a call may need nothing of others


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("how", ["gather", "scatter"])
@run_on_ranks(world=3, gloo=True, settings=None)
def test_roots_are_compared_between_all_ranks_by_the_call_itself(how: str, asynchronous: bool):
    """Of 3 ranks, where the last one means another root: one of the two others sees nothing of that by messages."""
    group, rank = ours(), dist.get_rank()
    root, parts = (1 if rank == 2 else 0), list(torch.zeros(3, 2))
    mine = parts if rank == root else None
    with pytest.raises(Mismatch) as error:
        work = getattr(dist, how)(torch.ones(2), mine, root, group, async_op=asynchronous)
        if asynchronous:
            work.wait()
    assert f"rank 2 called {how}(" in str(error.value)
    assert "rank 1 of the group)" in str(error.value)


@run_on_ranks(gloo=True, settings=None)
def test_tensors_in_another_order_are_not_touched_nor_others():
    """The arena's first fit puts the tensors one after the other: what is written beyond one is in the next."""
    group, rank = ours(), dist.get_rank()
    communicator = group._get_backend(torch.device("cpu")).communicator
    sizes = (4096, 4096, 8192, 4096)
    tensors = [communicator.empty([size], torch.float32).fill_(rank + 1.0) for size in sizes]
    first, _, second, _ = tensors
    dist.barrier()
    with pytest.raises(Mismatch, match="all_reduce_coalesced"):
        dist.all_reduce_coalesced([first, second] if rank == 0 else [second, first], group=group)
        dist.barrier(group)
    assert [tensor.unique().tolist() for tensor in tensors] == [[rank + 1.0]] * 4


@pytest.mark.parametrize(
    "how", ["gather", "scatter", "all_to_all", "all_to_all_single", "refused gather", "refused scatter"]
)
@run_on_ranks(gloo=True, settings=None)
def test_a_wrong_call_does_not_write_what_a_rank_sends_itself(how: str):
    """What a rank of a wrong call sends itself; the other one calls something else, or this one is refused."""
    group, rank, other = ours(), dist.get_rank(), 1 - dist.get_rank()
    outputs, inputs = list(torch.zeros(2, 3)), list(torch.ones(2, 3))
    if how == "refused gather":
        outputs[other] = torch.zeros(3).to_sparse()
    elif how == "refused scatter":
        inputs[other] = torch.ones(3).to_sparse()
    with pytest.raises(InvalidUsage if "refused" in how else Mismatch):
        if "gather" in how:
            dist.gather(inputs[rank], outputs, rank, group)
        elif "scatter" in how:
            dist.scatter(outputs[rank], inputs, rank, group)
        elif rank == 1:
            dist.barrier(group)
        elif how == "all_to_all":
            dist.all_to_all(outputs, inputs, group)
        else:
            whole = torch.zeros(2, 3)
            outputs = list(whole)
            dist.all_to_all_single(whole, torch.ones(2, 3), group=group, async_op=True).wait()
    assert outputs[rank].tolist() == [0.0] * 3
