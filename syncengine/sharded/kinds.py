"""Which optimizers can be cut: those that treat each element by itself, so that a slice's bits are the whole's."""

from __future__ import annotations

import torch

from syncengine.errors import InvalidUsage

# Exactly these: a subclass may do anything.
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


def is_elementwise(optimizer_class: type[torch.optim.Optimizer], elements: bool | None) -> bool:
    """Whether parameters may be cut. Raises ``InvalidUsage`` where that is not known, and for what can't be sharded."""
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
        "(parameters are cut then), or elements=False if it needs whole parameters, as Muon, LAMB and Adafactor do"
    )
