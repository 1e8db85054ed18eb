"""The package that torch calls at the end of its import, by the entry point ``torch.backends``.

So the string "syncengine" works wherever torch takes a backend, and ``SYNCENGINE_PATCH=1`` reaches every process that
imports torch, without an ``import syncengine``.

It is a package of its own, since importing a module of syncengine imports all of it. It imports nothing that torch has
not imported, starts nothing, and raises nothing: an error here would break ``import torch``. syncengine itself is
imported when a group or a model is made, and its errors are raised there.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Any

NAME = "syncengine"
VARIABLE = "SYNCENGINE_PATCH"

SERVED_BY = "_served_by"  # in the __dict__ of a DistributedDataParallel that a Parallel serves: its class

torchs_own: dict[str, Any] = {}  # what DistributedDataParallel had before a program could change it
tells_itself = False  # whether the caller that imports syncengine tells the other ranks if the import fails


class HeardError(RuntimeError):
    """An error of another rank, which has told it to all: no rank that hears of it tells it once more."""


def load() -> None:
    """Registers the backend, and puts ``Parallel`` in DDP's place if ``SYNCENGINE_PATCH=1``."""
    try:
        from torch import distributed as dist

        if not dist.is_available():
            return
        register()
        asked = os.environ.get(VARIABLE, "")
        if asked == "1":
            patch()
        elif asked not in ("", "0"):
            tell(f"{VARIABLE}={asked!r} is not allowed, and has no effect: give 1 or 0")
    except Exception as error:  # of a torch to come, say
        tell(f"the backend {NAME!r} is not known to torch.distributed without `import syncengine`: {error!r}")


def register() -> None:
    """Makes the backend known to torch.distributed. Importing syncengine does so anew, for its build's devices."""
    from torch.distributed import Backend

    if NAME not in Backend.backend_list:
        Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        Backend.backend_capability[NAME] = _Devices()  # type: ignore[assignment] # torch iterates over it


def patch() -> None:
    """Patches ``DistributedDataParallel``, wherever it was or will be imported: ``Parallel`` serves what it makes.

    The class stays the same object, and models stay its instances. ``ddp.py`` decides for each whether it is served.
    """
    import inspect

    from torch.nn.parallel.distributed import DistributedDataParallel

    if "__new__" in vars(DistributedDataParallel):
        return

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        made: Any = object.__new__(cls)
        if args or kwargs:  # otherwise it is a copy, or is being unpickled
            from syncengine_autoload.ddp import choose

            if (parallel := choose(cls, args, kwargs, sys._getframe(1).f_globals.get("__name__", ""))) is not None:
                made.__dict__[SERVED_BY] = parallel
        return made

    previous = sys.excepthook

    def tell_who_wraps(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        from torch import distributed as dist

        if dist.is_initialized() and not isinstance(error, HeardError):
            from syncengine_autoload.rendezvous import fail_in_groups

            fail_in_groups(f"rank {dist.get_rank()} has ended by {kind.__name__}: {error}".encode())

    sys.excepthook = tell_who_wraps
    __new__.__signature__ = inspect.signature(DistributedDataParallel.__init__)  # type: ignore[attr-defined] # tools ask
    DistributedDataParallel.__new__ = __new__  # type: ignore[method-assign]
    torchs_own.update(vars(DistributedDataParallel))


def tell(text: str) -> None:
    """Logs a line, or writes it to an open stderr if syncengine is not loaded."""
    if (lines := sys.modules.get("syncengine.lines")) is not None:
        lines.print_line(text, level=logging.WARNING)
    elif sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # closed at the other end, or here
            sys.stderr.write(f"syncengine: {text}\n")
            sys.stderr.flush()


class _Devices(Collection[str]):
    """The devices of the backend: known to the extension, which is loaded when somebody asks."""

    def __iter__(self) -> Iterator[str]:
        try:
            from syncengine._C import has_cuda
        except Exception:  # _create() raises it
            has_cuda = False
        return iter(["cpu", "cuda"] if has_cuda else ["cpu"])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, device: object) -> bool:
        return device in list(iter(self))


def _create(options: Any, backend_options: Any) -> Any:
    global tells_itself
    tells_itself = True
    try:
        from syncengine.torch_backend import create
    except BaseException as error:
        from syncengine_autoload.rendezvous import Rendezvous

        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        if len(ranks) > 1:
            meeting = Rendezvous(options.store, "init", options.group_rank, ranks)
            own = ranks[options.group_rank]
            meeting.fail(f"Aborted rank {own} failed in init: {type(error).__name__}: {error}".encode()[:3500])
            meeting.stay_until_heard(to_come=True)
        raise
    return create(options, backend_options)
