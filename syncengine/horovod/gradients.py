"""The gradients of one DistributedOptimizer on this rank: collected by hooks, reduced while backward still runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from syncengine._C import Work, note_incoming, owns_gradient
from syncengine.errors import InvalidUsage, SyncError
from syncengine.horovod.calls import apart
from syncengine.horovod.gradient_stream import LARGE, GradientStream, Settings
from syncengine.horovod.reductions import Average, scale
from syncengine.horovod.requests import describe
from syncengine.horovod.streams import Operation
from syncengine.parallel.broadcast import copy_each
from syncengine.parallel.replication import own_name


class Flat(NamedTuple):
    """One bucket, with a view for each of its gradients."""

    values: torch.Tensor
    views: list[torch.Tensor]


_STRIDED = torch.strided
# The Gradients object that reduces each parameter, by the parameter's id: that of the optimizer made last. While the
# object keeps the parameter, no other tensor has its id.
_owners: weakref.WeakValueDictionary[int, Gradients] = weakref.WeakValueDictionary()


@dataclass(slots=True)
class _Step:
    """The progress of one step, from the end of the step before until all gradients are averages."""

    missing: list[int]  # gradients that each bucket lacks
    next: int  # the next bucket to reduce
    announcement: Operation | None
    order: list[int] = field(default_factory=list)  # gradients, as they became ready
    versions: dict[int, int] = field(default_factory=dict)  # the gradients' versions: torch counts writes to them
    reducing: list[tuple[int, Flat, Work]] = field(default_factory=list)


def _let_go(stream: GradientStream, hooks: Sequence[RemovableHandle]) -> None:
    """Removes the hooks of an optimizer that is gone. Other ranks may still have it, so its stream stays for join()."""
    stream.needed = False
    for hook in hooks:
        hook.remove()


def _is_pending(parameter: torch.Tensor) -> bool:
    owner = _owners.get(id(parameter))
    return owner is not None and owner.pending and owner._stream.communicator.exception() is None


def check_not_in_step(named: Mapping[torch.Tensor, str]) -> None:
    """Raises InvalidUsage, naming the parameter, if another optimizer is reducing a gradient of one of these now."""
    for parameter, name in named.items():
        if _is_pending(parameter):
            gc.collect()  # it may be gone but for a cycle
        if _is_pending(parameter):
            raise InvalidUsage(
                f"{name} is a parameter of another DistributedOptimizer, which is between backward and step(): call "
                "its step() or synchronize() before, and then only the new one's"
            )


class Gradients:
    """Reduces the gradients of the parameters in `named`: a bucket when all its gradients have had their backwards.

    Buckets are reduced in the same order on every rank, so a bucket that is not complete holds up the buckets behind
    it, at the latest until `synchronize`.
    """

    def __init__(self, stream: GradientStream, named: Mapping[torch.Tensor, str], settings: Settings) -> None:
        self._stream = stream
        self._superseded_for = ""  # the parameter that a later optimizer has, too
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        self._passes, self._op = settings.passes, settings.op
        predivide = settings.predivide
        self._factors = (1.0, 1.0) if predivide == 1.0 else (1.0 / predivide, predivide / stream.size)
        self._sparse_as_dense = settings.sparse_as_dense
        self._sparse: dict[int, int] = {}  # parameters whose gradients are, and in how many dimensions
        self._flats: dict[int, Flat] = {}  # memory of the buckets that are copied, while the plan stays
        self._large: list[torch.Tensor] = []  # parameters whose gradients may be reduced where they lie
        self._left: list[int] = []  # backwards until each is ready
        self._hooks: list[RemovableHandle] = []
        self._end = weakref.finalize(self, _let_go, stream, self._hooks)
        self._end.atexit = False
        for parameter, name in named.items():
            if owner := _owners.get(id(parameter)):
                owner._give_way(name)
        self._follow(named)
        self._start_step()

    @property
    def pending(self) -> bool:
        """Whether some gradient is ready, and perhaps being reduced, but not yet synchronized."""
        return self._stream.in_step

    def refuse_superseded(self) -> None:
        """Raises InvalidUsage if a later optimizer has one of these parameters, too."""
        if self._superseded_for:
            raise InvalidUsage(
                f"{self._superseded_for} is a parameter of a DistributedOptimizer made later, too, which alone has "
                "averaged its gradients since: step by the one made last, or give each its own parameters"
            )

    def set_passes(self, passes: int) -> None:
        """Sets how many backwards are added up in a gradient before it is reduced."""
        self._passes = passes
        self._left = [passes] * len(self._parameters)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Waits until all gradients are averages. One that is not ready is reduced as it is, or as zeros if None."""
        self.refuse_superseded()
        brought = list(self._step.order)
        with self._telling():
            self._check_unchanged()
            self._complete(set(range(len(self._parameters))).difference(brought))
            sparse = [] if self._sparse_as_dense else [*self._sparse, *self._stream.sparse]
            if self._parameters and self._stream.end_step(self._step.order if brought else [], sparse):
                self._follow_plan()
        self._left = [self._passes] * len(self._parameters)
        self._start_step()

    @torch.no_grad()
    def take_in(self, named: Mapping[torch.Tensor, str]) -> None:
        """Takes in these parameters: reduces their present gradients at once, and also those of all later steps.

        All ranks call it between the same two steps. No rank may have joined, since it would not know the parameters.
        """
        call = "add_param_group or requires_grad_"
        with self._stream.refusing(call):
            if any(id(parameter) in _owners for parameter in named):
                gc.collect()  # an optimizer may be gone but for a cycle
            for parameter, name in named.items():
                if (owner := _owners.get(id(parameter))) is not None and not owner._superseded_for:
                    raise InvalidUsage(
                        f"{name} needs a gradient now, and is a parameter of two DistributedOptimizers, which would "
                        "both average it: give each its own parameters"
                    )
            what = ", ".join(f"{name}: {describe(parameter)}" for parameter, name in named.items())
            announcement = self._stream.announce(call, what)
        try:
            announcement.result()
        except SyncError as error:  # ranks that have joined would wait for the steps to come
            announcement.tell(error)
            raise
        first, bucket = len(self._parameters), len(self._stream.plan)
        self._stream.extend(list(named))
        self._follow(named)
        self._start_step(bucket, announcement)
        with self._telling():
            self._complete(range(first, len(self._parameters)))
        self._start_step()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """A context in which this rank brings gradients, for which the others wait: they raise its errors, too."""
        with self._stream.refusing(f"a step of {self._stream.name}"):
            try:
                yield
            except Exception as error:
                if self._step.announcement is not None:
                    self._step.announcement.tell(error)
                raise
            except BaseException as error:  # Ctrl-C: nobody knows which of a bucket's calls have been made
                name, what = own_name(self._stream.communicator), type(error).__name__
                self._stream.abort(f"{name} was interrupted ({what}) in a step of {self._stream.name}")
                raise

    def _follow(self, named: Mapping[torch.Tensor, str]) -> None:
        me = weakref.ref(self)  # a parameter keeps its hooks
        for i, parameter in enumerate(named, len(self._parameters)):

            def hook(parameter: torch.Tensor, i: int = i) -> None:
                gradients = me()
                if gradients is not None and gradients._left[i] <= 0:  # an error, unless it is gone but for a cycle
                    del gradients
                    gc.collect()
                    gradients = me()
                if gradients is not None:
                    gradients._on_gradient(i, parameter)

            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            _owners[id(parameter)] = self
        self._parameters += named
        self._large += [parameter for parameter in named if parameter.nbytes >= LARGE]
        self._names += named.values()
        self._left += [self._passes] * len(named)
        self._follow_plan()

    def _complete(self, missing: Iterable[int]) -> None:
        """Reduces the gradients of parameters `missing` as they are, or zeros for them, and waits for all buckets."""
        for i in (i for i in missing if i in self._bucket_of):
            parameter = self._parameters[i]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._bring(i, parameter)
        self._step.missing = [0] * len(self._step.missing)  # Ctrl-C may have kept _bring from counting one
        self._reduce_what_is_complete()  # an error of backward is raised again
        if self._step.announcement is None and self._stream.sparse:
            self._step.announcement = self._stream.announce()
        if self._step.announcement is not None:
            self._step.announcement.result()
        for bucket, flat, work in self._step.reducing:
            work.wait()
            self._deliver(bucket, flat)
        for i in self._stream.sparse:
            total = self._stream.gather_sparse(i, self._parameters[i].grad)
            self._parameters[i].grad = total / self._stream.size if self._op is Average else total

    def _check_unchanged(self) -> None:
        for i, version in self._step.versions.items():
            gradient = self._parameters[i].grad
            if gradient is None or gradient._version == version:
                continue
            if gradient.untyped_storage().nbytes() == gradient.nbytes:  # else writes to other views count, too
                raise InvalidUsage(
                    f"the gradient of {self._names[i]} was changed between backward and step(), while it was being "
                    "reduced: call optimizer.synchronize() before it is clipped or changed otherwise, and put step() "
                    "into optimizer.skip_synchronize()"
                )

    def _give_way(self, name: str) -> None:
        """Stops reducing, as a later optimizer has the parameter `name`, too: two would average its gradient twice."""
        self._superseded_for = self._superseded_for or name
        self._end()
        self._flats.clear()
        self._start_step()

    def _follow_plan(self) -> None:
        self._flats.clear()
        self._bucket_of = {i: bucket for bucket, members in enumerate(self._stream.plan) for i in members}

    def _start_step(self, bucket: int = 0, announcement: Operation | None = None) -> None:
        self._stream.in_step = False
        self._step = _Step(list(map(len, self._stream.plan)), bucket, announcement)
        note_incoming(self._large)  # each time, since a user's first hook on a tensor displaces the note

    def _on_gradient(self, i: int, parameter: torch.Tensor) -> None:
        """Counts a backward of parameter `i`. Models may have thousands of parameters: rare cases are elsewhere."""
        left = self._left[i] = self._left[i] - 1
        if left > 0:
            return
        if left < 0:
            if parameter.grad is not None:
                self._step.versions[i] = parameter.grad._version  # this error is about the change
            raise InvalidUsage(
                f"the gradient of {self._names[i]} was computed more than {self._passes} times before step(): call "
                f"step() or synchronize() after each backward, or give backward_passes_per_step (now {self._passes}) "
                "how many come before it"
            )
        self._bring(i, parameter)

    def _bring(self, i: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.requires_grad or gradient.layout is not _STRIDED:
            with self._telling():
                self._make_dense(i, gradient)
        self._stream.in_step = True
        step, bucket = self._step, self._bucket_of.get(i)
        step.order.append(i)
        if bucket is None:  # a sparse gradient is gathered
            return
        step.versions[i] = parameter.grad._version  # type: ignore[union-attr] # a sparse one is another now
        left = step.missing[bucket] = step.missing[bucket] - 1
        if left == 0 and bucket == step.next:
            self._reduce_what_is_complete()

    @torch.no_grad()
    def _reduce_what_is_complete(self) -> None:
        step = self._step
        while step.next < len(step.missing) and step.missing[step.next] == 0:
            self._reduce(step.next)
            step.next += 1

    @torch.no_grad()
    def _make_dense(self, i: int, gradient: torch.Tensor) -> None:
        if gradient.requires_grad:
            raise InvalidUsage(
                f"the gradient of {self._names[i]} has a graph of its own: a DistributedOptimizer does not work with "
                "backward(create_graph=True); use torch.autograd.grad for that"
            )
        if gradient.layout != torch.sparse_coo:
            raise InvalidUsage(f"the gradient of {self._names[i]} has layout {gradient.layout}: use torch.sparse_coo")
        self._sparse[i] = gradient.sparse_dim()
        if i in self._bucket_of:
            self._parameters[i].grad = gradient.to_dense()

    def _gradients(self, bucket: int) -> list[torch.Tensor]:
        gradients = []
        for i in self._stream.plan[bucket]:
            parameter = self._parameters[i]
            if parameter.grad is None:
                raise InvalidUsage(
                    f"the gradient of {self._names[i]} was set to None between backward and step(): that is too early, "
                    "since other ranks wait for it"
                )
            gradients.append(parameter.grad)
        return gradients

    def _reduce(self, bucket: int) -> None:
        with self._telling():
            gradients = self._gradients(bucket)
            if self._step.announcement is None:
                self._step.announcement = self._stream.announce()
            flat = self._filled(bucket, gradients)
            scale(flat.values, self._factors[0])
            if self._factors[0] != 1.0 and flat.values.data_ptr() == gradients[0].data_ptr():
                self._step.versions[self._stream.plan[bucket][0]] = gradients[0]._version
            self._step.reducing.append((bucket, flat, self._stream.reduce(flat.values)))

    def _filled(self, bucket: int, gradients: list[torch.Tensor]) -> Flat:
        """The bucket with these gradients: copies, unless there is one gradient that can be reduced where it lies."""
        wire, first = self._stream.wire(bucket), gradients[0]
        lies_alone = len(gradients) == 1 and first.nbytes >= LARGE and first.dtype == wire and first.is_contiguous()
        if lies_alone and owns_gradient(self._parameters[self._stream.plan[bucket][0]]):
            return Flat(first.view(-1), gradients)
        flat = self._flats.get(bucket)
        if flat is None:
            elements = self._stream.elements(bucket)
            if first.device.type == "cpu":
                values = self._stream.communicator.empty([elements], wire)
            else:
                values = torch.empty(elements, dtype=wire, device=first.device)
            flat = self._flats[bucket] = Flat(values, apart(values, gradients))
        torch._foreach_copy_(flat.views, gradients)
        return flat

    def _deliver(self, bucket: int, flat: Flat) -> None:
        gradients = self._gradients(bucket)
        scale(flat.values, self._factors[1])
        if gradients[0].data_ptr() != flat.values.data_ptr():
            copy_each(gradients, flat.views)
        for i, dims in self._sparse.items():
            if i in self._stream.plan[bucket]:
                gradient = self._parameters[i].grad
                assert gradient is not None
                self._parameters[i].grad = gradient.to_sparse(dims)
