"""A process that imports torch once and forks rank processes from then on: milliseconds each instead of seconds.

Started as `python zygote.py CONTROL_FD`. A request b"+" on the control socket brings two descriptors: the connection of
a new process, and the file for its output. The new process becomes a child of the test run itself (which is a
subreaper), takes its tasks from its connection and ends as any Python process ends, with atexit handlers,
sys.excepthook and the end of the interpreter; torch's libraries alone are left as they are. Any other request is the
name of a package: a new process imports it, and is a zygote, too, with the descriptor as its control socket.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ENVIRON = dict(os.environ)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass
class Task:
    """One call of a module-level test function on one rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    environ: dict[str, str]
    settings: dict[str, Any] | None  # syncengine.init's; None: the function does without, or calls it itself
    gloo: bool  # whether torch.distributed is initialised around the call
    stay: bool  # whether the process waits for another task after this one
    store: str  # file through which the ranks meet
    modules: list[str] = field(default_factory=lambda: list(sys.path))


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _serve(control: socket.socket, test_run: int) -> Connection | None:
    """Returns in each new process, with its connection; in this process, when the test run has closed `control`."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 100, 2)
        if not request:
            return None
        middle = os.fork()
        if middle == 0:
            if os.fork() > 0:
                os._exit(0)  # the new process is an orphan now: the test run adopts it
            control.close()
            if request != b"+":
                importlib.import_module(request.decode())
                _prepare()
                return _serve(socket.socket(fileno=descriptors[0]), test_run)
            connection, log = descriptors
            _enter_process(log, test_run)
            return Connection(connection)
        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _enter_process(log: int, test_run: int) -> None:
    while os.getppid() != test_run:
        time.sleep(0.0005)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with SIGINT ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup's with SIGHUP
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the test run asks where a rank hangs


def _work(connection: Connection) -> None:
    pid = os.getpid()
    connection.send(pid)
    while True:
        try:
            task: Task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("returned", _call(task))
        except BaseException:
            if os.getpid() != pid:
                raise  # a child that the function forked: it has no answer to give
            connection.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
            if task.stay:
                continue
            raise  # to sys.excepthook, as in a user's program
        connection.send_bytes(pickle.dumps(answer))
        if not task.stay:
            return


def _call(task: Task) -> Any:
    import torch.distributed as dist

    os.environ.clear()  # of what the task before has left
    os.environ.update(_ENVIRON | task.environ)
    sys.path[:] = task.modules
    if "syncengine" not in sys.modules:
        return task.function(*task.args)
    import syncengine
    from syncengine.launch import store as launch_store

    # A file instead of MASTER_ADDR's TCP server, for which torch asks DNS for names: seconds where DNS is slow.
    store = dist.FileStore(task.store, -1)
    launch_store.open_store = lambda *_: store
    if task.settings is not None:
        syncengine.init(**task.settings)
    if task.gloo:
        _join_gloo(store)
    value = task.function(*task.args)
    if task.stay:  # else the end of the process does it
        syncengine.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
    return value


def _join_gloo(store: Any, attempts: int = 3) -> None:
    """Its ranks may connect to a listener of another job that has got a port anew: then all of them try again."""
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for attempt in range(attempts):
        own, failed = dist.PrefixStore(f"gloo{attempt}", store), None
        try:
            dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
        except RuntimeError as error:
            failed = error
        own.set(f"result{rank}", "failed" if failed else "joined")
        if all(own.get(f"result{peer}") == b"joined" for peer in range(world_size)):
            return
        if dist.is_initialized():
            dist.destroy_process_group()
    raise RuntimeError(f"Gloo failed {attempts} times") from failed


_shared_modules: dict[str, Any] = {}  # imported before the forks, but for those whose end is tested


def _keep_shared_modules() -> None:
    ours = ("builtins", "sys", "__main__", "zygote", "syncengine")
    _shared_modules.update((name, module) for name, module in sys.modules.items() if name.partition(".")[0] not in ours)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_shared_modules))


def _leave_shared_modules() -> None:
    """At exit, last of all: the interpreter shall not take apart, by copying every page, what ends with the process."""
    for name in _shared_modules:
        sys.modules.pop(name, None)


def _leave_torch() -> None:
    """The process ends where torch's libraries would take apart what they have registered: half of an end's time, and
    most of the pages that it copies. Libraries that are loaded later have ended by then."""
    for finalizer in weakref.finalize._registry.values():
        finalizer.atexit = False
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


def _use_huge_pages() -> None:
    """Where the kernel can: a fork then copies hundreds of page table entries instead of tens of thousands."""
    libc, size, collapse = ctypes.CDLL(None), 2 << 20, 25  # MADV_COLLAPSE
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, name = f"{line} ".split(" ", 5)
        if access == "rw-p" and name.strip() in ("", "[heap]"):
            begin, end = (int(address, 16) // size * size for address in addresses.split("-"))
            if begin + size < end:
                libc.madvise(ctypes.c_void_p(begin + size), ctypes.c_size_t(end - begin - size), collapse)


def _prepare() -> None:
    """Makes forks of this process cheap, with what it has imported."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"fork needs a process of one thread, not {threads}"
    _keep_shared_modules()
    gc.collect()
    gc.freeze()  # a fork that collects what it shares would copy it, page by page
    _use_huge_pages()


def main() -> None:
    test_run = os.getppid()
    atexit.register(_leave_shared_modules)  # before all others, so that it comes after them
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo
    import torch.distributed  # noqa: F401

    _leave_torch()
    _prepare()
    connection = _serve(socket.socket(fileno=int(sys.argv[1])), test_run)
    if connection is not None:
        _work(connection)


if __name__ == "__main__":
    sys.modules["zygote"] = sys.modules["__main__"]  # tasks are pickled under the module's own name
    main()
