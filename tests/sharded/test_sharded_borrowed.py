"""Parameters in memory that torch has from others, or that others see: they can't follow. What is ordinary moves."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import RankPool
from sharded_training import batch, different_weights, error_of, is_common, plain, sharded, train
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


def refused(kind: str, folder: Path) -> list[Any]:
    net = nn.Linear(24, 7)
    net.weight = nn.Parameter({**BORROWED, **SHARED}[kind](folder))
    net.bias.data.zero_()
    model, optimizer = sharded(net)
    text = error_of(lambda: model(batch(0)))
    net.weight.data = net.weight.data.clone()
    return [text, error_of(lambda: train(model, optimizer, 1)), all(map(is_common, net.parameters()))]


@pytest.mark.parametrize("kind", [*BORROWED, *SHARED])
def test_memory_of_others_is_refused_by_name(pool: RankPool, kind: str, tmp_path: Path):
    text = "comes from other code than torch (numpy, DLPack, a buffer, syncengine.empty)"
    text = text if kind in BORROWED else "is shared with other processes, or with a file"
    for first, then, moved in pool.run(refused, kind, tmp_path):
        assert f"the memory of parameter weight {text}" in first
        assert (then, moved) == ("", True)


def loaded(how: str, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Linear(24, 7)
    path = folder / f"{syncengine.rank()}.pt"
    if how == "module":
        torch.save(net, path)
        return torch.load(path, weights_only=False)
    if how == "from_file":
        file = file_of_values(folder)
        net.weight = nn.Parameter(torch.from_file(file, shared=False, size=values().size).view(SHAPE))
        return net
    torch.save(net.state_dict(), path)
    with torch.device("meta"):
        net = nn.Linear(24, 7)
    net.load_state_dict(torch.load(path, mmap=how == "mmap"), assign=True)
    path.unlink()
    return net


def ordinary(how: str, folder: Path) -> list[str]:
    ours, theirs = loaded(how, folder), loaded(how, folder)
    model, optimizer = sharded(ours)
    train(model, optimizer, 3)
    wrong = [name for name, parameter in ours.named_parameters() if not is_common(parameter)]
    train(*plain(theirs), 3)
    wrong += different_weights(ours, theirs)
    optimizer.release()  # they lie in what was common memory
    again, other = sharded(ours)
    train(again, other, 1)
    return wrong + [name for name, parameter in ours.named_parameters() if not is_common(parameter)]


@pytest.mark.parametrize("how", ["module", "state_dict", "mmap", "from_file"])
def test_what_was_loaded_moves(pool: RankPool, how: str, tmp_path: Path):
    assert pool.run(ordinary, how, tmp_path) == [[]] * 2
