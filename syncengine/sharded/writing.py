"""Writes to shared weights outside of an update: by one rank, while the others wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from syncengine.errors import Aborted, InvalidUsage, SyncError
from syncengine.sharded.agreement import agree
from syncengine.sharded.memory import Host
from syncengine.sharded.sharing import SAME, Groups, Sharing


@contextlib.contextmanager
def write_together(sharing: Sharing, groups: Groups) -> Iterator[bool]:
    """Gives True on rank 0, which may write, and False on the others, which must not. Collective.

    A failure may reach some ranks when rank 0 has begun already. So it says in shared memory that it begins, as for an
    update; the weights are torn then, since nobody can tell what it has written.
    """
    host = sharing.host
    if host is None or not sharing.blocks:
        yield True
        return
    try:
        sharing.agree("what is to be done before writing() differs", groups, sharing.written())
        for block in sharing.blocks:
            if block.weights.loaded:
                block.weights.share()
        if host.communicator.rank == 0 and not sharing.decide_to_write(True):
            host.communicator.check_peers()
            raise Aborted("another rank has given up this writing()")
    except SyncError as error:
        if host.communicator.exception() is not None and sharing.decide_to_write(False):
            sharing.tear(error)
        raise
    begun = has_writer = host.members[0] == 0  # begun: writing to this host's memory, perhaps
    try:
        yield from _write_alone(sharing, host)
        begun = True
        _spread(sharing, host)
    except BaseException as error:
        failed = host.communicator.exception() is not None
        if failed and begun and (not has_writer or sharing.decide_to_write(False)):
            sharing.tear(error)
        raise
    finally:
        sharing.note_writing()


def _write_alone(sharing: Sharing, host: Host) -> Iterator[bool]:
    communicator = host.communicator
    writes, error = communicator.rank == 0, None
    try:
        yield writes
    except Exception as problem:
        error = problem
    text = f"{type(error).__name__}: {error}" if error else "" if writes else sharing.written()
    try:
        agree(communicator, "", b"", lambda: [], text and f"in writing(): {text}", SAME)
    except InvalidUsage:
        if error is not None:
            raise error from None
        raise
    finally:
        for block in sharing.blocks:
            block.weights.note()
            block.forget_sums()


def _spread(sharing: Sharing, host: Host) -> None:
    for block in sharing.blocks:
        if host.is_one_of_several:
            for parameter in block.weights.parameters:
                host.communicator.broadcast(parameter.detach(), 0)
        host.communicator.barrier()
        block.weights.note_update()
