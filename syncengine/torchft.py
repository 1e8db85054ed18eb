"""torchft over the engine: replica groups leave and come back while the others train (docs/engines.md).

    manager = syncengine.torchft.Manager(pg=syncengine.torchft.ProcessGroup(), ...)
    model = syncengine.Parallel(model)  # over the ranks of this replica group

A replica group is a job of its own, usually one host. Rank r of one talks to rank r of each other one.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torchft.process_group import ProcessGroupWrapper

from syncengine._C import Communicator
from syncengine.groups import backend_communicator
from syncengine.torch_backend import NAME, create


class ProcessGroup(ProcessGroupWrapper):  # type: ignore[misc] # which is not there where types are checked
    """The process group of the replica groups of a quorum, for torchft's Manager. Each `configure` makes it anew.

    In errors, rank n is the n-th replica group of the quorum. An error fails the group until the next `configure`.
    `timeout`: how long a call, and `configure`, may wait for the other replica groups.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, world_size
        options.timeout = self._timeout
        # `lost` never reports a loss. Without it, the numbers of replica groups would be taken for ranks of this job,
        # and the end of such a rank for that of a replica group.
        backend = create(options, None, "join the quorum", lost=str, timeout_call="ProcessGroup(timeout=...)")
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in dist.Backend.backend_capability[NAME]:
            group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
        return group

    @property
    def communicator(self) -> Communicator | None:
        """The communicator of the last `configure`, as long as it is there; for `counters()`, say."""
        return None if self._pg is None else backend_communicator(self._pg)

    def errored(self) -> BaseException | None:
        """The error that the group has failed with, or None."""
        communicator = self.communicator
        return None if communicator is None else communicator.exception()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of calls. A longer one than at the last `configure` holds from the next `configure` on."""
        super().set_timeout(timeout)
        if (communicator := self.communicator) is not None:
            self._pg.set_timeout(min(timeout, timedelta(seconds=communicator.timeout)))

    def shutdown(self) -> None:
        """Leaves in good order: replica groups that wait for this one get PeerLost."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()

    def getBackendName(self) -> str:
        """The backend's name for torch."""
        return f"torchft-{NAME}"


class Manager(torchft.Manager):  # type: ignore[misc]
    """torchft's Manager for replica groups whose ranks hold the same tensors: each rank exchanges its share of them.

    So a byte crosses once between two replica groups, not once for each of their ranks. The ranks of one then gather
    the results by collectives of `within` (by default torch.distributed's default group, if any). All of them must make
    the same calls of `allreduce` and wait for them in the same order, whatever errors there are.
    """

    def __init__(self, *args: Any, within: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._within = dist.group.WORLD if within is None and dist.is_initialized() else within

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG,
    ) -> dist.Work:
        """Averages `tensor` as torchft's Manager does. The returned work's future completes only in `Work.wait`.

        Each rank exchanges a whole tensor if it is not contiguous, or has fewer elements than the replica group has
        ranks.
        """
        within, ranks = self._within, 1 if self._within is None else self._within.size()
        if within is None or ranks == 1 or tensor.numel() < ranks or not tensor.is_contiguous():
            work: dist.Work = super().allreduce(tensor, should_quantize, reduce_op)
            return work
        shares = list(tensor.detach().view(-1).tensor_split(ranks))
        work = super().allreduce(shares[within.rank()], should_quantize, reduce_op)
        return _Shared(work, tensor, shares, within)


class _Shared(dist.Work):
    """An all-reduce of this rank's share, and then an exchange of the shares within the replica group."""

    def __init__(
        self, work: dist.Work, tensor: torch.Tensor, shares: list[torch.Tensor], within: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self._work, self._tensor, self._shares, self._within = work, tensor, shares, within
        self._future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._future.done():
            self._work.wait()  # raises nothing: torchft's Manager is told, and discards the step
            dist.all_gather(self._shares, self._shares[self._within.rank()], group=self._within)
            self._future.set_result(self._tensor)
        return True

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        return self._future
