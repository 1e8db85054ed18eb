"""Claims: notes of the parameters in shared memory, with which hooks keep other code from writing to these."""

import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from syncengine.errors import InvalidUsage, TornWeights
from syncengine.parallel.watchers import common
from syncengine.sharded.weights import SharedWeights


class Claim:
    """The claim of an optimizer on one parameter."""

    def __init__(self, parameter: torch.nn.Parameter, name: str, by: SharedWeights) -> None:
        self._parameter = weakref.ref(parameter)
        self.name = name
        self.by: SharedWeights | None = by  # None: it is private again
        self.torn = ""  # why nobody must use its values

    def tear(self, why: str) -> None:
        """Notes why the parameter's values must not be used."""
        global _torn
        _torn = True
        self.torn = why

    def give_up(self) -> None:
        """Gives the parameter up: it is private again. Later calls do nothing: another optimizer may have it."""
        if self.by is None:
            return
        self.by = None
        if (parameter := self._parameter()) is not None:
            common.pop(parameter, None)


_claims: Any = WeakIdKeyDictionary()  # by parameter
_register_once = functools.cache(register_optimizer_step_pre_hook)
_torn = False
_guarded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules with claimed parameters in them, or below


def any_torn() -> bool:
    """Whether there may be torn weights in this process."""
    return _torn


def claim(parameter: torch.nn.Parameter, name: str, by: SharedWeights) -> Claim:
    """Notes that ``parameter`` lies in shared memory from now on."""
    _register_once(_refuse_plain_optimizers)
    made = _claims[parameter] = Claim(parameter, name, by)
    return made


def check_not_torn(parameters: Iterable[torch.Tensor | None]) -> None:
    """Raises ``TornWeights`` if one of ``parameters`` has values that must not be used."""
    for parameter in parameters:
        found = _claims.get(parameter) if parameter is not None else None
        if found is not None and found.torn:
            raise TornWeights(found.torn)


def stop_forwards() -> None:
    """Makes forwards of modules with torn weights raise ``TornWeights``, until other weights are loaded."""
    for module in list(_guarded):
        if any(isinstance(hook, _Stop) for hook in module._forward_pre_hooks.values()):
            continue
        try:
            check_not_torn(module.parameters())
        except TornWeights:
            stop = _Stop()
            stop.handle = module.register_forward_pre_hook(stop, prepend=True)


class _Stop:
    """A forward pre-hook that raises ``TornWeights``. It removes itself when the weights are whole, to cost nothing."""

    handle: RemovableHandle

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        check_not_torn(module.parameters())
        self.handle.remove()

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")  # a copy is a function that takes the same arguments and returns the second


def unload(module: torch.nn.Module) -> None:
    """Moves the parameters of ``module`` into private memory, for other code to write the same to them on all ranks.

    The next step moves them back. Raises ``InvalidUsage`` if this rank has written to one of them, or moved it, before.
    """
    found = [_claims.get(parameter) for parameter in module.parameters()]
    claimants = {id(claim.by): claim.by for claim in found if claim is not None and claim.by is not None}
    for claimant in claimants.values():
        if problem := claimant.written_by_this_rank():
            raise InvalidUsage(problem)
        claimant.unload()


def _is_claimed(found: Claim) -> bool:
    """Whether a living optimizer has the parameter. One that only a reference cycle holds is collected first."""
    if found.by is not None:
        gc.collect()
    return found.by is not None


def _refuse_plain_optimizers(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "is_sharded", False):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = _claims.get(parameter)
            if found is not None and found.torn:
                raise TornWeights(found.torn)
            if found is not None and _is_claimed(found):
                raise InvalidUsage(
                    f"{type(optimizer).__name__}.step() would write to parameter {found.name}, which lies in memory "
                    "that all ranks share, on each of them: step the ShardedOptimizer instead, or release() it first"
                )


def guard(module: torch.nn.Module) -> None:
    """Hooks into the loading, saving and copying of parameters of ``module`` that a ShardedOptimizer has claimed."""
    _guard_below(module, {id(parameter) for parameter in _claims})


def _guard_below(module: torch.nn.Module, claimed: set[int]) -> bool:
    """Hooks into a module. Returns whether the module, or one below it, has claimed parameters."""
    own = any(id(parameter) in claimed for parameter in module._parameters.values())
    below = [_guard_below(child, claimed) for child in module.children()]
    if own and not any(isinstance(hook, _Guard) for hook in module._state_dict_pre_hooks.values()):
        hook = _Guard(module)
        module.register_state_dict_pre_hook(hook)
        module.register_load_state_dict_pre_hook(hook)
    if own or any(below):
        _guarded.add(module)
    return own or any(below)


class _Guard:
    """A module's hook on saving and loading. Copies and pickles of the module have a harmless function in its place."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, module: torch.nn.Module, *args: Any) -> None:
        if len(args) <= 2:  # prefix, keep_vars
            check_not_torn(module._parameters.values())
        else:
            self._before_load(module, *args[:3])

    def _before_load(self, module: torch.nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
        for key, parameter in module._parameters.items():
            found = _claims.get(parameter) if parameter is not None else None
            if parameter is None or found is None or prefix + key not in state_dict:
                continue
            value = state_dict[prefix + key]
            if torch.is_tensor(value) and (value.shape == parameter.shape or (value.dim(), parameter.dim()) == (1, 0)):
                found.torn = ""  # torch loads no other shape, and raises
            if found.by is None:
                continue
            if metadata.get("assign_to_params_buffers") and _is_claimed(found):
                raise InvalidUsage(
                    f"load_state_dict(assign=True) would put another tensor in the place of parameter {found.name}, "
                    "which lies in memory that all ranks share: leave out assign=True"
                )
            if found.by is not None:
                found.by.unload()

    def __reduce__(self) -> Any:
        if (module := self._module()) is not None:
            check_not_torn(module._parameters.values())
        return functools.partial, (torch.nn.Identity,)  # takes any arguments, and does nothing
