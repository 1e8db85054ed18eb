"""Parameters, optimizers' states and any objects, from one rank to all or from all to all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from syncengine._C import Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.calls import Calls, bytes_of_rows
from syncengine.horovod.collective import Call, start
from syncengine.horovod.optimizer import Distributed
from syncengine.horovod.process_sets import ProcessSet, global_process_set
from syncengine.horovod.streams import Plan, Round
from syncengine.parallel.broadcast import TensorBroadcast, broadcast_named, describe_layout

Parameters = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


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

    The others' may be new: no step is made for it. `model` is not needed.
    """
    start(Call("broadcast_optimizer_state"), _state, optimizer, root_rank).result()


def _state(stream: Calls, call: Call, optimizer: torch.optim.Optimizer, root_rank: int) -> Plan:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidUsage(f"broadcast_optimizer_state needs an optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, Distributed):
        optimizer.check_idle("broadcast_optimizer_state()")
    root = stream.root(call.kind, root_rank)
    tensors: list[torch.Tensor] = []
    is_root = stream.rank == root
    own = _take_tensors(optimizer.state_dict(), tensors) if is_root else None
    data = pickle.dumps((own, [(tensor.dtype, tensor.shape) for tensor in tensors])) if is_root else b""
    received: list[Any] = []

    def send(round: Round) -> Sequence[Work]:
        outline, shapes = pickle.loads(_send(stream, data, round, root))
        values = [
            tensors[i].detach().cpu().contiguous() if is_root else torch.empty(shape, dtype=dtype, device="cpu")
            for i, (dtype, shape) in enumerate(shapes)
        ]
        TensorBroadcast(stream.communicator, values, torch.device("cpu"))(values, root)
        received[:] = [outline, values]
        return ()

    def load(_: Round) -> None:
        if not is_root:
            _load_in_place(optimizer, _put_tensors(*received))

    return Plan(f"root_rank={root_rank}", own=len(data), begin=send, finish=load)


def _load_in_place(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """The groups and the state stay the objects that they are on the root: schedulers, and the optimizer that a
    DistributedOptimizer was made of, hold them.
    """
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
    """Rank `root_rank`'s `obj`, pickled, on every rank."""

    def prepare(stream: Calls, call: Call) -> Plan:
        root = stream.root(call.kind, root_rank)
        data = pickle.dumps(obj) if stream.rank == root else b""
        received = b""

        def send(round: Round) -> Sequence[Work]:
            nonlocal received
            received = _send(stream, data, round, root)
            return ()

        def result(_: Round) -> Any:
            return obj if stream.rank == root else pickle.loads(received)

        return Plan(f"root_rank={root_rank}", own=len(data), begin=send, finish=result)

    return start(Call("broadcast_object", name, process_set), prepare).result()


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> list[Any]:
    """Every rank's `obj`, pickled, in rank order."""

    def prepare(stream: Calls, _: Call) -> Plan:
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        sizes: list[int] = []
        whole = data

        def send(round: Round) -> Sequence[Work]:
            nonlocal whole
            sizes[:] = bytes_of_rows(round, 1)
            whole = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
            return stream.gather(whole, data, sizes)

        def result(_: Round) -> list[Any]:
            return [pickle.loads(part.numpy().tobytes()) for part in whole.split(sizes)]

        return Plan(own=data.numel(), begin=send, finish=result)

    return start(Call("allgather_object", name, process_set), prepare).result()  # type: ignore[no-any-return]


def _send(stream: Calls, data: bytes, round: Round, root: int) -> bytes:
    """The root's `data`, on every rank."""
    message = torch.empty(round.requests[root].own, dtype=torch.uint8, device="cpu")
    if stream.rank == root:
        message.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    stream.communicator.broadcast(message, root)
    return message.numpy().tobytes()


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


class _Place:
    """Of a tensor that was taken out."""

    def __init__(self, index: int) -> None:
        self.index = index


def _take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return _rebuilt(value, lambda item: _take_tensors(item, tensors))


def _put_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.index]
    return _rebuilt(value, lambda item: _put_tensors(item, tensors))


def _rebuilt(value: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: of(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(of(item) for item in value)
    return value
