"""Kinds of optimizers: one that treats each element by itself can update slices of parameters, with the same bits."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage
from syncengine.parallel.groups import Group, check_group

# Exactly these classes treat each element by itself; a subclass may do anything.
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_REFUSED = {
    torch.optim.LBFGS: "it evaluates its closure several times within one step",
    torch.optim.SparseAdam: "it is for sparse gradients",
}
# If one of these options is true, a parameter's update depends on other parameters, which another rank may have.
_BY_ITSELF = "use it by itself, on each rank"
_CLIP = "call torch.nn.utils.clip_grad_norm_() before step()"
_COUPLING = {  # (what it is, what to do)
    "max_grad_norm": ("a norm over all parameters", f"pass max_grad_norm=None (some classes: 0), and {_CLIP}"),
    "clip_global": ("a norm over all parameters", f"pass clip_global=False, and {_CLIP}"),
    "d0": ("a step size estimated from all parameters, as D-Adaptation's and Prodigy's", _BY_ITSELF),
    "d_coef": ("a step size estimated from all parameters, as Prodigy's", _BY_ITSELF),
}


def is_elementwise(optimizer_class: type[torch.optim.Optimizer], elements: bool | None) -> bool:
    """Whether parameters may be cut. Raises ``InvalidUsage`` if that is not known, or the class can't be sharded."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise InvalidUsage(
            f"ShardedOptimizer needs a class of optimizers, such as torch.optim.AdamW: {optimizer_class!r}"
        )
    name = optimizer_class.__name__
    for kind, reason in _REFUSED.items():
        if issubclass(optimizer_class, kind):
            raise InvalidUsage(f"{name} can't be sharded: {reason}. Use it by itself, on each rank")
    if elements is not None:
        return elements
    if optimizer_class in ELEMENTWISE:
        return True
    raise InvalidUsage(
        f"ShardedOptimizer does not know {name}: pass elements=True if it treats each element by itself, as AdamW does "
        "(parameters are cut then), or elements=False if it treats each parameter by itself, as Muon and Adafactor do; "
        "if the update of one depends on others, as with clipping by a norm of all, it can't be sharded"
    )


def own_options(plain: torch.optim.Optimizer, given: Iterable[Mapping[str, Any]]) -> set[str]:
    """The options of an optimizer's class. Other keys of the groups that were ``given`` to it are the user's own."""
    in_groups = {name for group in plain.param_groups for name in group} - {name for group in given for name in group}
    return in_groups | set(plain.defaults) | set(vars(plain))


def coupling(name_of_class: str, own: set[str], options: Iterable[Mapping[str, Any]]) -> str:
    """A text about an option, one of the class's ``own``, by which parameters affect each other; or an empty text."""
    for group in options:
        for name, (what, remedy) in _COUPLING.items():
            value = group.get(name) if name in own else None
            if value.any() if isinstance(value, torch.Tensor) else value:
                return (
                    f"{name_of_class} has {name}={value}, {what}, but with ShardedOptimizer each rank "
                    f"updates its part alone: {remedy}"
                )
    return ""


def check_arguments(process_group: Any, as_bucket_view: Any, overlaps: Any, elements: Any) -> None:
    """Raises ``InvalidUsage`` for arguments that ``ShardedOptimizer`` does not support, and for meaningless values."""
    if not isinstance(elements, bool | None):
        raise InvalidUsage(
            f"ShardedOptimizer: elements={elements!r} is none of True, False and None (a group goes by its name, "
            "process_group=)"
        )
    if not isinstance(as_bucket_view, bool):
        raise InvalidUsage(f"ShardedOptimizer: parameters_as_bucket_view={as_bucket_view!r} is neither True nor False")
    if overlaps:
        raise InvalidUsage(
            f"ShardedOptimizer: overlap_with_ddp={overlaps!r} would step within backward, by a communication hook: "
            "leave it out, and call step()"
        )
    check_group(process_group)


def other_ranks(process_group: Group | None, communicator: Communicator) -> str:
    """A text if ``process_group`` has other ranks than ``communicator``, which is the model's; or an empty text."""
    if process_group is None or process_group is communicator:
        return ""
    of_group = (
        process_group.global_ranks
        if isinstance(process_group, Communicator)
        else dist.get_process_group_ranks(process_group)
    )
    if sorted(of_group) == sorted(communicator.global_ranks):
        return ""
    return (
        f"process_group of ShardedOptimizer has ranks {sorted(of_group)}, but the model is trained on ranks "
        f"{sorted(communicator.global_ranks)}: give it the model's, or leave it out"
    )
