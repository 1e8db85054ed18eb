"""Training on devices that can't reach each other. What else comes of them is in tests/cuda/software/peers_test.cpp.

On the device in software alone, which has several, and refuses what it is told to.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cuda_ranks import SOFTWARE, marked, run_processes
from cuda_training import job
from models.workload import same_bits
from test_cuda_equality import FOREACH, Run, train
from torch.nn.parallel import DistributedDataParallel

import syncengine

pytestmark = pytest.mark.skipif(not SOFTWARE, reason="only the software device refuses peer access when it is told to")


@contextmanager
def lines_on_stderr() -> Iterator[list[str]]:
    """Fills the list at the end, with what the process wrote there by any way."""
    lines: list[str] = []
    before = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += [line.strip() for line in file]


def trains_without_peer_access(rank: int) -> tuple[list[bool], int, set[str]]:
    runs = [Run(), Run(dtype=torch.bfloat16), Run(optimizer=FOREACH, accumulate=2)]
    with lines_on_stderr() as lines, job():
        assert torch.cuda.current_device() == rank
        tensor = syncengine.empty(1000, device="cuda").fill_(rank)
        syncengine.all_reduce(tensor)
        assert tensor.eq(1.0).all()
        staged = syncengine.default_communicator().counters()["cuda_host_staging"]
        same = []
        for run in runs:
            ours, theirs = train(syncengine.Parallel, run), train(DistributedDataParallel, run)
            same.append(len(ours) == len(theirs) and all(map(same_bits, ours, theirs)))
    return same, staged, {line for line in lines if line.startswith("syncengine")}


@marked
def test_without_peer_access_training_has_ddps_bits_and_a_line_says_whose_and_why():
    refused = {"CUDA_VISIBLE_DEVICES": "0,1", "SOFTWARE_CUDA_PEERS": "refused"}
    line = (
        "syncengine: without peer access CUDA tensors go through pinned host memory: "
        "rank 0 can't use the memory of rank 1; rank 1 that of rank 0: cudaErrorPeerAccessUnsupported"
    )
    first, second = run_processes(2, trains_without_peer_access, environ=refused)
    assert first == ([True] * 3, 1, {line})
    assert second == ([True] * 3, 1, set())
