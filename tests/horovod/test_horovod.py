"""syncengine.horovod: the process, collectives, handles and objects, against a naive oracle."""

import math
import re

import pytest
import torch
from horovod_ranks import run_with_hvd
from pool import run_on_ranks
from torch.utils._pytree import tree_leaves

import syncengine
import syncengine.horovod as hvd
from syncengine.errors import InvalidUsage, Mismatch, SyncError

WORLDS = pytest.mark.parametrize("world", [2, 3])
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]


def of_rank(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    """Small whole numbers, so that every sum and product is exact."""
    return torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def oracle(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    stack = torch.stack([tensor.to(torch.float64) for tensor in tensors])
    reduced = {
        "Average": stack.mean(0),
        "Sum": stack.sum(0),
        "Min": stack.amin(0),
        "Max": stack.amax(0),
        "Product": stack.prod(0),
    }[op]
    return reduced.to(tensors[0].dtype)  # of integers: toward zero


@WORLDS
@run_with_hvd()
def test_reductions(world: int):
    for dtype in DTYPES:
        everyone = [of_rank(rank, dtype) for rank in range(hvd.size())]
        own = everyone[hvd.rank()]
        for name in ("Average", "Sum", "Min", "Max", "Product"):
            op, expected = getattr(hvd, name), oracle(name, everyone)
            torch.testing.assert_close(hvd.allreduce(own, op=op, name="x"), expected)
            in_place = own.clone()
            assert hvd.allreduce_(in_place, op=op) is in_place
            torch.testing.assert_close(in_place, expected)
            strided = torch.zeros(4, 3, dtype=dtype).t().copy_(own)
            hvd.synchronize(hvd.allreduce_async_(strided, op=op))
            torch.testing.assert_close(strided, expected)
        assert torch.equal(own, of_rank(hvd.rank(), dtype)), "the input stays"
        scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        torch.testing.assert_close(scaled, oracle("Sum", everyone))
    low = hvd.allreduce(torch.tensor([-3 - 2 * hvd.rank()]), prescale_factor=1.1)
    assert low.item() == math.trunc(sum(math.trunc(1.1 * (-3 - 2 * r)) for r in range(hvd.size())) / hvd.size())
    with pytest.warns(DeprecationWarning, match="average="):
        assert hvd.allreduce(torch.ones(()), average=False).item() == hvd.size()
    with pytest.warns(DeprecationWarning, match="op="):
        assert hvd.allreduce(torch.ones(2, 0), average=True).shape == (2, 0)


@run_with_hvd()
def test_inference_tensors_are_written_outside_of_inference_mode() -> None:
    everyone = [of_rank(rank, torch.int64) for rank in range(2)]
    total, average = oracle("Sum", everyone), oracle("Average", everyone)
    with torch.inference_mode():
        plain, scaled, grouped = (everyone[hvd.rank()].clone() for _ in range(3))
        strided, given = (torch.zeros(4, 3, dtype=torch.int64).t().copy_(plain) for _ in range(2))
        floats = plain.double()
    assert torch.equal(hvd.allreduce_(plain), average)
    assert torch.equal(hvd.allreduce_(scaled, op=hvd.Sum, postscale_factor=2.0), 2 * total)
    assert torch.equal(hvd.allreduce_(floats, op=hvd.Sum, prescale_factor=2.0), 2.0 * total)
    assert torch.equal(hvd.allreduce_(strided, op=hvd.Sum), total)
    assert torch.equal(hvd.grouped_allreduce_([grouped], op=hvd.Sum)[0], total)
    assert torch.equal(hvd.broadcast_(given, 1), everyone[1])


@WORLDS
@run_with_hvd()
def test_groups(world: int):
    shapes, dtypes = [(2,), (), (3, 1), (4,)], [torch.float32, torch.int64, torch.float32, torch.float64]
    everyone = [[of_rank(10 * rank + i, dtypes[i], shapes[i]) for i in range(4)] for rank in range(hvd.size())]
    own = everyone[hvd.rank()]
    expected = [oracle("Sum", list(tensors)) for tensors in zip(*everyone, strict=True)]
    for results in (
        hvd.grouped_allreduce(own, op=hvd.Sum, name="group"),
        hvd.synchronize(hvd.grouped_allreduce_async(own, op=hvd.Sum)),
        hvd.grouped_allreduce_([tensor.clone() for tensor in own], op=hvd.Sum),
    ):
        assert all(map(torch.equal, results, expected))
    compressed = hvd.grouped_allreduce(own[:1], compression=hvd.Compression.fp16, op=hvd.Sum)[0]
    assert compressed.dtype == torch.float32
    assert torch.equal(compressed, expected[0])


@WORLDS
@run_with_hvd()
def test_gather_and_broadcast(world: int):
    rank, size = hvd.rank(), hvd.size()
    for rows in ([2] * size, [3, 0, 5][:size], [0] * size):
        for dtype in (torch.float32, torch.bool, torch.complex64):
            everyone = [of_rank(r, dtype, (rows[r], 2)) for r in range(size)]
            assert torch.equal(hvd.allgather(everyone[rank], name="rows"), torch.cat(everyone))
    both = hvd.grouped_allgather([torch.tensor([rank]), torch.ones(rank, 3)], name="both")
    assert both[0].tolist() == list(range(size))
    assert both[1].shape == (sum(range(size)), 3)
    root = size - 1
    for dtype in (torch.float32, torch.bool, torch.complex64):
        own = of_rank(rank, dtype)
        assert torch.equal(hvd.broadcast(own, root, name="b"), of_rank(root, dtype))
        assert torch.equal(own, of_rank(rank, dtype))
        strided = torch.zeros(4, 3, dtype=dtype).t().copy_(own)
        assert hvd.broadcast_(strided, root) is strided
        assert torch.equal(strided, of_rank(root, dtype))
        assert torch.equal(hvd.synchronize(hvd.broadcast_async(own, root)), of_rank(root, dtype))
    answers = hvd.allgather_object({"rank": rank, "text": "x" * rank})
    assert answers == [{"rank": r, "text": "x" * r} for r in range(size)]
    assert hvd.broadcast_object([rank], root_rank=root) == [root]
    assert hvd.broadcast_object_fn(0)(rank) == 0
    handle = hvd.allreduce_async(torch.ones(1000), op=hvd.Sum)
    hvd.barrier()
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).sum() == 1000 * size


@WORLDS
@run_with_hvd()
def test_scatter(world: int):
    rank, size = hvd.rank(), hvd.size()
    for rows in (size, 2 * size + 1, 1):
        everyone = [of_rank(r, shape=(rows, 2)) for r in range(size)]
        part = hvd.reducescatter(everyone[rank], op=hvd.Sum)
        assert torch.equal(part, oracle("Sum", everyone).tensor_split(size)[rank])
    average = hvd.reducescatter(torch.full((size,), 4), postscale_factor=2.0)
    assert average.tolist() == [8]
    first, second = hvd.grouped_reducescatter([torch.ones(size), torch.ones(size, 2)], op=hvd.Sum, name="g")
    assert first.tolist() == [size]
    assert second.tolist() == [[size, size]]
    splits = [[(r + to) % 3 for to in range(size)] for r in range(size)]
    everyone = [of_rank(r, torch.int64, (sum(splits[r]), 2)) for r in range(size)]
    expected = [everyone[r].split(splits[r])[rank] for r in range(size)]
    received, counts = hvd.alltoall(everyone[rank], torch.tensor(splits[rank]), name="a")
    assert torch.equal(received, torch.cat(expected))
    assert counts.tolist() == [splits[r][rank] for r in range(size)]
    equal = hvd.alltoall(torch.arange(2.0 * size) + 100 * rank)
    assert equal.tolist() == [100.0 * r + 2 * rank + i for r in range(size) for i in range(2)]


@WORLDS
@run_with_hvd()
def test_autograd(world: int):
    """Against the definition: Horovod's backward of allgather and broadcast averages."""
    rank, size = hvd.rank(), hvd.size()
    weights = [of_rank(50 + r, torch.float64) for r in range(size)]

    def gradient(function, weight: torch.Tensor | float, shape: tuple[int, int] = (3, 4)) -> torch.Tensor:
        x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
        (function(x) * weight).sum().backward()
        return x.grad

    mean = torch.stack(weights).mean(0)
    torch.testing.assert_close(gradient(hvd.allreduce, weights[rank]), mean)
    summed = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0), weights[rank])
    torch.testing.assert_close(summed, 3 * size * mean)
    group = gradient(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], weights[rank])
    torch.testing.assert_close(group, size * mean)
    of_root = gradient(lambda x: hvd.broadcast(x, 1), weights[rank])
    torch.testing.assert_close(of_root, mean if rank == 1 else torch.zeros_like(mean))
    wide = [of_rank(70 + r, torch.float64, (3 * size, 4)) for r in range(size)]
    own_rows = torch.stack(wide).mean(0)[3 * rank : 3 * rank + 3]
    torch.testing.assert_close(gradient(hvd.allgather, wide[rank]), own_rows)
    sent = gradient(hvd.alltoall, rank + 1, (size, 2))
    assert sent.tolist() == [[r + 1.0] * 2 for r in range(size)]
    scattered = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), rank + 1, (size, 2))
    assert scattered.tolist() == [[size * (r + 1.0)] * 2 for r in range(size)], "Horovod's factor"
    scaled = gradient(lambda x: hvd.reducescatter(x, prescale_factor=3.0), rank + 1, (size, 2))
    assert scaled.tolist() == [[3 * (r + 1.0)] * 2 for r in range(size)], "Horovod's factor"


@run_on_ranks(environ={"SYNCENGINE_TIMEOUT": "60"})
def test_ranks():
    with pytest.raises(InvalidUsage, match=r"call hvd.init\(\) first"):
        hvd.rank()
    assert not hvd.is_initialized()
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (syncengine.rank(), 2)
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), 2)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert not hvd.mpi_enabled()
    with pytest.raises(InvalidUsage, match="not started by mpirun"):
        hvd.mpi_threads_supported()
    assert hvd.global_process_set.size() == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=hvd.global_process_set).item() == 2
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(InvalidUsage, match=r"call hvd.init\(\) first"):
        hvd.allreduce(torch.ones(1))


@run_with_hvd(hosts=["aba"], settings=None)
def test_ranks_on_two_hosts():
    known = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous())
    assert known == [(0, 2, 0, 2, False), (0, 1, 1, 2, False), (1, 2, 0, 1, False)][hvd.rank()]


def test_one_process_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    try:
        assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)
        x = torch.arange(3.0)
        assert torch.equal(hvd.allreduce(x), x)
        assert torch.equal(hvd.allgather(x), x)
        assert torch.equal(hvd.broadcast(x, 0), x)
        assert torch.equal(hvd.alltoall(x), x)
        assert hvd.allgather_object("a") == ["a"]
        assert hvd.join() == 0
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        before = model.weight.clone()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight, before - 0.1)
        with pytest.raises(InvalidUsage, match="only rank 0"):
            hvd.broadcast(x, 1)
    finally:
        hvd.shutdown()


def test_ranks_of_horovodrun_do_not_train_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    with pytest.raises(InvalidUsage, match="horovodrun has started this process as one of 4.*torchrun, mpirun or srun"):
        hvd.init()
    assert not hvd.is_initialized()


@run_with_hvd()
def test_wrong_use():
    for call, match in [
        (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "only one of them"),
        (lambda: hvd.allreduce(torch.ones(1), op="sum"), "not one of hvd.Average"),
        (lambda: hvd.allreduce(torch.ones(1, dtype=torch.bool), op=hvd.Sum), "hvd.Min"),
        (lambda: hvd.allreduce(torch.ones(1), process_set=object()), "hvd.add_process_set"),
        (lambda: hvd.reducescatter(torch.ones(())), r"reshape\(1\)"),
        (lambda: hvd.broadcast(torch.ones(1), 2), "ranks 0 to 1"),
        (lambda: hvd.broadcast_parameters(3, 0), "named_parameters"),
        (lambda: hvd.broadcast_parameters({"extra": 3}, 0), "hvd.broadcast_object"),
        (lambda: hvd.init(comm=[0, 1]), r"add_process_set\(ranks\)"),
        (lambda: hvd.init(process_sets="dynamc"), r'process_sets=.dynamc.\) is not allowed: .* or "dynamic"'),
        (lambda: hvd.poll(10**9), "is no handle"),
        (lambda: hvd.synchronize("x"), "is no handle"),
    ]:
        with pytest.raises(InvalidUsage, match=match):
            call()
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    assert hvd.synchronize(handle).item() == 2
    with pytest.raises(InvalidUsage, match=r"synchronized before.*once"):
        hvd.synchronize(handle)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hvd.nothing  # noqa: B018
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2, "all ranks have refused it, so nothing has begun"


MISMATCHES = {
    "shape": (
        lambda rank: hvd.allreduce(torch.ones(2 + rank), name="loss"),
        r"rank 0 called allreduce 'loss' of float32 \(2,\), op=Average, but rank 1 .* \(3,\)",
    ),
    "shape of the same size": (lambda rank: hvd.allreduce(torch.ones((6,) if rank else (2, 3))), r"\(2, 3\).* \(6,\)"),
    "dtype": (
        lambda rank: hvd.allreduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32)),
        "of float32 .* of int32 ",
    ),
    "name": (
        lambda rank: hvd.allreduce(torch.ones(2), name=f"loss.{rank}"),
        r"rank 0 called allreduce 'loss.0' .* rank 1 called allreduce 'loss.1' .* the same order",
    ),
    "op": (lambda rank: hvd.allreduce(torch.ones(2), op=[hvd.Min, hvd.Max][rank]), "op=Min.*op=Max"),
    "factor": (
        lambda rank: hvd.grouped_allreduce([torch.ones(2)], prescale_factor=1 / 3 + rank * 1e-9),
        r"prescale_factor=0\.3333333333.*prescale_factor=0\.3333333343",
    ),
    "call": (
        lambda rank: hvd.allreduce(torch.ones(2)) if rank == 0 else hvd.allgather(torch.ones(2)),
        "rank 0 called allreduce of .*rank 1 called allgather of",
    ),
    "root": (lambda rank: hvd.broadcast(torch.ones(2), rank), "root_rank=0.*root_rank=1"),
    "barrier": (lambda rank: hvd.barrier() if rank else hvd.allgather_object(3), "rank 1 called barrier"),
    "columns": (lambda rank: hvd.alltoall(torch.ones(4, 1 + rank)), "called alltoall of .* called alltoall of "),
    "parts": (lambda rank: hvd.reducescatter(torch.ones(4 + rank)), r"called reducescatter of .*\(4,\).*\(5,\)"),
    "row": (lambda rank: hvd.allgather(torch.ones(2, 2 + rank)), r"\(\*, 2\).*\(\*, 3\)"),
    "long": (lambda rank: hvd.allreduce(torch.ones(2), name="x" * 5000 + str(rank)), r"xxx\.\.\. [0-9a-f]+' of"),
    "parameters": (
        lambda rank: hvd.broadcast_parameters({"weight": torch.ones(2 + rank)}, 0),
        r"rank 0 has \[weight: float32 \(2,\)\], rank 1 has \[weight: float32 \(3,\)\]",
    ),
}


@run_with_hvd()
def test_mismatches_are_named_on_every_rank():
    """One after the other, named or not, without init() in between: each alone has failed."""
    communicator = syncengine.default_communicator()
    for case, (call, match) in MISMATCHES.items():
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call(hvd.rank())
        assert isinstance(caught.value, Mismatch)
        assert re.search(match, str(caught.value)), (case, str(caught.value))
        assert communicator.exception() is None
    hvd.init()
    assert syncengine.default_communicator() is communicator
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    assert hvd.HorovodInternalError is hvd.mpi_ops.HorovodInternalError is SyncError


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad", "LBFGS"])
@run_with_hvd()
def test_parameters_and_optimizer_state(kind: str):
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    options = {"SGD": {"momentum": 0.9}, "LBFGS": {"max_iter": 2}}.get(kind, {})
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1 * (hvd.rank() + 1), **options)
    if hvd.rank() == 1:
        for _ in range(2):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.randn(4, 3)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert math.isclose(optimizer.param_groups[0]["lr"], 0.2)
    leaves = tree_leaves([model.state_dict(), optimizer.state_dict()["state"]])
    first, second = hvd.allgather_object([leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)])
    assert len(first) == len(second) > 7
    assert all(map(torch.equal, first, second))


@run_with_hvd()
def test_a_scheduler_of_the_base_stays_attached():
    """As in Horovod, on the ranks that the state comes to as well."""
    model = torch.nn.Linear(3, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.1)
    optimizer = hvd.DistributedOptimizer(base)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    rates = []
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        rates += [optimizer.param_groups[0]["lr"], base.param_groups[0]["lr"]]
    assert optimizer.state is base.state
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])
