"""Runs collectives between these ranks for a second, and checks every result."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import syncengine.communicator as default
from syncengine._C import Communicator
from syncengine.bench.collectives import Shape, count_wrong, engine_case
from syncengine.parallel import Parallel

SECONDS = 1.0
_TIMED_BYTES = 4 << 20
_REPEATS = 20

# Small and large tensors, aligned and not: (collective, dtype, op, elements of a rank's part, whether in shared memory)
_CASES = (
    ("all_reduce", torch.float32, "sum", 1, False),
    ("all_reduce", torch.float32, "avg", 257, False),
    ("all_reduce", torch.bfloat16, "sum", 100_003, False),
    ("all_reduce", torch.float32, "sum", 1 << 20, True),
    ("all_reduce", torch.int64, "max", 5000, False),
    ("all_gather", torch.float32, "sum", 10_007, False),
    ("reduce_scatter", torch.float64, "sum", 10_007, True),
    ("broadcast", torch.uint8, "sum", 100_000, False),
)


def run_self_test(timeout: float) -> dict[str, Any]:
    """This rank's outcome, for JSON. Raises what `init` and collectives raise. All ranks call it."""
    communicator = default.init(timeout=timeout)
    cases = [
        engine_case(Shape(name, communicator.size, count, dtype, op), communicator, shared)
        for name, dtype, op, count, shared in _CASES
    ]
    wrong: dict[str, int] = {}
    rounds, begin = 0, time.monotonic()
    while rounds == 0 or not _is_over(communicator, time.monotonic() - begin > SECONDS):
        for case in cases:
            wrong[case.shape.name] = wrong.get(case.shape.name, 0) + case.check(rounds, communicator)
        rounds += 1
    wrong["gradients of Parallel"] = _wrong_gradients(communicator)
    elapsed = time.monotonic() - begin
    timed = communicator.empty([_TIMED_BYTES // 4], torch.float32).zero_()
    outcome = {
        "collectives": rounds * len(cases),
        "seconds": elapsed,
        "wrong": {name: count for name, count in wrong.items() if count},
        "barrier_us": _median_us(communicator, communicator.barrier),
        "all_reduce_us": _median_us(communicator, lambda: communicator.all_reduce(timed)),
        "all_reduce_bytes": _TIMED_BYTES,
        "links": communicator.links,
    }
    default.shutdown()
    return outcome


def _is_over(communicator: Communicator, here: bool) -> bool:
    """Whether rank 0 says that the time is over: its clock counts for all ranks."""
    flag = torch.tensor([here], device="cpu")
    communicator.broadcast(flag, 0)
    return bool(flag.item())


def _wrong_gradients(communicator: Communicator) -> int:
    """Counts wrong elements of a gradient that Parallel averages: all were 2 * rank, so their mean is size - 1."""
    size = communicator.size
    linear = torch.nn.Linear(300, 20, dtype=torch.float32, device="cpu")
    model = Parallel(linear, process_group=communicator)
    model(torch.full((1, 300), float(2 * communicator.rank))).sum().backward()
    assert linear.weight.grad is not None
    return count_wrong(linear.weight.grad, torch.full((20 * 300,), float(size - 1)))


def _median_us(communicator: Communicator, call: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        communicator.barrier()
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)
