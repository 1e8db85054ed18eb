"""Tensors, parameters, optimizers' states and any objects, from one rank to all; and any objects, from all to all."""

import functools
import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from syncengine._C import Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.allreduce import average_of
from syncengine.horovod.calls import Calls, as_bytes
from syncengine.horovod.collective import Call, Tensors, perform, start, taking
from syncengine.horovod.gather import gathering
from syncengine.horovod.optimizer import Distributed
from syncengine.horovod.process import rank
from syncengine.horovod.process_sets import ProcessSet, global_process_set
from syncengine.horovod.reductions import assign, in_order, plain
from syncengine.horovod.requests import describe
from syncengine.horovod.streams import Plan, Round
from syncengine.parallel.broadcast import broadcast_named, describe_layout

Parameters = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


@taking("name process_set")
def broadcast_async(call: Call, tensor: torch.Tensor, root_rank: int) -> int:
    """Starts to copy rank `root_rank`'s `tensor`, of the same shape and dtype on all ranks, into a new one.

    Returns a handle for `poll` and `synchronize`.
    """
    return perform(call, [tensor], _sending, None, root_rank)


@taking("name process_set")
def broadcast_async_(call: Call, tensor: torch.Tensor, root_rank: int) -> int:
    """Copies in place, otherwise as `broadcast_async`; no other operation may use the tensor until `synchronize`."""
    return perform(call, [tensor], _sending, None, root_rank)


@taking("name process_set")
def broadcast(call: Call, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """A copy of rank `root_rank`'s `tensor`.

    Gradients flow through the copy: the root gets their average over all ranks, as in Horovod, the others get zeros.
    """

    def gradient(call: Call, of_copy: torch.Tensor) -> Tensors:
        reduced = average_of(call, [of_copy])
        return reduced if rank() == root_rank else list(map(torch.zeros_like, reduced))

    return perform(call, [tensor], _sending, gradient, root_rank)


@taking("name process_set")
def broadcast_(call: Call, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """Copies rank `root_rank`'s values into `tensor`, and returns it."""
    return perform(call, [tensor], _sending, None, root_rank)


def _sending(stream: Calls, call: Call, tensors: Tensors, root_rank: int) -> Plan:
    stream.check(call.kind, tensors)
    (tensor,) = tensors
    root = stream.root(call.kind, root_rank)
    values = plain(tensor)
    if not call.in_place and values.data_ptr() == tensor.data_ptr():
        values = values.clone()

    def finish() -> torch.Tensor:
        if not call.in_place:
            return values
        if values.data_ptr() != tensor.data_ptr() and stream.rank != root:
            assign(tensor, values)
        return tensor

    what = f"{describe(values)}, root_rank={root_rank}"
    work = in_order([values], lambda _: [stream.communicator.broadcast(as_bytes(values), root, async_op=True)])
    return Plan(what, how=str(root), begin=work, finish=finish)


def broadcast_parameters(
    params: Parameters, root_rank: int, process_set: ProcessSet | None = global_process_set
) -> None:
    """Copies rank `root_rank`'s values into `params`: a state_dict, named parameters, or parameters.

    Raises Mismatch on all ranks, naming the tensor, where names, dtypes or shapes differ between ranks.
    """
    start(Call("broadcast_parameters", None, process_set), _parameters, params, root_rank).result()


def _parameters(stream: Calls, call: Call, params: Parameters, root_rank: int) -> Plan:
    named = [(name, tensor.detach()) for name, tensor in _named(params)]
    devices = dict.fromkeys(tensor.device for _, tensor in named)
    members = {device: [(name, tensor) for name, tensor in named if tensor.device == device] for device in devices}
    lines = {device: describe_layout(mine) for device, mine in members.items()}
    kinds = ", ".join(device.type for device in devices) or "no device"
    root = stream.root(call.kind, root_rank)

    def send(_: Round) -> Sequence[Work]:
        for device, mine in members.items():
            what = "the tensors of broadcast_parameters"
            broadcast_named(stream.communicator, what, mine, device, root, lines[device])
        return ()

    return Plan(f"root_rank={root_rank}, tensors on {kinds}", begin=send)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives `optimizer` the state and options of rank `root_rank`'s: momenta, step counts, learning rates, ...

    On other ranks the optimizer may be new: no step is made to give it a state. `model` is not needed.
    """
    start(Call("broadcast_optimizer_state"), _state, optimizer, root_rank).result()


def _state(stream: Calls, call: Call, optimizer: torch.optim.Optimizer, root_rank: int) -> Plan:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidUsage(f"{call.kind} needs an optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, Distributed):
        optimizer.check_idle(f"{call.kind}()")

    def load(data: bytearray) -> None:
        load_in_place(optimizer, torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))

    def pack() -> bytes:
        data = to_bytes(optimizer.state_dict())
        try:
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise InvalidUsage(
                f"{call.kind}: the optimizer's state has more than tensors and numbers of Python ({error}): send it "
                "by broadcast_object(optimizer.state_dict())"
            ) from error
        return data

    return _from_root(stream, call, root_rank, pack, load, None)


def to_bytes(value: object) -> bytes:
    """Serializes tensors of any device, and other objects, in lists and the like."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_bytes(data: bytes | bytearray) -> Any:
    """The value that `to_bytes` has serialized, with its tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def load_in_place(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads a state dict into the same groups and state, which schedulers and the wrapped optimizer hold, too."""
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state_dict)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    if state is not optimizer.state:
        state.clear()
        state.update(optimizer.state)
    optimizer.param_groups, optimizer.state = groups, state


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Any:
    """Returns rank `root_rank`'s `obj` on every rank: itself on that rank, and copies by pickle on others."""
    call = Call("broadcast_object", name, process_set)
    return start(call, _from_root, root_rank, lambda: pickle.dumps(obj), pickle.loads, obj).result()


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> Callable[[Any], Any]:
    """A function of an object that calls `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> list[Any]:
    """Returns copies of every rank's `obj`, made by pickle, in rank order."""
    sizes: list[Sequence[int]] = []

    def prepare(stream: Calls, call: Call) -> Plan:
        own = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        return gathering(stream, call, [own], sizes)

    whole: torch.Tensor = start(Call("allgather_object", name, process_set), prepare).result()
    return [pickle.loads(part.numpy().tobytes()) for part in whole.split(list(sizes[0]))]


def _from_root(
    stream: Calls, call: Call, root_rank: int, pack: Callable[[], bytes], unpack: Callable[[bytearray], Any], own: Any
) -> Plan:
    """Plans to send the root's `pack()` to all ranks. The result is `unpack()` of that; on the root it is `own`."""
    root = stream.root(call.kind, root_rank)
    data = bytearray(pack() if stream.rank == root else b"")

    def send(round: Round) -> Sequence[Work]:
        if stream.rank != root:
            data.extend(bytes(round[root].own))
        return [stream.communicator.broadcast(torch.frombuffer(data, dtype=torch.uint8), root, async_op=True)]

    finish = functools.partial(unpack, data) if stream.rank != root else lambda: own
    return Plan(f"root_rank={root_rank}", own=len(data), begin=send, finish=finish)


def _named(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        named: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        named = [p if isinstance(p, tuple) else (f"tensor {i}", p) for i, p in enumerate(params)]
    else:
        raise InvalidUsage(
            f"broadcast_parameters: {type(params).__name__} is none of a state_dict, named_parameters(), parameters()"
        )
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidUsage(
                f"broadcast_parameters: {name} is of type {type(tensor).__name__}, no tensor: send it by "
                "hvd.broadcast_object, and leave it out here"
            )
    return named
