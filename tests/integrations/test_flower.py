"""examples/with_flower.py: real Flower processes. The weights of each version are those of plain loops."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from commands import ROOT, imported, run

Arrays = list[np.ndarray]


@pytest.fixture(scope="module")
def host() -> Iterator[ModuleType]:
    """examples/flower/host.py: its model and data, in one thread, as its ranks have it."""
    with imported("flower/host.py") as module:
        yield module


def trained(home: Path, strategy: str) -> tuple[list[dict], list[Arrays]]:
    """What each version was made of, and all versions from the first weights on."""
    out = home / "out"
    command = (sys.executable, ROOT / "examples" / "with_flower.py", "--strategy", strategy, "--out", out)
    said = run(*command, home=home, timeout=900)
    log = json.loads((out / "log.json").read_text())
    losses = [float(loss) for loss in re.findall("loss (.*)", said)]
    assert len(losses) == len(log) + 1
    assert losses[-1] < losses[0]
    versions = []
    for version in range(len(log) + 1):
        with np.load(out / f"version{version}.npz") as arrays:
            versions.append([arrays[name] for name in arrays.files])
    return log, versions


def train_plainly(host: ModuleType, number: int, began: int, arrays: Arrays) -> Arrays:
    """What a host answers, by a loop over the batches of its ranks."""
    module = host.load(host.make(), arrays)
    optimizer = host.optimizer_of(module)
    for step in range(host.STEPS):
        losses = [host.loss_of(module, number, began, step, rank) for rank in range(host.RANKS)]
        gradients = [torch.autograd.grad(loss, module.parameters()) for loss in losses]
        for parameter, a, b in zip(module.parameters(), *gradients, strict=True):
            parameter.grad = (a + b) / 2
        optimizer.step()
    return [parameter.detach().numpy() for parameter in module.parameters()]


def test_fedavg_goes_on_without_the_host_whose_ranks_died(tmp_path: Path, host: ModuleType):
    log, versions = trained(tmp_path, "fedavg")
    assert set(log[0]["host"]) == {0, 1, 2}
    assert set(log[-1]["host"]) == {0, 2}
    for version, made in enumerate(log):
        assert set(made["began"]) == {version}
        answers = [train_plainly(host, number, version, versions[version]) for number in made["host"]]
        means = [sum(part * (1 / len(parts)) for part in parts) for parts in zip(*answers, strict=True)]
        assert all(map(np.array_equal, versions[version + 1], means))


def test_fedbuff_waits_neither_for_a_slow_host_nor_for_one_that_vanished(tmp_path: Path, host: ModuleType):
    """Host 2 answers its first message when version 1 is there; host 1 is killed then."""
    log, versions = trained(tmp_path, "fedbuff")
    assert 2 not in log[0]["host"]
    assert 1 not in log[-1]["host"]
    for version, made in enumerate(log):
        weights = versions[version]
        for number, began in zip(made["host"], made["began"], strict=True):
            answer = train_plainly(host, number, began, versions[began])
            factor = np.float32((1 + version - began) ** -0.5 / 2)
            weights = [w + factor * (new - old) for w, new, old in zip(weights, answer, versions[began], strict=True)]
        assert all(map(np.array_equal, versions[version + 1], weights))
