"""Finds out whether a step of elastic training has changed weights: then the step can't be repeated."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from syncengine.parallel.compiled import not_compiled
from syncengine.parallel.replication import is_freed, is_wrapper, plain_copy, unwrapped
from syncengine.sharded import ShardedOptimizer


class Updates:
    """Counts the changes of the weights of ``state``, whoever writes them.

    An update in place raises a parameter's version. A fused optimizer, or one that writes to ``.data``, raises none,
    but its ``step()`` is seen. A parameter that no optimizer of ``state`` has is compared by its bits.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state, self._steps = state, 0
        self._parameters: dict[int, torch.nn.Parameter] = {}

    def look(self) -> tuple[int, int, int]:
        """Returns three sums, of steps, versions and bits. If weights have changed since the last call, one differs."""
        state = self._state.values()
        models = [value for value in state if isinstance(value, torch.nn.Module)]
        self._parameters = own = {id(parameter): parameter for model in models for parameter in model.parameters()}
        seen = [o for o in state if isinstance(o, torch.optim.Optimizer) and getattr(o.step, "hooked", False)]
        others = own.keys() - {id(parameter) for optimizer in seen for parameter in parameters_of(optimizer)}
        parts = unwrapped(("", own[key]) for key in others)
        return self._steps, sum(p._version for p in own.values()), sum(_sum_of_bits(part) for _, part in parts)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which the steps of optimizers are counted."""
        with contextlib.ExitStack() as hooks:
            hooks.callback(register_optimizer_step_pre_hook(self._begins).remove)
            hooks.callback(register_optimizer_step_post_hook(self._ends).remove)
            yield

    @not_compiled
    def _begins(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counts an optimizer's step: at once if there are gradients, else when its closure has computed them."""
        # A ShardedOptimizer is not counted here: it waits for other ranks first, and raises versions when it writes.
        if isinstance(optimizer, ShardedOptimizer) or not self._changes_state(optimizer):
            return None
        if any(parameter.grad is not None for parameter in parameters_of(optimizer)):
            self._steps += 1
            return None
        closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def counted() -> Any:
            loss = closure()
            self._steps += 1
            return loss

        return ((args[0], counted, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": counted})

    @not_compiled
    def _ends(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._steps += self._changes_state(optimizer)

    def _changes_state(self, optimizer: torch.optim.Optimizer) -> bool:
        is_kept = any(value is optimizer for value in self._state.values())
        return is_kept or any(id(parameter) in self._parameters for parameter in parameters_of(optimizer))


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer of torch's; none of any other object."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()
    return (parameter for group in groups for parameter in group["params"])


def _sum_of_bits(parameter: torch.Tensor) -> int:
    """The sum of a parameter's bits, taken as words of 8 bytes, which is as fast as memory can be read."""
    if parameter.is_meta or is_freed(parameter):
        return 0
    plain = (plain_copy(parameter) if is_wrapper(parameter) else parameter).detach().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # even one element may have a stride
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    whole = len(flat) // 8 * 8
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())
