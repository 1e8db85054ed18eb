"""Process sets: the ranks that make a call together."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import syncengine.communicator as engine
from syncengine._C import Communicator, Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.calls import Calls
from syncengine.horovod.streams import Plan, Round, Stream


class ProcessSet:
    """Some ranks, for `process_set=`. `hvd.add_process_set` or `hvd.init(process_sets=...)` adds a set."""

    process_set_id: int | None = None  # None before it is added, and after it was removed
    _stream: Calls | None = None

    def __init__(self, ranks: Sequence[int]) -> None:
        if not isinstance(ranks, Sequence) or not all(isinstance(rank, int) for rank in ranks):
            raise InvalidUsage(f"ProcessSet({ranks!r}): give a list of ranks; communicators of MPI are not supported")
        self.ranks: list[int] = sorted(ranks)

    def size(self) -> int | None:
        """The number of ranks in the set; None before the set is added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's index in the set; None before it is added. Calls take an hvd.rank() as root_rank, not this.

        Raises InvalidUsage on ranks that are not in the set.
        """
        return None if self.process_set_id is None else stream_of(self, "ProcessSet.rank").rank

    def included(self) -> bool:
        """Whether this process is a rank of the set."""
        return calls().rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __reduce__(self) -> tuple[object, ...]:  # deepcopy and pickle
        return (_found, (self.process_set_id, self.ranks))


_numbers = itertools.count(1)
_sets: list[ProcessSet] = []  # that were added, on all ranks, whether they are members or not
global_process_set = ProcessSet([])  # all ranks
global_process_set.process_set_id = 0


def _found(number: int | None, ranks: list[int]) -> ProcessSet:
    known = (each for each in (global_process_set, *_sets) if number is not None and each.process_set_id == number)
    return next(known, None) or ProcessSet(ranks)


def connect(communicator: Communicator) -> None:
    """Connects the global set to `communicator`, which has all ranks, and forgets all other sets."""
    forget()
    ranks = range(communicator.size)
    global_process_set._stream, global_process_set.ranks = Calls(communicator, ranks), list(ranks)


def forget() -> None:
    """Forgets all sets: their communicator is gone."""
    for each in _sets:
        each.process_set_id = each._stream = None
    _sets.clear()
    global_process_set._stream = None


def calls() -> Calls:
    """The stream of all ranks. Raises InvalidUsage before init()."""
    stream = global_process_set._stream
    default = engine._default  # read directly, since each allreduce comes here
    if stream is None or default is None or default.communicator is not stream.communicator:
        raise InvalidUsage("Horovod has not been initialized: call hvd.init() first")
    return stream


def streams() -> list[Stream]:
    """All streams in which this rank takes part, DistributedOptimizers' too; the global one is the first."""
    found = [calls(), *(each._stream for each in _sets if each._stream is not None)]
    return [*found, *(optimizer for stream in found for optimizer in stream.optimizers)]


def stream_of(process_set: object, call: str = "") -> Calls:
    """The stream of a process set. Raises InvalidUsage if it is no set, was not added, or lacks this rank."""
    if process_set is None or process_set is global_process_set:
        return calls()
    if not isinstance(process_set, ProcessSet):
        raise InvalidUsage(f"{call}: process_set={process_set!r} is no hvd.ProcessSet: see hvd.add_process_set")
    if process_set.process_set_id is None:
        raise InvalidUsage(f"{call}: {process_set!r} was not added, or is gone: call hvd.add_process_set on all ranks")
    if process_set._stream is None:
        raise InvalidUsage(f"{call}: rank {calls().rank} is not in {process_set!r}: only its ranks may make this call")
    return process_set._stream


@contextmanager
def refusing(process_set: object, call: str, name: str | None = None) -> Iterator[Calls]:
    """A context in which this rank prepares a call on the set's stream. If it raises before the call, all ranks do.

    A rank that is not in the set, or has not added it, has no stream of it: the error is raised on this rank alone.
    """
    with stream_of(process_set if isinstance(process_set, ProcessSet) else None, call).refusing(call, name):
        yield stream_of(process_set, call)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes `process_set`, or a set of these ranks, ready for use. All ranks call it, members or not.

    Raises InvalidUsage if there is a set of the same ranks. Returns the set.
    """
    with refusing(None, "add_process_set") as stream:
        added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        if any(each.ranks == added.ranks for each in (global_process_set, *_sets)):
            raise InvalidUsage(f"Attempted to add a duplicate process set: {added}")
        if not added.ranks or len(set(added.ranks)) < len(added.ranks) or not set(added.ranks) <= set(stream.ranks):
            raise InvalidUsage(f"{added}: give some of ranks 0 to {stream.size - 1}, each of them once")

    def begin(_: Round) -> Sequence[Work]:
        own = stream.communicator.split(added.ranks if stream.rank in added.ranks else [])
        added._stream = None if own is None else Calls(own, added.ranks)
        added.process_set_id = next(_numbers)
        _sets.append(added)
        return ()

    stream.submit("add_process_set", None, Plan(str(added.ranks), begin=begin)).result()
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends the use of a set. Returns False if it was not added, or is the global one. All ranks call it."""
    stream = calls()
    known = any(process_set is each for each in _sets)

    def begin(_: Round) -> Sequence[Work]:
        if known:
            if process_set._stream is not None:
                process_set._stream.close()
            _sets.remove(process_set)
            process_set.process_set_id = process_set._stream = None
        return ()

    what = str(process_set.ranks) if known else "one that was not added"
    stream.submit("remove_process_set", None, Plan(what, begin=begin)).result()
    return known
