"""GPU ranks, as processes on however many GPUs there are; and what tests need to be skipped or run alone."""

import contextlib
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

if os.environ.get("SYNCENGINE_TEST_CUDA") == "software":
    import software_torch  # noqa: F401

import pytest
import torch
from ports import unused_ports

TIMEOUT = 60.0
PATIENCE = int(os.environ.get("SYNCENGINE_TEST_PATIENCE", "300"))  # seconds for a result of run_processes
ENDING = 15.0  # seconds for all of them to end then
SOFTWARE = os.environ.get("SYNCENGINE_TEST_CUDA") == "software"


def why_no_gpu() -> str:
    """Why tests on a GPU can't run here; empty if they can."""
    from syncengine import _C

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return "" if _C.has_cuda else "syncengine was built without CUDA"


Test = TypeVar("Test", bound=Callable[..., None])


def marked(test: Test) -> Test:
    """For tests that need a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu() or "-")(test))


# For tests that take all of a device, or look at its memory or the time: on a GPU no others may run meanwhile.
alone = pytest.mark.alone


def needs_real(what: str) -> Callable[[Test], Test]:
    """For tests that a device in software can't serve: it lacks ``what``."""
    return pytest.mark.skipif(SOFTWARE, reason=f"the software device has no {what}")


def seeing(devices: int) -> dict[str, str]:
    """The environment of processes that see so many devices; skips the test where there are fewer."""
    if not SOFTWARE and torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs, {torch.cuda.device_count()} are visible")
    visible = None if SOFTWARE else os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": ",".join((visible or "0,1,2,3,4,5,6,7").split(",")[:devices])}


class Environ(dict[str, str]):
    """Sets variables where it is unpickled: before what is pickled behind it, which may ask for devices."""

    def __reduce__(self) -> Any:
        return set_environ, (dict(self),)


def set_environ(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def in_process(_: Environ, rank: int, body: Callable[[int], Any], results: Any) -> None:
    """What a process of run_processes does."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        results.put((rank, body(rank)))
    except BaseException as error:
        results.put((rank, f"{type(error).__name__}: {error}"))


def rank_environ(rank: int, world: int, port: int) -> dict[str, str]:
    """As torchrun's."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same bits on all streams
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "timeout:1 attempts:1",  # names that no server knows cost little
    }


def get(results: Any, ranks: list[Any], killed: int | None) -> Any:
    """The next result; an error if a rank that still owes one has died, or after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(queue.Empty):
            return results.get(timeout=1)
        for rank, process in enumerate(ranks):
            if rank != killed and process.exitcode:
                raise RuntimeError(f"rank {rank} died: exit code {process.exitcode}; stderr may say why")
    raise TimeoutError(f"no result in {PATIENCE} seconds")


def run_processes(
    world: int,
    body: Callable[[int], Any],
    killed: int | None = None,
    environ: Mapping[str, str] | None = None,
    hosts: str = "",
) -> list[Any]:
    """Results by rank of processes of their own; a text for an error. `killed` gives none, and does not live on.

    `hosts` has a letter for each rank: equal letters share a host.
    """
    (port,) = unused_ports()
    context = multiprocessing.get_context("forkserver")  # which imports torch once, and starts no CUDA
    context.set_forkserver_preload([*(["software_torch"] if SOFTWARE else []), "torch", "torch._dynamo", "pytest"])
    results = context.Queue()
    ranks = []
    for rank in range(world):
        host = {"SYNCENGINE_HOST_ID": hosts[rank]} if hosts else {}
        variables = Environ({**rank_environ(rank, world, port), **host, **(environ or {})})
        ranks.append(context.Process(target=in_process, args=(variables, rank, body, results)))
        ranks[-1].start()
    patience = ENDING
    try:
        found = dict(get(results, ranks, killed) for _ in range(world - (killed is not None)))
    except BaseException:
        patience = 3.0
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGABRT)  # with PYTHONFAULTHANDLER=1 it prints its stacks
        raise
    finally:
        end = time.monotonic() + patience
        for rank, process in enumerate(ranks):
            process.join(0 if rank == killed else max(0.0, end - time.monotonic()))
            process.kill()
    return [found.get(rank) for rank in range(world)]
