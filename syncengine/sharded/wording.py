"""What ranks that are about to do different things, or one that can't do them, read about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from syncengine.parallel import Parallel
from syncengine.sharded.block import Block
from syncengine.sharded.shard import Member
from syncengine.sharded.state import State, digest
from syncengine.sharded.weights import Named

SAME = "Do the same on every rank before step()."


def describe_shared(named: Sequence[Named], members: Sequence[Member], state: State) -> list[str]:
    """What is to be shared: a line for each parameter."""
    return [
        f"{name}: {str(p.dtype).removeprefix('torch.')} {tuple(p.shape)}, group {group}, "
        + (f"state with CRC-32 {digest(entries):08x}" if (entries := state.get(p)) else "no state")  # {}: was read
        for (name, p), (_, group) in zip(named, members, strict=True)
    ]


def describe_update(step: int, options: Sequence[str], blocks: Iterable[Block]) -> Iterator[str]:
    """An update: what it depends on, line by line."""
    yield f"step {step}"
    yield from options
    for block in blocks:
        yield f"loaded a state dict of the model: {'yes' if block.weights.loaded else 'no'}"
        yield from block.describe_gradients()


def advise(blocks: Sequence[Block]) -> str:
    """What to do where these differ between ranks."""
    changed = sorted(set().union(*(block.shard.changed for block in blocks)))
    if not changed:
        return SAME
    names, kind = ", ".join(map(repr, changed)), blocks[0].shard.kind
    return (
        f"{SAME} Or, if {kind}.step() itself has changed {names}: it does not treat each parameter by itself, and "
        "the weights are void. Continue from a checkpoint, with a plain optimizer."
    )


def why_not_averages(models: Iterable[Callable[[], Parallel | None]]) -> str:
    """Why the gradients of one of them are none; or an empty text."""
    for known in models:
        if (model := known()) is None or not model.reducer.reduces:
            continue
        reason = "" if model.reducer.averages_elsewhere else model.reducer.not_averaged()
        if reason and any(parameter.grad is not None for parameter in model._module_parameters):
            return f"the gradients of {type(model.module).__name__} are not averages: {reason}"
    return ""
