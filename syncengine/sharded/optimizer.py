"""``ShardedOptimizer``: each rank of a host updates a part of the weights, which all of them share."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.distributed.algorithms.join import Joinable

from syncengine.errors import InvalidUsage, SyncError, TornWeights
from syncengine.parallel import Parallel, watchers
from syncengine.parallel.compiled import not_compiled
from syncengine.parallel.groups import Group
from syncengine.parallel.rounds import Round, notify_torch_join
from syncengine.parallel.watchers import forward_watchers, take_part
from syncengine.sharded.block import part
from syncengine.sharded.claims import any_torn, check_not_torn
from syncengine.sharded.joining import StepHook, announce_step, catch_up
from syncengine.sharded.kinds import check_arguments, coupling, is_elementwise, own_options
from syncengine.sharded.shard import Member, Shard, Slice, options_of
from syncengine.sharded.sharing import Sharing

# All optimizers in the order in which they were made. They bind models by collectives, so all ranks must go through
# them in one order, and that of a set differs between ranks.
_optimizers: weakref.WeakValueDictionary[int, ShardedOptimizer] = weakref.WeakValueDictionary()
_count = itertools.count()


class ShardedOptimizer(torch.optim.Optimizer, Joinable):
    """An optimizer of which each rank of a host does a part, over weights and state that the ranks share.

    ``params`` are parameters or groups of them, as for ``optimizer_class``, which gets ``defaults``. It may be made
    before or after the model is wrapped. At the first synchronized forward of a ``Parallel`` that has these parameters,
    or the first ``step()``, they move into memory that all ranks of the host share. Parameters that no ``Parallel``
    has, or that are frozen, stay private, and each rank updates them by itself. Each of several hosts has one copy.

    ``elements``: whether the optimizer treats each element by itself, so that parameters may be cut into slices. It is
    needed if syncengine does not know the class. Without cutting (False), each parameter is updated whole, by one rank:
    right for optimizers that treat each parameter by itself, wrong for those in which one parameter's update depends on
    others (clipping by a norm of all gradients, Prodigy). Either is your promise, which is not checked before the first
    update: if ``step()`` leaves other numbers in the groups on different ranks, the next one raises ``Mismatch``, and
    the weights are void.

    The other arguments are those of torch's ``ZeroRedundancyOptimizer``. ``process_group`` must have the model's ranks;
    the model's group is used. ``parameters_as_bucket_view`` changes nothing, as parameters lie in shared memory.

    ``param_groups`` and ``state`` are those of the optimizer that it stands for, with the full shapes, and so is
    ``state_dict()``, which any rank may call alone. All ranks call ``step()`` and ``load_state_dict()``.

    Raises ``InvalidUsage`` for arguments that can't be sharded: CUDA parameters, ``LBFGS``, sparse gradients, classes
    that it does not know (see ``elements``), ``overlap_with_ddp=True``, options that couple parameters
    (``max_grad_norm``).
    """

    is_sharded = True

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        elements: bool | None = None,
        process_group: Group | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if "checksum" in defaults:
            raise InvalidUsage("ShardedOptimizer: checksum= is gone; what wrote unseen was seldom found: leave it out")
        check_arguments(process_group, parameters_as_bucket_view, overlap_with_ddp, elements)
        cuts = is_elementwise(optimizer_class, elements)
        if defaults.get("differentiable"):
            raise InvalidUsage("ShardedOptimizer: differentiable=True can't be sharded")
        params = list(params)
        given = [options_of(group) for group in params if isinstance(group, dict)] or [{}]
        plain = optimizer_class(params, **defaults)  # checks them as it would by itself
        self._coupling = functools.partial(coupling, optimizer_class.__name__, own_options(plain, given))
        if problem := self._coupling([vars(plain), plain.defaults, *plain.param_groups]):
            raise InvalidUsage(problem)
        if len(given) != len(plain.param_groups):  # it makes its own groups
            given = [options_of(group) for group in plain.param_groups]
        self._make_shard = functools.partial(Shard, optimizer_class, defaults, given)
        self._new_sharing = functools.partial(Sharing, self._make_shard, self._coupling, cuts, process_group)
        self._private_members: list[Member] = []
        self._begin()
        torch.optim.Optimizer.__init__(self, plain.param_groups, plain.defaults)
        Joinable.__init__(self)
        self.state.update(plain.state)
        self._plain = plain  # to load state dicts as its class does
        plain.state, plain.param_groups = defaultdict(dict), []
        if _watch_forward not in forward_watchers:
            forward_watchers.append(_watch_forward)
        self._made = next(_count)
        _optimizers[self._made] = self

    def _begin(self) -> None:
        self._sharing = self._new_sharing()
        self._parting = weakref.finalize(self, part, self._sharing.memories, self._sharing.claims)
        self._parting.atexit = False
        self._private: Shard | None = None  # of what is not shared
        self._place_of: weakref.WeakKeyDictionary[Parallel, int] = weakref.WeakKeyDictionary()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does. The next forward or step moves its parameters into shared memory, too."""
        if problem := self._coupling([param_group]):
            raise InvalidUsage(problem)
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.device.type not in ("cpu", "meta"):
                raise InvalidUsage(f"ShardedOptimizer is for CPU models, but a parameter is on {parameter.device}")
        self._sharing.known.clear()
        self._private = None

    # --- The optimizer's step

    @not_compiled
    @torch.optim.Optimizer.profile_hook_step  # which torch would do around not_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights, on all ranks at once. ``closure`` is evaluated once, before that.

        Raises on all ranks, before anything is written, if a rank's gradients are its own (after ``no_sync``, or after
        a backward that was given up), or if ranks differ in their parameter groups, options, or gradients that are
        None. Raises ``TornWeights`` if a rank dies in the middle of it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._bind_all(in_step=True)
        host = self._sharing.host
        notify_torch_join(self, host.communicator if host is not None else None)
        current = announce_step(self._sharing, self._number, self._join_config.enable)
        catch_up(self._sharing, self.param_groups, self.state, current)
        private, steps = self._sharing.registry.unshared(self.param_groups), self._sharing.steps
        try:
            try:
                self._sharing.update(self.param_groups, self.state)
            except BaseException:
                if private and self._sharing.steps > steps:  # the failure came after it
                    self._update_private(private)
                raise
            if private:
                self._update_private(private)
        finally:
            self._write_back()
        return loss

    def _write_back(self) -> None:
        for block in self._sharing.blocks:
            block.shard.write_back(self.param_groups)
        if self._private is not None:
            self._private.write_back(self.param_groups)

    def _number(self, model: Parallel) -> int:
        """The number of this optimizer among the sharded optimizers of ``model``."""
        if model not in self._place_of:
            self._place_of[model] = take_part(model._model, self._follow)
        return self._place_of[model]

    @torch.no_grad()
    def _follow(self, current: Round) -> None:
        """Takes part in a step of the others, on a rank that has no batch. Its gradients stay what they were."""
        before = [(parameter, parameter.grad) for group in self.param_groups for parameter in group["params"]]
        try:
            catch_up(self._sharing, self.param_groups, self.state, current)
            self._sharing.update(self.param_groups, self.state)
        finally:
            self._write_back()
            for parameter, grad in before:
                parameter.grad = grad

    def join_hook(self, **kwargs: Any) -> StepHook:
        """The hook for torch's ``Join([model, optimizer])``."""
        return StepHook(self._sharing, self._follow)

    @property
    def join_device(self) -> torch.device:
        """The device for torch's ``Join``: the model's."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The process group for torch's ``Join``: that of the model that is trained."""
        self._bind_all()
        models = (known() for known in self._sharing.models)
        group = next((model.process_group for model in models if model is not None), None)
        if group is None:
            raise InvalidUsage("torch's Join needs a model: wrap it in Parallel before")
        return group

    def _bind_all(self, in_step: bool = False) -> None:
        self._sharing.is_over(raises=SyncError)
        if not all(map(self._sharing.known.__contains__, list(watchers.models.values()))):
            gc.collect()  # a model may be gone but for a cycle, on this rank alone: nothing here holds one by now
        for model in list(watchers.models.values()):
            if model not in self._sharing.known:
                self._bind(model, in_step)

    def _bind(self, model: Parallel, in_step: bool = False) -> None:
        if self._sharing.bind(model, self.param_groups, self.state, in_step):
            self._number(model)

    def _update_private(self, members: list[Member]) -> None:
        if self._private is None or members is not self._private_members:
            slices = [Slice(i, 0, member.parameter.numel()) for i, member in enumerate(members)]
            self._private = self._make_shard(self.param_groups, members, slices, is_common=False)
            self._private_members = members
            for piece in self._private.pieces:
                state = self.state.get(piece.parameter) or self._private.optimizer.state[piece.tensor]
                if state:  # perhaps the very tensors that were loaded
                    own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
                    self.state[piece.parameter] = own
        self._private.optimizer.state = self.state
        self._private.update(self.param_groups)

    def _is_new(self, model: Parallel) -> bool:
        """Whether this forward of ``model`` synchronizes, and is the first that this optimizer sees."""
        synchronizes = torch.is_grad_enabled() and model._switches.synchronizes
        return synchronizes and not torch.is_inference_mode_enabled() and model not in self._sharing.known

    def _on_forward(self, model: Parallel) -> str:
        """Moves a new model's parameters into shared memory. Returns why to refuse its forward; or an empty text."""
        if self._sharing.is_over():
            check_not_torn(model.module.parameters())
            return ""  # the model says so
        if self._is_new(model):
            self._bind(model)
        return self._sharing.written()

    def _refuse(self, problem: str) -> NoReturn:
        """Raises the problem here and on all other ranks, since these wait for this one in the forward."""
        sharing = self._sharing
        assert sharing.host is not None
        text = f"{sharing.host.name(sharing.host.rank)}: {problem}"
        sharing.host.communicator.abort(text, "InvalidUsage")
        sharing.end(InvalidUsage(text))
        raise InvalidUsage(text)

    # --- The optimizer's state

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the plain optimizer, with full shapes. Any rank may call it alone, at any time."""
        self._sharing.is_over(raises=TornWeights)
        return super().state_dict()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Does nothing, since ``state_dict()`` is whole on every rank. Scripts for torch's class call it before."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this or of the plain optimizer, of any number of ranks. All ranks call it.

        The argument is not changed. The next ``step()`` brings the state into shared memory, and raises on all
        ranks if they have not loaded the same.
        """
        super().load_state_dict(state_dict)
        self._private = None
        for block in self._sharing.blocks:
            block.state.loaded = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plain.__setstate__(state)  # which may convert what others have saved
        super().__setstate__({"state": self._plain.state, "param_groups": self._plain.param_groups})
        self._plain.state, self._plain.param_groups = defaultdict(dict), []

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidUsage("a ShardedOptimizer can't be copied or pickled: use its state_dict()")

    def renew(self, loads: bool = False) -> None:
        """Goes on, after a failure, with the weights and the state that this rank has.

        They are shared anew with the ranks over which its models average by then; ``Parallel.shrink`` moves the models.
        Raises ``TornWeights`` if the weights are torn, unless the caller ``loads`` weights and state.
        """
        before = self._sharing
        if not before.is_over():
            before.end(InvalidUsage("this ShardedOptimizer was renewed"))
        if not loads:
            before.is_over(raises=TornWeights)
        self._parting.detach()
        self._begin()

    def release(self) -> None:
        """Gives this rank private copies of weights and state, and ends this optimizer. Another one may follow."""
        if self._sharing.over is None:
            self._sharing.end(InvalidUsage("this ShardedOptimizer was released"))
        _optimizers.pop(self._made, None)


ShardedOptimizer.step.hooked = True  # type: ignore[attr-defined] # by the decorator


def _watch_forward(model: Parallel) -> None:
    if any_torn():  # also where their optimizer is gone
        check_not_torn(model.module.parameters())
    if any(optimizer._is_new(model) for optimizer in list(_optimizers.values())):
        gc.collect()  # who is gone but for a cycle, on this rank alone, takes part in nothing
    for number in list(_optimizers):  # holds none: one that is gone, in a cycle, may be in the way of the next
        optimizer = _optimizers.get(number)
        if optimizer is not None and (problem := optimizer._on_forward(model)):
            del optimizer
            gc.collect()  # one that is gone refuses nothing
            if (optimizer := _optimizers.get(number)) is not None:
                optimizer._refuse(problem)
