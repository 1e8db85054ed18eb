"""Programs over libraries of others, at the versions of requirements-integrations.txt, end with the weights of DDP."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import load, over_gloo, torchrun
from lightning_ranks import same
from repository import TESTS

SCRIPT = TESTS / "scripts" / "others.py"
MODULES = {"metric_learning": "pytorch_metric_learning", "geometric": "torch_geometric", "asks": "schedulefree"}
NAMES = ["fairscale", "metric_learning", "keras", "geometric", "asks"]


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str) -> dict[str, torch.Tensor]:
    monkeypatch.setenv("BACKEND", "syncengine" if way == "backend" else "gloo")
    monkeypatch.setenv("SYNCENGINE_PATCH", "1" if way == "patch" else "0")
    out = folder / way
    over_gloo(torchrun, SCRIPT, name, "--out", out, home=folder)
    return load(Path(f"{out}.0")) | load(Path(f"{out}.1"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_the_weights_of_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    if not find_spec(module := MODULES.get(name, name)):  # an import of Keras would choose TensorFlow
        pytest.skip(f"no {module}: run `make .venv-integrations/ready`")
    theirs = trained(tmp_path, monkeypatch, name, "ddp")
    for way in ("backend",) if name == "fairscale" else ("backend", "patch"):  # that makes no DistributedDataParallel
        same(trained(tmp_path, monkeypatch, name, way), theirs)
