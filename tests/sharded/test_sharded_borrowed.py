"""Parameters in memory that torch has from others, or that others see: they can't follow. What is ordinary moves."""

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pool import run_on_ranks
from sharded_training import batch, different_weights, error_of, is_common, plain, sharded, train, trained
from torch import nn

import syncengine

SHAPE = (7, 24)


def values() -> np.ndarray:
    return np.linspace(-1, 1, SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)


def file_of_values(folder: Path) -> str:
    """A rank's own."""
    path = folder / str(syncengine.rank())
    path.write_bytes(values().tobytes())
    return str(path)


def from_file(folder: Path, shared: bool) -> torch.Tensor:
    return torch.from_file(file_of_values(folder), shared=shared, size=values().size).view(SHAPE)


def memory_of_file(folder: Path) -> torch.Tensor:
    with Path(file_of_values(folder)).open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.float32).view(SHAPE)


def part_of_shared_file(folder: Path) -> torch.Tensor:
    storage = torch.UntypedStorage.from_file(file_of_values(folder), True, values().nbytes)
    return torch.empty(0).set_(storage[:]).view(SHAPE)


BORROWED: dict[str, Callable[[Path], torch.Tensor]] = {
    "from_numpy": lambda folder: torch.from_numpy(values()),
    "as_tensor": lambda folder: torch.as_tensor(values()),
    "from_dlpack": lambda folder: torch.from_dlpack(values()),
    "frombuffer": lambda folder: torch.frombuffer(bytearray(values().tobytes()), dtype=torch.float32).view(SHAPE),
    "mmap": memory_of_file,
    "memmap": lambda folder: torch.from_numpy(np.memmap(file_of_values(folder), np.float32, "r+", shape=SHAPE)),
    "syncengine.empty": lambda folder: syncengine.empty(SHAPE).copy_(torch.tensor(values())),
    "memmap, copied": lambda folder: torch.from_numpy(np.memmap(file_of_values(folder), np.float32, "c", shape=SHAPE)),
}
SHARED: dict[str, Callable[[Path], torch.Tensor]] = {
    "from_file": lambda folder: from_file(folder, shared=True),
    "storage": part_of_shared_file,
    "share_memory": lambda folder: torch.tensor(values()).share_memory_(),
}


@pytest.mark.parametrize("kind", [*BORROWED, *SHARED])
@run_on_ranks()
def test_memory_of_others_is_refused_by_name(kind: str, tmp_path: Path):
    text = "comes from other code than torch (numpy, DLPack, a buffer, syncengine.empty)"
    text = text if kind in BORROWED else "is shared with other processes, or with a file"
    net = nn.Linear(24, 7)
    net.weight = nn.Parameter({**BORROWED, **SHARED}[kind](tmp_path))
    net.bias.data.zero_()
    model, optimizer = sharded(net)
    assert f"the memory of parameter weight {text}" in error_of(lambda: model(batch(0)))
    net.weight.data = net.weight.data.clone()
    train(model, optimizer, 1)
    assert all(map(is_common, net.parameters()))


def loaded(how: str, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Linear(24, 7)
    path = folder / f"{syncengine.rank()}.pt"
    if how == "module":
        torch.save(net, path)
        return torch.load(path, weights_only=False)
    if how == "from_file":
        net.weight = nn.Parameter(from_file(folder, shared=False))
        return net
    torch.save(net.state_dict(), path)
    with torch.device("meta"):
        net = nn.Linear(24, 7)
    net.load_state_dict(torch.load(path, mmap=how == "mmap"), assign=True)
    path.unlink()
    return net


@pytest.mark.parametrize("how", ["module", "state_dict", "mmap", "from_file"])
@run_on_ranks()
def test_what_was_loaded_moves(how: str, tmp_path: Path):
    ours, theirs = loaded(how, tmp_path), loaded(how, tmp_path)
    _, _, optimizer = trained(3, ours)
    assert all(map(is_common, ours.parameters()))
    train(*plain(theirs), 3)
    assert different_weights(ours, theirs) == []
    optimizer.release()  # they lie in what was common memory
    _kept = trained(1, ours)
    assert all(map(is_common, ours.parameters()))
