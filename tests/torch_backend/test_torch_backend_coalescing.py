"""The torch.distributed backend "syncengine": calls that one thread coalesces, beside others' calls."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import run_on_ranks
from torch_backend_values import equal, ours

from syncengine.errors import InvalidUsage


def in_thread(body: Callable[[], None]) -> None:
    """Runs it to its end in another thread."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@run_on_ranks(world=2, gloo=True, settings=None)
def test_each_thread_coalesces_its_own_calls() -> None:
    group, rank = ours(), dist.get_rank()
    backend = group._get_backend(torch.device("cpu"))
    backend._start_coalescing()
    assert backend.allreduce([mine := torch.ones(3, 2).t()]) is None

    def other() -> None:
        tensor = torch.ones(2)
        backend.allreduce([tensor]).wait()  # begun outside of the coalescing
        assert equal(tensor, torch.full((2,), 2.0))
        backend._start_coalescing()
        assert backend.allreduce([tensor]) is None
        backend._end_coalescing().wait()
        assert equal(tensor, torch.full((2,), 4.0))

    in_thread(other)
    assert equal(mine, torch.ones(2, 3))
    assert backend.allreduce([last := torch.full((2,), float(rank))]) is None
    backend._end_coalescing().wait()
    assert equal(mine, torch.full((2, 3), 2.0))
    assert equal(last, torch.ones(2))


@run_on_ranks(world=2, gloo=True, settings=None)
def test_a_thread_does_not_inherit_what_one_before_left_open() -> None:
    group = ours()
    backend = group._get_backend(torch.device("cpu"))
    for _ in range(20):  # one of them gets the number that the system gave one before
        in_thread(backend._start_coalescing)

        def other() -> None:
            dist.all_reduce(tensor := torch.ones(2), group=group)
            assert equal(tensor, torch.full((2,), 2.0))

        in_thread(other)


@run_on_ranks(world=2, gloo=True, settings=None)
def test_what_an_error_ends_has_its_results_all_the_same() -> None:
    group = ours()
    backend = group._get_backend(torch.device("cpu"))
    for how in ("refused", "refused on one rank", "begun anew"):
        strided, plain = torch.ones(3, 2).t(), torch.ones(2)
        backend._start_coalescing()
        backend.allreduce([strided])
        backend.allreduce([plain])
        if how == "begun anew":
            backend._start_coalescing()
            backend._end_coalescing()
        elif how == "refused" or dist.get_rank() == 0:
            with pytest.raises(InvalidUsage):
                backend.allreduce([torch.ones(2).to_sparse()])
        else:
            backend._end_coalescing().wait()
        dist.barrier(group)
        assert equal(plain, torch.full((2,), 2.0)), how
        assert equal(strided, torch.full((2, 3), 2.0)), how
    for _ in range(2):  # one that nobody ends goes with the group
        backend._start_coalescing()
        backend.allreduce([strided])
    dist.destroy_process_group(group)
