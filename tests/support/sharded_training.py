"""What the tests of ShardedOptimizer share: models, and training beside plain torch. Runs inside rank processes."""

import contextlib
import copy
import gc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models.workload import same_bits
from parallel_models import MODELS as LARGER
from torch import nn

import syncengine


class Odd(nn.Module):
    """Sizes that no vector divides, so that slices end and begin within parameters, and have tails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 97), nn.Linear(97, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


MODELS = {**LARGER, "odd": Odd}
del MODELS["waves"]  # its parameters are not all of one dtype

# Of torch's elementwise ones, the options with most state.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1e-3, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "ASGD": {},
    "Rprop": {},
}


def make(model: str = "mlp") -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return MODELS[model]()


def make_odd() -> nn.Module:
    return make("odd")


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other data on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * step + syncengine.rank())
    return torch.randn(6, 24, generator=generator).to(dtype)


def dtype_of(net: nn.Module) -> torch.dtype:
    return next(net.parameters()).dtype


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range | int, after: Any = None) -> None:
    """`after` is called with the number of the step after each."""
    dtype = dtype_of(model)
    for step in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        model(batch(step, dtype)).float().square().mean().backward()
        optimizer.step()
        if after is not None:
            after(step)


def sharded(
    net: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, of: Any = None, **options: Any
) -> tuple[Any, Any]:
    """(the wrapped model, its sharded optimizer). `of`: parameters or groups of them; without, all of `net`."""
    options = {"lr": 1e-2, **options}
    return syncengine.Parallel(net), syncengine.ShardedOptimizer(of or net.parameters(), kind, **options)


def plain(
    net: nn.Module,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    of: Any = None,
    elements: bool | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """(the wrapped model, an optimizer on each rank). `elements` is only for `sharded`."""
    return syncengine.Parallel(net), kind(of or net.parameters(), **{"lr": 1e-2, **options})


def trained(steps: int, net: nn.Module | None = None, *kind: Any, **options: Any) -> tuple[nn.Module, Any, Any]:
    """(net, the wrapped model, its sharded optimizer) after some steps"""
    net = net or make()
    model, optimizer = sharded(net, *kind, **options)
    train(model, optimizer, steps)
    return net, model, optimizer


def unlike_plain(
    body: Callable[[Any, Any], Any] | int, make_net: Callable[[], nn.Module] = make, *kind: Any, **options: Any
) -> list[str]:
    """What differs after `body(model, optimizer)`, or so many steps, between a sharded optimizer and a plain one:
    weights, state, what `body` returns. Also says so if the weights are not divided between ranks."""
    left = []
    for make_one in (sharded, plain):
        net = make_net()
        model, optimizer = make_one(net, *kind, **options)
        returned = train(model, optimizer, body) if isinstance(body, int) else body(model, optimizer)
        left.append((net, optimizer, returned))
    (ours, optimizer, result), (theirs, reference, expected) = left
    wrong = not_divided(ours, optimizer) if syncengine.world_size() > 1 else []
    wrong += [] if result == expected else [f"{result}, not {expected}"]
    return wrong + different_weights(ours, theirs) + differences(reference.state_dict(), optimizer.state_dict())


def copies(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def is_unchanged(net: nn.Module, weights: list[torch.Tensor]) -> bool:
    """Since `copies` has given these."""
    return all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))


def backward(model: nn.Module, step: int) -> None:
    model(batch(step)).square().mean().backward()


def differences(a: Any, b: Any) -> list[str]:
    """Of two state dicts of optimizers: where their bits or their structure differ."""
    wrong = [] if a["param_groups"] == b["param_groups"] else ["param_groups"]
    if a["state"].keys() != b["state"].keys():
        return [*wrong, f"{list(a['state'])} and {list(b['state'])}"]
    for index, state in a["state"].items():
        other = b["state"][index]
        if list(state) != list(other):
            wrong.append(f"{index}: {list(state)} and {list(other)}")
            continue
        for key, value in state.items():
            if not _same(value, other[key]):
                wrong.append(f"{index}.{key}")
    return wrong


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
    return type(a) is type(b) and a == b


def different_weights(a: nn.Module, b: nn.Module) -> list[str]:
    """Names of parameters and buffers whose bits differ."""
    theirs = b.state_dict()
    return [name for name, tensor in a.state_dict().items() if not same_bits(tensor, theirs[name])]


def not_divided(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Says so if the weights of `net` are not in common memory, or not divided between the ranks of this host.

    What each rank computes by itself has the same bits as well.
    """
    ranges = common_memory()
    trained = [name for name, p in net.named_parameters() if p.requires_grad and not is_common(p, ranges)]
    wrong = [f"{name} is not shared" for name in trained]
    own = torch.zeros(1, dtype=torch.int64)
    for block in optimizer._sharing.blocks:
        own += sum(piece.end - piece.begin for piece in block.shard.pieces)
    largest = own.clone()
    syncengine.all_reduce(own)
    syncengine.all_reduce(largest, "max")
    total = sum(p.numel() for p in net.parameters() if p.requires_grad)
    if own.item() != total or largest.item() == total:
        wrong.append(f"of {total} elements all ranks update {own.item()} together, one {largest.item()}")
    return wrong


def common_memory() -> list[tuple[int, int]]:
    """Where this process maps memory of ShardedOptimizer: begin and end."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "memfd:syncengine-common" in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


def bytes_of(mapping: tuple[int, int], kind: str) -> int:
    """Bytes of memory that this process maps, as /proc/self/smaps has them: "Rss", or "Pss", its share of that."""
    begin, end = mapping
    text = Path("/proc/self/smaps").read_text().split(f"{begin:x}-{end:x} ")[1]
    return int(text.split(f"{kind}:")[1].split()[0]) << 10


def is_common(tensor: torch.Tensor, ranges: list[tuple[int, int]] | None = None) -> bool:
    """Whether it lies in memory that the ranks of this host share. `ranges`: of `common_memory`, for many tensors."""
    return any(begin <= tensor.data_ptr() < end for begin, end in (common_memory() if ranges is None else ranges))


def digest(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of the weights and of AdamW's state."""
    value = 0
    tensors: list[torch.Tensor] = [*net.parameters()]
    for parameter in net.parameters():
        state = optimizer.state.get(parameter, {})
        tensors += [state[key] for key in ("step", "exp_avg", "exp_avg_sq") if key in state]
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data, value)
    return value


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    """Its state dict, as it is now."""
    return copy.deepcopy(optimizer.state_dict())


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Cycles that are made within it stay until the test itself collects them."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def error_of(call: Callable[[], Any]) -> str:
    """Class and text of the error that the call raises; empty if it raises none."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
