"""DistributedOptimizer: a script's own optimizer, with gradients that are averaged over all ranks."""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from syncengine._C import Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.calls import Calls
from syncengine.horovod.collective import Compressor
from syncengine.horovod.gradient_stream import Buckets, GradientStream, Groups, Settings
from syncengine.horovod.gradients import Gradients, check_not_in_step
from syncengine.horovod.process_sets import ProcessSet, global_process_set, refusing
from syncengine.horovod.reductions import Average, Compression, ReduceOp
from syncengine.horovod.requests import describe
from syncengine.horovod.streams import Plan, Round
from syncengine.parallel.replication import check_same_on_all_ranks

Named = Iterable[tuple[str, torch.Tensor]]


@functools.cache  # once in a process
def _watch_scalers() -> None:
    """Patches GradScaler.unscale_, for good, to refuse gradients that a DistributedOptimizer is still reducing."""
    unscale = torch.amp.GradScaler.unscale_

    @functools.wraps(unscale)
    def unscale_(self: torch.amp.GradScaler, optimizer: Any) -> None:
        if isinstance(optimizer, Distributed) and self.is_enabled():
            optimizer.check_idle("scaler.unscale_(optimizer), or scaler.step(optimizer) without it,")
        unscale(self, optimizer)

    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Named | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = global_process_set,
) -> torch.optim.Optimizer:
    """An optimizer of `optimizer`'s class, with its parameters, options and state. It reduces gradients over all ranks.

    All ranks make their optimizers in the same order. Gradients are reduced in buckets while backward runs, and are
    complete after `step()` or `synchronize()`.

    - `named_parameters`: names for messages; all parameters of the optimizer must be among them.
    - `compression`: Compression.none or Compression.fp16.
    - `backward_passes_per_step`: backwards whose gradients are added before they are reduced.
    - `op`: Average or Sum.
    - `gradient_predivide_factor`: divides gradients before they are added; the sum is then divided by size / factor.
    - `num_groups`, `groups`: the number of buckets, or the parameters of each; by default buckets follow from sizes.
    - `sparse_as_dense`: sparse gradients travel as dense ones; without it they are gathered, from the second step on
      and where there are no groups. They stay sparse for the optimizer.
    - `process_set`: the ranks over which gradients are averaged. Other ranks get an optimizer that reduces nothing.

    Raises Mismatch on all ranks, naming the parameter, where names, dtypes, shapes or arguments differ between ranks.
    """
    outside = isinstance(process_set, ProcessSet) and not process_set.included() and process_set.size() is not None
    with nullcontext() if outside else refusing(process_set, "DistributedOptimizer") as stream:  # collective in the set
        if isinstance(optimizer, Distributed):
            raise InvalidUsage("this optimizer is a DistributedOptimizer already: wrap it once")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidUsage(f"DistributedOptimizer needs an optimizer, not {type(optimizer).__name__}")
        buckets = _groups(num_groups, groups)
        passes, predivide = backward_passes_per_step, gradient_predivide_factor
        settings = Settings(compression, passes, op, predivide, sparse_as_dense, buckets)
        _watch_scalers()
        wrapped: Distributed = object.__new__(_distributed(type(optimizer)))  # type: ignore[arg-type] # it is hashable
        wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
        wrapped._connect(stream, _names(optimizer.param_groups, named_parameters), settings)
    return wrapped


class Distributed(torch.optim.Optimizer):
    """The methods that DistributedOptimizer adds to a class of optimizers. It is not made by itself."""

    _gradients: Gradients | None  # None with one rank

    def _connect(self, stream: Calls | None, names: dict[torch.Tensor, str], settings: Settings) -> None:
        self._parameters = self._parameter_names = names  # the latter as in Horovod, for scripts that look
        self._accepted: dict[int, torch.Tensor] = {}  # by id, since torch hashes tensors in Python
        named = self._newcomers()
        followed = list(named)
        self._settings = settings
        self.backward_passes_per_step, self.op = settings.passes, settings.op
        self.gradient_predivide_factor = settings.predivide
        self._synchronized, self._should_synchronize, self._gradients = False, True, None
        kind = type(self).__name__
        check_not_in_step(named)
        plan = _user_buckets(followed, settings.groups)
        if stream is None:
            return
        lines = [
            f"{settings}, {len(followed)} parameters, groups: {plan}",
            *(f"{name}: {describe(parameter)}" for parameter, name in named.items()),
        ]

        def connect(_: Round) -> Sequence[Work]:
            if stream.size == 1:
                return ()
            stream.close_unneeded()
            differ = f"the parameters of DistributedOptimizer({kind}) differ"
            check_same_on_all_ranks(stream.communicator, differ, lines)
            communicator = stream.communicator.split(list(range(stream.size)))
            assert communicator is not None
            own = GradientStream(communicator, kind, followed, settings, plan)
            stream.optimizers.append(own)
            self._gradients = Gradients(own, named, settings)
            self._accepted.update((id(parameter), parameter) for parameter in named)
            return ()

        stream.submit("DistributedOptimizer", None, Plan(kind, begin=connect)).result()

    def follow(self, stream: Calls) -> None:
        """Moves the optimizer to the ranks of `stream`, as if made anew, and drops its gradients. All ranks call it."""
        names = _names(self.param_groups, [(name, p) for p, name in self._parameters.items()])
        for parameter in names:
            parameter.grad = None
        self._should_synchronize = True
        self._connect(stream, names, self._settings)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backwards come before a step. Raises InvalidUsage between backward and step."""
        settings = replace(self._settings, passes=passes)
        self.check_idle("optimizer.set_backward_passes_per_step()")
        self._settings, self.backward_passes_per_step = settings, passes
        if self._gradients is not None:
            self._gradients.set_passes(passes)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. All ranks call it.

        A parameter without a new gradient contributes its `.grad` as it is, or zeros. Parameters that were unfrozen, or
        added to the optimizer, are taken in here, on all ranks in the same step. Call it to clip or inspect gradients
        before `step()`, which then belongs into `skip_synchronize()`.
        """
        if self._gradients is not None:
            self._gradients.synchronize()
            if newcomers := self._newcomers():
                self._gradients.take_in(newcomers)
                self._accepted.update((id(parameter), parameter) for parameter in newcomers)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step()` does not synchronize, for use after `synchronize()`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Synchronizes, then steps. With a `closure`, synchronizes after each call of it; its loss is not averaged."""
        if self._gradients is not None:
            self._gradients.refuse_superseded()
        if closure is not None:
            closure = functools.partial(self._averaged, closure) if self._should_synchronize else closure
        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are averaged once more, also those that were clipped since",
                    stacklevel=2,
                )
            self.synchronize()
        else:
            self.check_idle("optimizer.step() inside skip_synchronize()")
        self._synchronized = False
        return super().step(*([closure] if closure is not None else []), **options)

    step.hooked = True  # type: ignore[attr-defined] # the class's own step runs torch's hooks, once

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Calls zero_grad of the optimizer's own class. Raises InvalidUsage between backward and step()."""
        self.check_idle("optimizer.zero_grad()")
        super().zero_grad(*args, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Calls load_state_dict of the optimizer's own class. Raises InvalidUsage between backward and step()."""
        self.check_idle("optimizer.load_state_dict()")
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)

    def check_idle(self, call: str) -> None:
        """Raises InvalidUsage between backward and step."""
        if self._gradients is not None and self._gradients.pending:
            raise InvalidUsage(
                f"{call} between backward and step(): gradients are still being reduced; call "
                "optimizer.synchronize() or step() before"
            )

    def _newcomers(self) -> dict[torch.Tensor, str]:
        """The parameters that need a gradient and were not accepted yet: some may be added or unfrozen at any time."""
        unknown = [(i, p) for i, p in enumerate(_all(self.param_groups)) if id(p) not in self._accepted]
        return {p: self._parameters.get(p, f"parameter {i}") for i, p in unknown if p.requires_grad}

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.synchronize()
        self._synchronized = False
        return loss


@functools.cache  # a class that is dropped stays until Python looks for cycles
def _distributed(kind: type[torch.optim.Optimizer]) -> type[Distributed]:
    """The class of a DistributedOptimizer that is made of an optimizer of class `kind`."""
    return type(kind.__name__, (Distributed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _all(groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _names(groups: Sequence[dict[str, Any]], named_parameters: Named | None) -> dict[torch.Tensor, str]:
    """The names of all parameters. A parameter without a name gets one with its index: "parameter 3"."""
    named = [] if named_parameters is None else list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
        raise InvalidUsage("named_parameters must be pairs of name and parameter, as model.named_parameters() gives")
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise InvalidUsage(f"named_parameters has {', '.join(twice)} more than once: give each parameter its own name")
    names = {parameter: name for name, parameter in named}
    for i, parameter in enumerate(_all(groups)):
        if named_parameters is not None and parameter not in names:
            raise InvalidUsage(
                f"named_parameters lacks parameter {i} of the optimizer, of shape {tuple(parameter.shape)}: give the "
                "names of all of them"
            )
        names.setdefault(parameter, f"parameter {i}")
    return names


def _groups(num_groups: int, groups: Groups) -> Groups:
    if groups is not None and num_groups != 0:
        raise InvalidUsage("num_groups is the old form of groups: give only one of them")
    chosen = num_groups if groups is None else groups
    if isinstance(chosen, int):
        if chosen < 0:
            raise InvalidUsage(f"groups={chosen}: give the number of groups, or lists of parameters")
        return chosen or None
    if not all(isinstance(p, torch.Tensor) for group in chosen for p in group):
        raise InvalidUsage("groups must be a number, or lists of parameters")
    return chosen


def _user_buckets(parameters: Sequence[torch.Tensor], groups: Groups) -> Buckets | None:
    """Buckets of the user's groups, cut by dtype, in the order of backward. Parameters in no group go alone."""
    if groups is None:
        return None
    count = len(parameters)
    if isinstance(groups, int):
        size = -(-count // groups) or 1
        members = [list(range(first, min(first + size, count))) for first in range(0, count, size)]
    else:
        index = {parameter: i for i, parameter in enumerate(parameters)}
        members = [[index[p] for p in group if p in index] for group in groups]
        listed = [i for group in members for i in group]
        if len(set(listed)) != len(listed):
            raise InvalidUsage("groups: a parameter is in more than one group, or twice in one")
        members += [[i] for i in range(count) if i not in listed]
    plan = [
        [i for i in group if parameters[i].dtype == dtype]
        for group in members
        for dtype in dict.fromkeys(parameters[i].dtype for i in group)
    ]
    return sorted(plan, key=min, reverse=True)
