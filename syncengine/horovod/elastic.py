"""Horovod's elastic training: a function that is run again when ranks have died or come.

When ranks have died, the others go back to the last commit; when ranks come, all go on from the present state.
`syncengine.elastic` connects the ranks anew; commits are its steps. A commit that one of the living ranks has finished
counts for all, and the ranks that lack it get it from that rank; one that none of them has finished is made again.
"""

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from syncengine._C import Communicator
from syncengine._elastic import Elastic, has_state
from syncengine.communicator import default_communicator
from syncengine.errors import Aborted, InvalidUsage, PeerLost, SyncError, Timeout
from syncengine.horovod.objects import broadcast_object, from_bytes, load_in_place, to_bytes
from syncengine.horovod.optimizer import Distributed
from syncengine.horovod.process import follow, init, rank, shutdown, size
from syncengine.horovod.process_sets import calls, streams

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "TorchState", "init", "run", "shutdown"]

HorovodInternalError = SyncError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_State = TypeVar("_State", bound="TorchState")


class HostsUpdatedInterrupt(RuntimeError):
    """Another process waits to join. `commit` and `check_host_updates` raise this on all ranks, for `run` to catch."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("another rank joins: all go on from here with it")
        self.skip_sync = skip_sync  # False: who joins needs the state


class TorchState:
    """The state that training changes: models, optimizers, samplers, and any objects that can be pickled.

    An object with `state_dict` and `load_state_dict` is saved by these. Each object is an attribute, named as the
    argument was. The constructor saves the state. A commit copies the whole state, so commit rarely, but so often that
    you can bear to lose the work since the last commit.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **attributes: Any
    ) -> None:
        attributes = {"model": model, "optimizer": optimizer, **attributes}
        vars(self).update(attributes)
        self._names = list(attributes)
        self._elastic: _Run | None = None  # while `run` runs a function with this state
        self._callbacks: list[Callable[[], object]] = []
        self.save()

    def save(self) -> None:
        """Keeps copies of the state, to which `restore` goes back."""
        live = {name: getattr(self, name) for name in self._names}
        self._saved = {name: copy.deepcopy(v.state_dict() if has_state(v) else v) for name, v in live.items()}

    def restore(self) -> None:
        """Goes back to the state that this rank has saved last."""
        for name, saved in copy.deepcopy(self._saved).items():
            value = getattr(self, name)
            if isinstance(value, torch.optim.Optimizer):
                load_in_place(value, saved)
            elif has_state(value):
                value.load_state_dict(saved)
            else:
                setattr(self, name, saved)

    def sync(self) -> None:
        """Gives all ranks the state of rank 0, and saves it. All ranks call it."""
        self.save()
        packed = broadcast_object(self.pack() if rank() == 0 else None, 0, "TorchState.sync")
        if rank() != 0:
            self.unpack(packed)
            self.restore()

    def commit(self) -> None:
        """Saves the state, then calls `check_host_updates`. All ranks call it, since that is collective."""
        self.save()
        if self._elastic is not None:
            self._elastic.step += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on all ranks, if a process waits to be let in.

        Rank 0 looks for such processes twice a second at most. Does nothing unless `syncengine run --keep-going` has
        started the ranks. All ranks call it.
        """
        door = None if self._elastic is None else self._elastic._door
        if door is not None and broadcast_object(rank() == 0 and door.somebody_waits(), 0, "check_host_updates"):
            raise HostsUpdatedInterrupt()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Registers callbacks for when ranks have died or come, to change learning rates, say.

        They are called in this order, before `sync`, but not on the ranks that come.
        """
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls the callbacks that `register_reset_callbacks` was given."""
        for callback in self._callbacks:
            callback()

    def pack(self) -> bytes:
        """The saved state as bytes, for another rank."""
        return to_bytes(self._saved)

    def unpack(self, packed: bytes) -> None:
        """Takes over a saved state that another rank has packed."""
        self._saved = from_bytes(packed)


def run(
    function: Callable[Concatenate[_State, _Arguments], _Result],
) -> Callable[Concatenate[_State, _Arguments], _Result]:
    """Makes a function that calls `state.sync()` and `function(state, ...)`, and both again when ranks die or come.

    When ranks have died, the call in which the others notice it raises HorovodInternalError; those that are left go
    back to the last commit and call the function again. When a process joins, `commit` raises HostsUpdatedInterrupt on
    all ranks, which call the function again together with it, from their present state. DistributedOptimizers in the
    state move to the ranks that are there, without gradients; process sets are gone.

    Any other error of the function is raised as it is, and the function is not called again.
    """

    @functools.wraps(function)
    def wrapper(state: _State, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        state._elastic = elastic = _Run(state)

        def attempt(_: object) -> _Result:
            with elastic.telling():
                state.sync()
                return function(state, *args, **kwargs)

        try:
            return elastic._run(attempt)
        finally:
            state._elastic = None

    return wrapper


class _Run(Elastic):
    """The elastic run of one function. Its steps are commits, which the state itself keeps."""

    def __init__(self, state: TorchState) -> None:
        self._whole, self._joins = state, True  # once made, it is among the others
        super().__init__({n: v for n in state._names if has_state(v := getattr(state, n))}, 0, 1, 30.0)
        self._joins = False

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A context that aborts all communicators, optimizers' own too, if an error calls for another attempt."""
        try:
            yield
        except (SyncError, HostsUpdatedInterrupt) as error:
            if isinstance(error, HostsUpdatedInterrupt):
                self._whole.save()
                self.step += 1
            elif not isinstance(error, PeerLost | Timeout | Aborted) and type(error) is not HorovodInternalError:
                raise
            default_communicator().abort(str(error))
            with suppress(InvalidUsage):  # there may be none by now
                for each in streams():
                    each.abort(str(error))
            raise Aborted(str(error)) from error

    def _keep(self) -> None:
        pass

    def _undo(self) -> None:
        self._part(loads=True)  # the rest when the optimizers wait for nothing any more, from copies that nothing tears

    def _pack(self) -> bytes:
        return self._whole.pack()

    def _unpack(self, packed: bytes) -> None:
        self._whole.unpack(packed)

    def _go_on(self, communicator: Communicator) -> None:
        with self.telling():
            follow(communicator)
            for name in sorted(self._state):
                if isinstance(value := getattr(self._whole, name), Distributed):
                    value.follow(calls())
            super()._go_on(communicator)
            self._whole.restore()
            if not self._joins:
                self._whole.on_reset()


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the samples of an epoch to the ranks that are there. It belongs into the TorchState, and into a DataLoader.

    Samples that `record_batch` has noted are not dealt again when ranks die or come. `dataset` must keep its length.
    With `shuffle` the order follows from `seed` and the epoch: the same on all ranks, and the same as Horovod's own.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, all samples unused. Call it at the end of the one before: a rerun must not begin it anew."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that each rank has used a batch: the next `batch_size` of its own samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the number of samples that all ranks have used in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on at the place that was saved, with the ranks that are there now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deals the samples of the epoch that are not used yet to the ranks that are there now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        return (left[i % len(left)] for i in range(self.rank, self.total_size, self.num_replicas))

    def __len__(self) -> int:
        return self.num_samples
