"""examples/with_*.py, as their first lines start them: the weights are those over DDP and Gloo, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

from commands import ROOT, load, run, torchrun
from lightning_ranks import same


def test_lightning(tmp_path: Path):
    """Its own launcher, then torchrun."""
    example = ROOT / "examples" / "with_lightning.py"
    assert "loss 0." in run(sys.executable, example, "--out", tmp_path / "ours.pt", home=tmp_path)
    torchrun(example.name, "--strategy=ddp", "--out", tmp_path / "ddp.pt", home=tmp_path)
    same(load(tmp_path / "ours.pt"), load(tmp_path / "ddp.pt"))


def test_fabric(tmp_path: Path):
    """torchrun, then its own launcher."""
    example = ROOT / "examples" / "with_fabric.py"
    assert "loss 0." in torchrun(example.name, "--out", tmp_path / "ours.pt", home=tmp_path)
    run(sys.executable, example, "--strategy=ddp", "--out", tmp_path / "ddp.pt", home=tmp_path)
    same(load(tmp_path / "ours.pt"), load(tmp_path / "ddp.pt"))


def test_accelerate(tmp_path: Path):
    assert "Parallel: loss" in torchrun("with_accelerate.py", "--out", tmp_path / "ours.pt", home=tmp_path)
    said = torchrun("with_accelerate.py", "--ddp", "--out", tmp_path / "ddp.pt", home=tmp_path)
    assert "DistributedDataParallel: loss" in said
    same(load(tmp_path / "ours.pt"), load(tmp_path / "ddp.pt"))


def test_transformers(tmp_path: Path):
    ours, ddp = tmp_path / "ours", tmp_path / "ddp"
    assert "Parallel: loss" in torchrun("with_transformers.py", "--out", ours, home=tmp_path)
    assert "DistributedDataParallel: loss" in torchrun("with_transformers.py", "--ddp", "--out", ddp, home=tmp_path)
    same(load(ours / "weights.pt"), load(ddp / "weights.pt"))


def test_syncengine_needs_none_of_them(tmp_path: Path):
    names = ["lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "ray"]
    code = f"import sys, syncengine; print([name for name in {names} if name in sys.modules])"
    assert run(sys.executable, "-c", code, home=tmp_path) == "[]\n"
