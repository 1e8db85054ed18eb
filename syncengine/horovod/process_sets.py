"""`process_set=`: there is only the set of all ranks."""

from __future__ import annotations

from syncengine.errors import InvalidUsage
from syncengine.horovod import process


class GlobalProcessSet:
    """All ranks."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """Of its members, in the whole job."""
        return list(range(process.size()))

    def size(self) -> int:
        """As hvd.size()."""
        return process.size()

    def rank(self) -> int:
        """As hvd.rank()."""
        return process.rank()

    def included(self) -> bool:
        """Whether this process is a member."""
        process.calls()
        return True


global_process_set = GlobalProcessSet()


def check_process_set(call: str, process_set: object) -> None:
    """Raises InvalidUsage for any other set."""
    if process_set is not None and process_set is not global_process_set:
        raise InvalidUsage(
            f"{call}: process sets other than hvd.global_process_set are not supported: use a communicator of these "
            "ranks, syncengine.default_communicator().split(ranks), and its collectives"
        )
