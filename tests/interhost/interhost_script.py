"""One rank under mpirun: cases of test_interhost_mpi.py, each with the hosts on which the ranks are to live.

    interhost_script.py train:aab raise_on_last:aab

Prints how they ended, as one line of JSON.
"""

import json
import os
import signal
import sys
import tempfile
import time
from unittest import mock

import test_hosts
import torch
import torch.distributed as dist
from faults import live_on, my_rank, suffer
from test_hosts import leave_in_the_middle, start, use_everything
from two_groups import as_under_ddp

import syncengine
from syncengine.interhost.mpi import MPIPacketTransport


def train(hosts):
    """The bits are those of one host."""
    for numerics in ("rank_order", "ring"):
        trained = test_hosts.train(hosts, numerics)
        syncengine.shutdown()
        test_hosts.check_trained([trained], [test_hosts.train("a" * len(hosts), numerics)])
        syncengine.shutdown()


def raise_on_last(hosts):
    live_on(hosts)

    def body(step):
        syncengine.all_reduce(torch.ones(10))
        if syncengine.rank() == len(hosts) - 1:
            syncengine.default_communicator().abort("rank 3: ValueError: the data set is empty")
        syncengine.all_reduce(torch.ones(10))

    outcome = suffer(body, timeout=100.0)
    return [outcome.error, outcome.text]


def beside_own_messages(hosts):
    """The program's own messages, of the same tag."""
    from mpi4py import MPI

    communicator = start(hosts, checksum=True)
    world, rank = MPI.COMM_WORLD, communicator.rank
    sent, got = torch.full((1000,), float(rank)), torch.empty(1000)
    requests = [
        world.Isend(sent.numpy(), (rank + 1) % world.size, tag=21090),
        world.Irecv(got.numpy(), (rank - 1) % world.size, tag=21090),
    ]
    for _ in range(5):
        tensor = torch.full((300_000,), float(rank))
        syncengine.all_reduce(tensor, "avg")
        assert tensor.eq((world.size - 1) / 2).all()
        world.Barrier()
    MPI.Request.Waitall(requests)
    assert got.eq((rank - 1) % world.size).all()


def a_packet_that_fails(hosts):
    """A packet longer than the memory for it: it fails at the receiver, and has not arrived."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    transport, rank = MPIPacketTransport(MPI, comm), comm.Get_rank()
    posts, ends = [(7, 1 - rank, rank == 0, memoryview(bytearray(64 if rank == 0 else 16)))], []
    while not ends:
        ends, posts = transport.step(posts), []
    return ends


def train_over_two_groups(hosts):
    from mpi4py import MPI

    live_on(hosts)
    world = MPI.COMM_WORLD
    store = dist.FileStore(world.bcast(tempfile.mkstemp()[1] if world.rank == 0 else None), world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    with mock.patch.dict(os.environ, SYNCENGINE_TIMEOUT="10"):
        as_under_ddp(with_default=False)
    syncengine.shutdown()
    dist.destroy_process_group()


def finalize_first(hosts):
    from mpi4py import MPI

    start(hosts)
    syncengine.barrier()
    time.sleep(0.5)  # what the barrier has sent must have left: its own rank does not wait for that
    MPI.Finalize()
    try:
        while True:
            syncengine.all_reduce(torch.ones(10))
    except syncengine.errors.SyncError as error:
        return [type(error).__name__, str(error)]


def leave_while_one_is_stopped(hosts):
    """With transfers under way and no answer to the Goodbye. MPI's own end must not wait for any of them."""
    communicator = start(hosts, timeout=4.0)
    pid = torch.tensor([os.getpid()])
    last = len(hosts) - 1
    syncengine.broadcast(pid, last)
    outcome = ""
    try:
        syncengine.barrier()  # all have the number; who stops after it may keep others in here
        if communicator.rank == last:
            os.kill(os.getpid(), signal.SIGSTOP)
        syncengine.all_reduce(torch.ones(3_000_000))
    except syncengine.errors.SyncError as error:
        outcome = f"{type(error).__name__}: {error}"
    del communicator
    before = time.monotonic()
    syncengine.shutdown()
    left_within = time.monotonic() - before
    if my_rank() == 0:
        os.kill(pid.item(), signal.SIGCONT)
    return [outcome, left_within]


def kill_last(hosts):
    communicator = start(hosts)
    for count in range(1_000_000):
        syncengine.all_reduce(torch.ones(10_000))
        if count == 50 and communicator.rank == len(hosts) - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def init_only(hosts, interhost=None):
    live_on(hosts)
    outcome = suffer(lambda step: None, timeout=20.0, interhost=interhost)
    return [outcome.error, outcome.text]


def name_tcp_on_rank_1(hosts):
    return init_only(hosts, "tcp" if my_rank() == 1 else None)


CASES = [use_everything, train, raise_on_last, beside_own_messages, leave_in_the_middle, finalize_first]
CASES += [a_packet_that_fails, train_over_two_groups, leave_while_one_is_stopped, kill_last, init_only]
CASES += [name_tcp_on_rank_1]

if __name__ == "__main__":
    cases = {case.__name__: case for case in CASES}
    answers = []
    for argument in sys.argv[1:]:
        name, hosts = argument.split(":")
        answers.append(cases[name](hosts))
        if argument != sys.argv[-1]:
            syncengine.shutdown()
    answer = {"rank": my_rank(), "answers": answers}
    os.write(1, json.dumps(answer).encode() + b"\n")
