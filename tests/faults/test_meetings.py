"""A rank ends, and others meet: all of them hear of it, whatever they meet for, and none waits for its deadline."""

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import FAULT, live_on, my_rank, needs_hooks, wait_for_failure, wait_for_file
from marks import mostly_nightly
from parallel_models import Mlp
from pool import RankPool
from refusals import needs_seccomp, refuse

import syncengine
import syncengine.horovod as hvd
from syncengine.errors import PeerLost, SyncError
from syncengine.groups import existing_communicator
from syncengine.launch import arrivals

DEADLINE = 50.0  # seconds; who waits for it raises Timeout
DEAD = 1


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("shard 1 is empty")
    if how == "exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(137)
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does that has no memory left


def await_end(folder: str) -> None:
    """Of the rank's process: what is left is a zombie, until the test looks."""
    wait_for_file(Path(folder, "pid"))
    stat = Path(f"/proc/{Path(folder, 'pid').read_text()}/stat")
    with contextlib.suppress(OSError):
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)


def gather(folder: str, name: str, world: int) -> None:
    """Blocks until all ranks call it. The engine, which would tell of deaths, takes no part."""
    Path(folder, f"{name}{my_rank()}").touch()
    for rank in range(world):
        wait_for_file(Path(folder, f"{name}{rank}"))


def group(backend: str, folder: str, world: int) -> None:
    dist.init_process_group(
        backend, f"file://{folder}/store", rank=my_rank(), world_size=world, timeout=timedelta(seconds=DEADLINE)
    )


def default(folder: str, world: int) -> Callable[[], object]:
    syncengine.init(timeout=DEADLINE)
    return lambda: syncengine.Parallel(Mlp())


def torch_group(folder: str, world: int) -> Callable[[], object]:
    syncengine.init(timeout=DEADLINE)
    return lambda: syncengine.init(torch_group=True)


def anew(folder: str, world: int) -> Callable[[], object]:
    """All have raised a failure before."""
    syncengine.init(timeout=DEADLINE)
    gather(folder, "connected", world)
    with pytest.raises(SyncError):
        syncengine.all_reduce(torch.ones(1 + my_rank()))
    return syncengine.init


def wrap(folder: str, world: int) -> Callable[[], object]:
    group("syncengine", folder, world)
    return lambda: syncengine.Parallel(Mlp())


def new_group(folder: str, world: int) -> Callable[[], object]:
    group("syncengine", folder, world)
    return lambda: dist.new_group(list(range(world)))


def second_group(folder: str, world: int) -> Callable[[], object]:
    group("gloo", folder, world)
    other = dist.new_group(list(range(world)))
    syncengine.Parallel(Mlp())
    return lambda: syncengine.Parallel(Mlp(), process_group=other)


def patched(folder: str, world: int) -> Callable[[], object]:
    import syncengine_autoload

    syncengine_autoload.patch()
    group("syncengine", folder, world)
    return lambda: torch.nn.parallel.DistributedDataParallel(Mlp())


def of_a_few(folder: str, world: int) -> Callable[[], object]:
    """Rank 2 has no communicator: it hears of the end from those that know."""
    group("gloo", folder, world)
    few = dist.new_group([0, 1])
    if my_rank() < 2:
        syncengine.Parallel(Mlp(), process_group=few)
    return lambda: syncengine.Parallel(Mlp())


def sharded(folder: str, world: int) -> Callable[[], object]:
    """The first forward moves the parameters into memory that the host's ranks share."""
    syncengine.init(timeout=DEADLINE)
    model = syncengine.Parallel(Mlp())
    optimizer = syncengine.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return lambda: (model(torch.ones(1, 24)), optimizer)


def process_set(folder: str, world: int) -> Callable[[], object]:
    syncengine.init(timeout=DEADLINE)
    hvd.init()
    return lambda: hvd.add_process_set([1])


def horovod_anew(folder: str, world: int) -> Callable[[], object]:
    """All have heard of a failure before."""
    syncengine.init(timeout=DEADLINE)
    hvd.init()
    gather(folder, "connected", world)
    if my_rank() == 0:
        syncengine.default_communicator().abort("a bad day")
    wait_for_failure()
    return hvd.init


def horovod_optimizer(folder: str, world: int) -> Callable[[], object]:
    syncengine.init(timeout=DEADLINE)
    hvd.init()
    model = Mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    return lambda: (hvd.broadcast_parameters(model.state_dict(), 0), optimizer)


def shrink(folder: str, world: int) -> Callable[[], object]:
    """Not an error: the others go on."""
    syncengine.init(timeout=DEADLINE)

    def call() -> list[int]:
        communicator = syncengine.shrink(patience=DEADLINE)
        try:
            communicator.barrier()
        except PeerLost:  # it had come, and ended while another was on the way
            communicator = syncengine.shrink(patience=DEADLINE)
            communicator.barrier()
        return communicator.global_ranks

    return call


MEETINGS = {
    each.__name__: each
    for each in (
        *(default, torch_group, anew, wrap, new_group, second_group, patched, of_a_few, sharded),
        *(process_set, horovod_anew, horovod_optimizer, shrink),
    )
}


def begin(hosts: str) -> int:
    """As live_on(). Hosts with capital letters are machines to each other: their connections alone tell of an end."""
    if hosts.isupper():
        refuse("pidfd_open")
    torch.set_num_threads(1)
    return live_on(hosts)


def meet(folder: str, hosts: str, meeting: str, how: str, when: str) -> tuple[str, str]:
    """What this rank hears: the class and text of its error. `when` may be a point of the second connection."""
    world = begin(hosts)
    if my_rank() == DEAD and ":" in when:
        os.environ[FAULT] = f"{when}:{how}"
    call = MEETINGS[meeting](folder, world)
    gather(folder, "ready", world)
    if my_rank() == DEAD:
        Path(folder, "pid.new").write_text(str(os.getpid()))
        Path(folder, "pid.new").rename(Path(folder, "pid"))
        if when == "during":
            signal.signal(signal.SIGALRM, lambda *_: end(how))
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            call()
        if ":" in when:
            call()
        end(how)
    if when == "before" or (when == "during" and my_rank() == 2):
        await_end(folder)
    try:
        return "nothing", str(call())
    except Exception as error:
        return type(error).__name__, str(error)


FEW = [
    *(("wrap", "raise", "before", "aa"), ("new_group", "kill", "during", "aaa"), ("default", "exit", "before", "ab")),
    *(("of_a_few", "kill", "before", "aab"), ("sharded", "kill", "before", "aa"), ("shrink", "kill", "during", "aab")),
    *(("process_set", "kill", "during", "aaa"), ("horovod_anew", "exit", "before", "ab")),
    *(("second_group", "exit", "before", "AB"), ("anew", "os._exit", "before", "AB")),
]
WAYS = ("kill", "raise", "exit", "os._exit")
# Where a rank that has signed in may die before it is connected, and the hosts on which it then passes that point.
POINTS = [
    *((f"{point}:2", hosts) for point in ("listening", "connecting") for hosts in ("aa", "aab")),
    ("joining:2", "aab"),
    *(("tcp_rendezvous:2", hosts) for hosts in ("ab", "AB")),
]
ALL = [
    *((meeting, how, "before", hosts) for meeting in MEETINGS for how in WAYS for hosts in ("aa", "aaa", "ab", "AB")),
    *((meeting, how, "during", "aaa") for meeting in MEETINGS for how in WAYS),
    *((meeting, how, when, "aab") for meeting in MEETINGS for how in ("kill", "exit") for when in ("before", "during")),
    *((meeting, "kill", when, hosts) for meeting in ("second_group", "anew") for when, hosts in POINTS),
]


def marked(cases: list[tuple[str, ...]]) -> list[object]:
    marks = [[needs_seccomp] * case[3].isupper() + [needs_hooks] * (":" in case[2]) for case in cases]
    return [pytest.param(*case, marks=mine) for case, mine in zip(cases, marks, strict=True)]


@pytest.mark.parametrize(
    ("meeting", "how", "when", "hosts"),
    [*marked(FEW), *mostly_nightly(marked([case for case in ALL if case not in FEW]))],
)
def test_a_rank_that_has_ended_is_told(pool: RankPool, tmp_path: Path, meeting: str, how: str, when: str, hosts: str):
    with pool.spawn_ranks(meet, str(tmp_path), hosts, meeting, how, when, world=len(hosts), settings=None) as ranks:
        said = [ranks[number].result() for number in range(len(hosts)) if number != DEAD]
    if meeting == "shrink":
        assert said == [("nothing", str([0, 2][: len(said)]))] * len(said)
        return
    kinds = ("PeerLost", "Aborted", *(("RuntimeError", "HeardError") if meeting == "patched" else ()))
    for kind, text in said:
        assert kind in kinds and "rank 1" in text, said
    if how == "raise" and "anew" not in meeting:  # where what failed before is the communicator's last word
        assert "ValueError: shard 1 is empty" in said[0][1], said


def come_back(folder: str, hosts: str) -> float:
    """Rank 1 only shuts down. It comes to the meeting when rank 0, which has heard of that, has asked who has ended."""
    world = begin(hosts)
    group("gloo", folder, world)
    other = dist.new_group(list(range(world)))
    syncengine.Parallel(Mlp())
    if my_rank() == DEAD:
        syncengine.shutdown()
        gc.collect()  # behind this the connections are closed on both sides
        Path(folder, "left").touch()
        wait_for_file(Path(folder, "asked"))
    else:
        wait_for_file(Path(folder, "left"))
        knows_ended = arrivals.knows_ended

        def ask(ranks: Collection[int]) -> None:
            knows_ended(ranks)
            Path(folder, "asked").touch()

        arrivals.knows_ended = ask
    syncengine.Parallel(Mlp(), process_group=other)
    total = torch.full((1,), 1.0 + my_rank())
    existing_communicator(other).all_reduce(total)
    return total.item()


@pytest.mark.parametrize("hosts", [pytest.param("AB", marks=needs_seccomp), *mostly_nightly(["aa", "ab"])])
def test_a_rank_that_only_shuts_down_may_come(pool: RankPool, tmp_path: Path, hosts: str):
    with pool.spawn_ranks(come_back, str(tmp_path), hosts, world=2, settings=None) as ranks:
        assert [rank.result() for rank in ranks] == [3.0, 3.0]
