"""examples/with_*.py, as their first lines start them: the weights are those over DDP and Gloo, bit for bit."""

import sys
from pathlib import Path

import pytest
from commands import ROOT, load, over_gloo, run, torchrun
from lightning_ranks import same
from ports import unused_ports


def test_lightning(tmp_path: Path):
    """Its own launcher, then torchrun."""
    example = ROOT / "examples" / "with_lightning.py"
    assert "loss 0." in run(sys.executable, example, "--out", tmp_path / "ours.pt", home=tmp_path)
    over_gloo(torchrun, example.name, "--strategy=ddp", "--out", tmp_path / "ddp.pt", home=tmp_path)
    same(load(tmp_path / "ours.pt"), load(tmp_path / "ddp.pt"))


def test_fabric(tmp_path: Path):
    """torchrun, then its own launcher."""
    example = ROOT / "examples" / "with_fabric.py"
    assert "loss 0." in torchrun(example.name, "--out", tmp_path / "ours.pt", home=tmp_path)
    over_gloo(run, sys.executable, example, "--strategy=ddp", "--out", tmp_path / "ddp.pt", home=tmp_path)
    same(load(tmp_path / "ours.pt"), load(tmp_path / "ddp.pt"))


@pytest.mark.parametrize("name", ["with_accelerate", "with_transformers"])
def test_accelerate_and_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """By one line; over DDP and Gloo; and with no line changed and Parallel in DDP's place, of which one line tells."""
    ways = {"ours": ([], "0", "Parallel"), "ddp": (["--ddp"], "0", "DistributedDataParallel")}
    ways["patched"] = (["--ddp"], "1", "DistributedDataParallel")
    weights = []
    for way, (arguments, patch, made) in ways.items():
        monkeypatch.setenv("SYNCENGINE_PATCH", patch)
        said = over_gloo(torchrun, f"{name}.py", *arguments, "--out", tmp_path / way, home=tmp_path)
        assert said.splitlines()[-1].startswith(f"{made}: loss ")
        path = tmp_path / way
        weights.append(load(path / "weights.pt" if path.is_dir() else path))
    ours, ddp, patched = weights
    same(ours, ddp)
    same(patched, ddp)


def test_peft(tmp_path: Path):
    """LoRA's matrices and the copy of the head are trained; nothing else is, nor synchronized."""
    assert "Parallel: loss" in torchrun("with_peft.py", "--out", tmp_path / "ours.pt", home=tmp_path)
    said = over_gloo(torchrun, "with_peft.py", "--ddp", "--out", tmp_path / "ddp.pt", home=tmp_path)
    assert "DistributedDataParallel: loss" in said
    ours = load(tmp_path / "ours.pt")
    assert len(ours) == 10  # 2 of query and value in each layer, and the classifier's
    same(ours, load(tmp_path / "ddp.pt"))


def test_accelerate_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whose processes have the variable, too."""
    settings = ("--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no")
    command = ("accelerate", "launch", "--multi_gpu", "--num_processes", 2, *settings)
    example = ROOT / "examples" / "with_accelerate.py"
    for patched in ("0", "1"):
        monkeypatch.setenv("SYNCENGINE_PATCH", patched)
        port = ("--main_process_port", unused_ports()[0])
        said = over_gloo(run, *command, *port, example, "--ddp", "--out", tmp_path / patched, home=tmp_path)
        assert said.splitlines()[-1].startswith("DistributedDataParallel: loss")
    same(load(tmp_path / "1"), load(tmp_path / "0"))


def test_syncengine_needs_none_of_them(tmp_path: Path):
    names = ["lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "peft"]
    names += ["ray", "torchft", "flwr"]
    code = f"import sys, syncengine; print([name for name in {names} if name in sys.modules])"
    assert run(sys.executable, "-c", code, home=tmp_path) == "[]\n"
