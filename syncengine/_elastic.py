"""Elastic training: when ranks die, the others run the training function again, from the last finished step."""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from syncengine import torch_group
from syncengine._C import Communicator
from syncengine._joining import Door, Undecided
from syncengine._keeping import Updates, parameters_of
from syncengine._sending import pack, refuse_unsendable, unpack
from syncengine.communicator import default_communicator, init, is_initialized, shrink
from syncengine.errors import InvalidUsage, Mismatch, PeerLost, SyncError, TornWeights
from syncengine.parallel import Parallel
from syncengine.parallel.kept_buffers import KeptBuffers, buffers_of, write_buffers
from syncengine.parallel.open_step import drop_open_step
from syncengine.parallel.replication import broadcast_bytes, fail_all
from syncengine.sharded import ShardedOptimizer
from syncengine.sharded.agreement import gather_json

logger = logging.getLogger("syncengine")

_Result = TypeVar("_Result")


def elastic(
    function: Callable[[Elastic], _Result], *, step: int = 0, at_least: int = 1, patience: float = 30.0, **state: Any
) -> _Result:
    """Calls ``function``, and, when ranks have died, once more on those that are left. Returns its result.

    ``state`` names all that training changes: models, optimizers, schedulers, scalers, samplers, anything with
    ``state_dict`` and ``load_state_dict``. The function gets an ``Elastic`` and trains in the loop over its ``steps``:

        def train(elastic):
            batches = syncengine.micro_batches(model, loader, total=8)
            batches.step = elastic.step
            for _ in elastic.steps(1000):
                for i, (x, y) in batches:
                    loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        syncengine.elastic(train, model=model, optimizer=optimizer)

    If ranks die, the call in which the others notice it raises; the function is left, and called anew, with models
    that average over the ranks that are left. Each step has happened for all of them or for none: a rank that is one
    step behind gets the state from one that is not; if no rank has finished the step, it is done again. With
    ``micro_batches`` the weights are, bit for bit, those of a run in which nobody died.

    A step in which nobody dies makes no copy of weights, nor of an optimizer's state of them. It copies buffers that
    have changed, an optimizer's options, such as lr, and the state of all other objects.

    ``syncengine run --keep-going --restart`` lets processes join in the place of ranks that have died: they get the
    state from the others, between two steps.

    ``step``: the number of steps that are finished, if the state comes from a checkpoint. ``at_least``: how many ranks
    are enough. ``patience``: see ``syncengine.shrink``; a rank that is stopped is noticed after ``init(timeout=...)``.
    Models must be on the default communicator.

    Raises ``PeerLost`` if fewer than ``at_least`` ranks are left, ``Aborted`` on a rank without which the others
    have gone on, ``InvalidUsage`` for a state that can't be kept and after ``init(torch_group=True)``, and any other
    error of the function.
    """
    return Elastic(state, step, at_least, patience)._run(function)


class Elastic:
    """A run of elastic training, which ``syncengine.elastic`` gives to its function."""

    def __init__(self, state: dict[str, Any], step: int, at_least: int, patience: float) -> None:
        communicator = default_communicator() if is_initialized() else init()  # which may have failed by now
        if torch_group.is_made():
            raise InvalidUsage(
                "elastic() can't give other ranks to torch.distributed's group that init(torch_group=True) has made: "
                "leave torch_group out, and ask syncengine for rank and world size"
            )
        if not patience > 0:
            raise InvalidUsage(f"elastic(patience={patience!r}) is not allowed: give seconds, more than 0")
        for name, value in state.items():
            if not has_state(value):
                raise InvalidUsage(
                    f"elastic() can't keep {name}, a {type(value).__name__}: it has no state_dict() and "
                    "load_state_dict(). Leave out what training doesn't change"
                )
            if isinstance(value, Parallel) and value.communicator is not communicator:
                raise InvalidUsage(
                    f"elastic() moves the default communicator, but the model {name} is on another one: call "
                    "syncengine.init() in the place of torch's init_process_group(), and wrap the model behind it, "
                    "without process_group="
                )
        self._state, self._at_least, self._patience = state, at_least, patience
        self.step = step  # how many are finished
        self._kept: dict[str, Any] = {}
        self._updates, self._checks = Updates(state), 2  # of what can be sent: optimizers have a state from a step on
        self._torn: SyncError | None = None
        self._keep()
        self._door = Door.open()
        if self._door is not None and self._door.name not in (None, *communicator.global_ranks):
            self.step = -1  # behind all others
            entered = self._door.enter(self._facts(), communicator.timeout)
            try:
                self._go_on(entered)
            except SyncError as error:
                if not _is_lost(error):
                    raise
                self._recover()

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are left of ``total``. A step is finished when the loop's body is."""
        while self.step < total:
            yield self.step
            self.step += 1
            self._keep()
            if self._door is not None:
                self._door.look(default_communicator())

    def _run(self, function: Callable[[Any], _Result]) -> _Result:
        """Calls the function. If it raises because ranks are lost or join, recovers, and calls it again."""
        while True:
            try:
                with self._updates.counting():
                    result = function(self)
                    default_communicator().barrier()  # nobody leaves whom another may need
                return result
            except Exception as error:
                if not _is_lost(error):
                    raise
                logger.warning("after step %d: %s", self.step, error)
            self._recover()

    def _keep(self) -> None:
        """Keeps copies of the state that a step changes, for the case that no rank finishes the step."""
        if self._checks > 0:
            self._checks -= 1
            self._contents()
        for name, value in self._state.items():
            if isinstance(value, torch.nn.Module):
                self._kept[name] = KeptBuffers(value, self._kept.get(name))
            elif isinstance(value, torch.optim.Optimizer):  # its state changes only when all averages are there
                self._kept[name] = [copy.deepcopy(_options(group)) for group in value.param_groups]
            else:
                self._kept[name] = copy.deepcopy(value.state_dict())
        self._before = self._updates.look()

    def _undo(self) -> None:
        """Undoes the changes of the step that has failed on this rank."""
        drop_open_step()
        try:
            self._part()
            if self._before != self._updates.look():
                raise InvalidUsage(
                    f"elastic() can neither keep nor repeat step {self.step}: ranks were lost behind a change of "
                    "weights and before the step's end. In the loop's body let optimizer.step() be the last call that "
                    "may wait for other ranks: gather numbers for a log before it"
                )
        except (TornWeights, InvalidUsage) as error:
            self.step, self._torn = -1, error  # behind all others
        for name, value in self._state.items():
            kept = self._kept[name]
            if isinstance(value, torch.nn.Module):
                kept.put_back()
                for parameter in value.parameters():
                    parameter.grad = None
            elif isinstance(value, torch.optim.Optimizer):
                del value.param_groups[len(kept) :]
                for group, options in zip(value.param_groups, copy.deepcopy(kept), strict=True):
                    group.update(options)
            else:
                value.load_state_dict(copy.deepcopy(kept))
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                value._per_optimizer_states.clear()  # whose gradients it has unscaled

    def _part(self, loads: bool = False) -> None:
        """Makes weights and state in shared memory private. Raises TornWeights, unless the caller ``loads`` others."""
        for value in self._state.values():
            if isinstance(value, ShardedOptimizer):
                value.renew(loads)

    def _recover(self) -> None:
        """Undoes the failed step, and brings the ranks that are left to one state, however many more die meanwhile."""
        self._undo()
        while True:
            communicator = shrink(patience=self._patience)
            if communicator.size < self._at_least:
                text = f"{communicator.size} ranks are left, and elastic() goes on with at least {self._at_least}"
                fail_all(communicator, PeerLost(text))
            try:
                if self._door is not None:
                    communicator = self._door.let_in(communicator, self._facts())
                return self._go_on(communicator)
            except SyncError as error:
                if not _is_lost(error):
                    raise

    def _go_on(self, communicator: Communicator) -> None:
        self._catch_up(communicator)
        for value in self._state.values():
            if isinstance(value, Parallel):
                value._move_to(communicator)
                value._left_steps = dict(value._begun_steps)

    def _facts(self) -> str:
        """A text about the state that must be the same on all ranks: names, classes, and parameters."""
        parts = []
        for name, value in self._state.items():
            layout = ""
            if isinstance(value, torch.nn.Module):
                # Buffers are left out: a forward may have made others, and the state that ranks are given has them.
                lines = [f"{key}: {tensor.dtype} {tuple(tensor.shape)}" for key, tensor in value.named_parameters()]
                layout = f" of {sum(p.numel() for p in value.parameters())} weights, {zlib.crc32(repr(lines).encode())}"
            parts.append(f"{name}: {type(value).__name__}{layout}")
        return "; ".join(parts)

    def _catch_up(self, communicator: Communicator) -> None:
        """Gives ranks that are behind the state of one that is not. All ranks call it."""
        steps = gather_json(communicator, int(self.step))
        if max(steps) < 0:
            raise self._torn or PeerLost(
                "nobody is left with whole weights that this rank could get: see the others' errors"
            )
        logger.info("ranks %s go on after step %d", communicator.global_ranks, max(steps))
        if min(steps) == max(steps):
            return
        source = steps.index(max(steps))
        try:
            packed = self._pack() if communicator.rank == source else b""
        except InvalidUsage as error:  # the others wait for it
            fail_all(communicator, error)
        packed = broadcast_bytes(communicator, packed, source)
        if self.step < max(steps):
            self._unpack(packed)
            self.step = max(steps)
            self._keep()

    def _pack(self) -> bytes:
        return pack(self._contents())

    def _contents(self) -> dict[str, Any]:
        """The contents for a rank that is behind: states of all objects, and buffers, since some are in no state."""
        contents = {}
        models = [value for value in self._state.values() if isinstance(value, torch.nn.Module)]
        kept = {id(parameter) for model in models for parameter in model.parameters()}
        for name, value in self._state.items():
            for i, parameter in enumerate(parameters_of(value)):
                if id(parameter) not in kept:
                    raise InvalidUsage(
                        f"elastic() can't keep parameter {i} of {name}, of shape {tuple(parameter.shape)}: no model of "
                        "the state has it. Name a module that does, too"
                    )
            buffers = buffers_of(value) if isinstance(value, torch.nn.Module) else {}
            contents[name] = (value.state_dict(), buffers)
            refuse_unsendable(name, contents[name][0])
        return contents

    def _unpack(self, packed: bytes) -> None:
        self._part(loads=True)
        for name, (state, buffers) in unpack(packed).items():
            value = self._state[name]
            if isinstance(value, torch.nn.Module):
                write_buffers(value, buffers)  # or the state's might not fit
            value.load_state_dict(state)
            if isinstance(value, torch.nn.Module):
                write_buffers(value, buffers)  # and loading may change others


def has_state(value: object) -> bool:
    """Whether the object has `state_dict` and `load_state_dict`, by which elastic() keeps its state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, such as lr, which a scheduler or the loop's body may change early in a step."""
    return {name: value for name, value in group.items() if name != "params"}


def _is_lost(error: Exception) -> bool:
    """Whether the error comes of ranks that are gone, and not of this program."""
    if not isinstance(error, SyncError) or isinstance(error, InvalidUsage | Mismatch | Undecided):
        return False
    return default_communicator().exception() is not None
