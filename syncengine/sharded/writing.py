"""Writes to shared weights outside of an update: by one rank, while the others wait."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from syncengine._C import Communicator
from syncengine.errors import Aborted, SyncError
from syncengine.parallel import Parallel
from syncengine.parallel.broadcast import TensorBroadcast, describe_layout
from syncengine.parallel.replication import check_same_on_all_ranks
from syncengine.parallel.watchers import common
from syncengine.sharded.agreement import agree, gather_json
from syncengine.sharded.memory import Host
from syncengine.sharded.shard import Groups
from syncengine.sharded.sharing import Sharing
from syncengine.sharded.state import State, digest
from syncengine.sharded.update import SAME


class PrivateTensors:
    """Parameters and buffers of ``models``, by number, that lie in each rank's own memory, and what they were like.

    Not those that a module names in ``_ddp_params_and_buffers_to_ignore``.
    """

    def __init__(self, models: Sequence[Callable[[], Parallel | None]], writes: bool) -> None:
        """``writes``: this rank may; it reads all of them, as versions do not see every write."""
        self._models = models
        self._noted = {key: _note(tensor) for key, tensor in self._find().items()} if writes else {}

    def written(self) -> list[str]:
        """Which of them this rank has written to since, or put others in their place."""
        found = self._find()
        return [key for key, noted in self._noted.items() if key in found and _note(found[key]) != noted]

    def spread(self, communicator: Communicator, written: list[str]) -> None:
        """Gives all ranks those that rank 0 has ``written``. Collective.

        Raises ``Mismatch`` on all ranks, naming one, where shapes or dtypes differ.
        """
        keys = gather_json(communicator, written)[0]
        if not keys:
            return
        found = self._find()
        named = [(key.partition(" ")[2], found[key]) for key in keys if key in found]
        lines = describe_layout(named) + [f"{key.partition(' ')[2]}: nothing" for key in keys if key not in found]
        what = "what rank 0 has written in writing() differs"
        check_same_on_all_ranks(communicator, what, lines, "Leave shapes and dtypes as they are.")
        tensors = [tensor for _, tensor in named]
        TensorBroadcast(communicator, tensors, torch.device("cpu"))(tensors, 0)
        for tensor in tensors:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # graphs that hold it as it was can't be used

    def _find(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for number, known in enumerate(self._models):
            if (model := known()) is None:
                continue
            ignored = getattr(model.module, "_ddp_params_and_buffers_to_ignore", ())
            for name, tensor in itertools.chain(model.module.named_parameters(), model.module.named_buffers()):
                if name not in ignored and tensor not in common and tensor.layout is torch.strided:
                    found[f"{number} {name}"] = tensor
        return found


def _note(tensor: torch.Tensor) -> tuple[int, int]:
    return -1 if tensor.is_inference() else tensor._version, digest({"": tensor})


@contextlib.contextmanager
def write_together(sharing: Sharing, groups: Groups, state: State) -> Iterator[bool]:
    """Gives True on rank 0, which may write, and False on the others, which must not. Collective.

    A failure may reach some ranks when rank 0 has begun already. So it says in shared memory that it begins, as for an
    update; the weights are torn then, since nobody can tell what it has written.
    """
    host = sharing.host
    if host is None or not sharing.blocks:
        yield True
        return
    update = sharing.next_update(groups)
    try:
        update.agree("what is to be done before writing() differs", sharing.written() or sharing.look(state))
        for block in sharing.blocks:
            block.give_loaded()
            block.take_loaded()
        private = PrivateTensors(sharing.models, writes=host.communicator.rank == 0)
        if host.communicator.rank == 0 and not update.decide(True):
            host.communicator.check_peers()
            raise Aborted("another rank has given up this writing()")
    except SyncError as error:
        if host.communicator.exception() is not None and update.decide(False):
            sharing.tear(error)
        raise
    begun = has_writer = host.members[0] == 0  # begun: writing to this host's memory, perhaps
    try:
        failure: Exception | None = None
        try:
            sharing.writes = host.communicator.rank == 0
            with _alone(sharing.models) if sharing.writes else contextlib.nullcontext():
                yield sharing.writes
        except Exception as error:
            failure = error
        finally:
            sharing.writes = False
        failure, written = _end_together(sharing, host, private, failure)
        begun = True
        _spread(sharing, host)
        private.spread(host.communicator, written)  # also after an error: all have what was written until then
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C, sys.exit(): it leaves the others alone
            host.communicator.abort(f"{host.name(host.rank)} left writing(): {type(error).__name__}")
        failed = host.communicator.exception() is not None
        if failed and begun and sharing.blocks and (not has_writer or update.decide(False)):
            sharing.tear(error)
        raise
    finally:
        sharing.note_writing()
    if failure is not None:
        raise failure


@contextlib.contextmanager
def _alone(models: Iterable[Callable[[], Parallel | None]]) -> Iterator[None]:
    """No forward synchronizes buffers: the other ranks run none. The first one afterwards does if it was to."""
    switches = [model._switches for known in models if (model := known()) is not None]
    before = [(each.forward_sync_buffers, each.require_forward_param_sync) for each in switches]
    for each in switches:
        each.forward_sync_buffers = False
    try:
        yield
    finally:
        for each, (sends, is_due) in zip(switches, before, strict=True):
            each.forward_sync_buffers, each.require_forward_param_sync = sends, is_due


def _end_together(
    sharing: Sharing, host: Host, private: PrivateTensors, error: Exception | None
) -> tuple[Exception | None, list[str]]:
    """Tells all ranks of an error in the context. Collective.

    Returns what each of them is to raise then, and which private tensors this rank has written to.
    """
    problem, writes, written = "", host.communicator.rank == 0, []
    try:
        written = private.written()
        if writes:  # all are read before the first is written
            for memory, value in [pair for block in sharing.blocks for pair in block.weights.moved_values()]:
                memory.copy_(value)
    except Exception as failure:  # short of memory, say
        error = error or failure
    for block in sharing.blocks:
        problem = block.put_back(writes) or problem
    text = f"{type(error).__name__}: {error}" if error else problem
    try:
        agree(host.communicator, "", b"", list, text and f"in writing(): {text}", lambda: SAME)
    except SyncError as failure:
        if host.communicator.exception() is not None:
            raise
        return error or failure, written
    return error, written


def _spread(sharing: Sharing, host: Host) -> None:
    for block in sharing.blocks:
        if host.is_one_of_several:
            for parameter in block.weights.parameters:
                host.communicator.broadcast(parameter.detach(), 0)
        host.communicator.barrier()
        block.weights.note_update()
