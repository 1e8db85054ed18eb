"""examples/with_ray.py: two workers, by wrapper, by the name of the backend, and unchanged; with the weights of DDP."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT, load, run
from lightning_ranks import same

EXAMPLE = ROOT / "examples" / "with_ray.py"


@pytest.fixture(scope="module")
def over_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return trained(tmp_path_factory.mktemp("ddp"), "--ddp")


def trained(home: Path, *arguments: object) -> dict[str, torch.Tensor]:
    """The last checkpoint's weights."""
    patience = {"RAY_raylet_start_wait_time_s": "300", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patience.items():
            patch.setenv(name, value)
        said = run(sys.executable, EXAMPLE, *arguments, "--out", home / "out", home=home, timeout=500)
    (line,) = [line for line in said.splitlines() if line.startswith("loss ")]
    folder = Path(line.rpartition(", ")[2])
    assert folder.is_relative_to(home)
    assert len(list(folder.parent.glob("checkpoint_*/weights.pt"))) == 3
    return load(folder / "weights.pt")


@pytest.mark.parametrize("backend", ["gloo", "syncengine"])
def test_two_workers(tmp_path: Path, over_ddp: dict[str, torch.Tensor], backend: str):
    same(trained(tmp_path, "--backend", backend), over_ddp)


def test_no_line_changed(tmp_path: Path, over_ddp: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch):
    """Its processes have the variable of the one that starts them."""
    monkeypatch.setenv("SYNCENGINE_PATCH", "1")
    same(trained(tmp_path, "--ddp"), over_ddp)
