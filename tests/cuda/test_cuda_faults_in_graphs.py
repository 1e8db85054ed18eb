"""A rank fails while others replay a captured step of Parallel: streams end, on NaN; the next eager call says who."""

import functools
import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cuda_ranks import marked, run_processes
from cuda_training import deterministic, graph_step
from parallel_models import Mlp

import syncengine
from syncengine.errors import SyncError

GOOD, ALL = 5, 20  # replays: those that rank 1 is there for, and the survivors' all


def fails_between(number: int, replay: Callable[[], None]) -> None:
    """When all have the averages of the good steps, and nobody has begun with another."""
    for _ in range(GOOD):
        replay()
    torch.cuda.synchronize()
    for peer in range(dist.get_world_size()):
        if peer != 1:
            dist.recv(torch.empty(1), peer)
    os.kill(os.getpid(), number)


def fails_within(number: int, replay: Callable[[], None]) -> None:
    """Somewhere in replays that are queued."""
    reached = torch.cuda.Event()
    for turn in range(ALL):
        replay()
        if turn == GOOD:
            reached.record()
    reached.synchronize()
    os.kill(os.getpid(), number)


def survives(rank: int, number: int, within: bool) -> list[str]:
    """The errors of a survivor's next calls."""
    deterministic()
    dist.init_process_group("gloo")
    syncengine.init(timeout=15.0)  # connecting, with a CUDA context to be made, takes some of it
    torch.manual_seed(0)
    model = syncengine.Parallel(Mlp().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(6, 24, device="cuda")
    for _ in range(4):
        graph_step(model, optimizer, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = graph_step(model, optimizer, x)

    parameters = list(model.parameters())
    begin = [p.detach().clone() for p in parameters]
    right = []  # what the same replays give without a fault
    for _ in range(ALL):
        graph.replay()
        right.append([p.detach().clone() for p in parameters])
    with torch.no_grad():
        torch._foreach_copy_(parameters, begin)
    if rank == 1:
        (fails_within if within else fails_between)(number, graph.replay)

    for turn in range(ALL):
        if turn == GOOD and not within:
            dist.send(torch.zeros(1), 1)
        graph.replay()  # nothing asks: no error
        torch.cuda.synchronize()  # no stream waits for ever
        for p, q in zip(parameters, right[turn], strict=True):
            assert (p.isnan() | (p == q)).all(), f"replay {turn} trained on gradients that were not reduced"
            assert within or p.isnan().all() == (turn >= GOOD), f"replay {turn}"
    assert loss.isnan() and all(p.isnan().all() for p in parameters)
    said = []
    for call in (lambda: model(x), lambda: syncengine.all_reduce(torch.ones(1, device="cuda")), syncengine.barrier):
        with pytest.raises(SyncError) as error:
            call()
        said.append(f"{type(error.value).__name__}: {error.value}")
    return said


@marked
@pytest.mark.parametrize(
    ("hosts", "number", "within", "error"),
    [
        ("aa", signal.SIGKILL, False, "PeerLost: "),
        ("aaa", signal.SIGKILL, False, "PeerLost: "),
        ("aa", signal.SIGKILL, True, "PeerLost: "),
        ("aaa", signal.SIGKILL, True, "PeerLost: "),
        ("aa", signal.SIGSTOP, False, "Timeout: "),
        ("ab", signal.SIGKILL, False, "PeerLost: "),
        ("ab", signal.SIGKILL, True, "PeerLost: "),
    ],
)
def test_a_rank_fails_while_others_replay(hosts: str, number: int, within: bool, error: str):
    body = functools.partial(survives, number=number, within=within)
    for said in run_processes(len(hosts), body, killed=1, hosts=hosts)[::2]:  # all but rank 1
        assert all(text.startswith(error) and "rank 1" in text for text in said), said
