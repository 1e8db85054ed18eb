"""examples/with_ray.py: two workers, by wrapper, by the name of the backend, and unchanged; with the weights of DDP."""

import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT, load, run
from lightning_ranks import same

EXAMPLE = ROOT / "examples" / "with_ray.py"


@pytest.fixture(scope="module")
def without_its_import(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as a script that knows nothing of syncengine: what `--ddp` runs does not use it."""
    text, line = EXAMPLE.read_text(), "\nimport syncengine\n"
    assert text.count(line) == 1
    script = tmp_path_factory.mktemp("script") / EXAMPLE.name
    script.write_text(text.replace(line, ""))
    return script


@pytest.fixture(scope="module")
def over_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return trained(tmp_path_factory.mktemp("ddp"), EXAMPLE, "DistributedDataParallel over gloo", "--ddp")


def trained(home: Path, script: Path, made: str, *arguments: object) -> dict[str, torch.Tensor]:
    """The last checkpoint's weights; the workers say what they have `made`."""
    patience = {"RAY_raylet_start_wait_time_s": "300", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patience.items():
            patch.setenv(name, value)
        said = run(sys.executable, script, *arguments, "--out", home / "out", home=home, timeout=500)
    (line,) = [line for line in said.splitlines() if ": loss " in line]
    assert line.startswith(f"{made}: loss ")
    folder = Path(line.rpartition(", ")[2])
    assert folder.is_relative_to(home)
    assert len(list(folder.parent.glob("checkpoint_*/weights.pt"))) == 3
    return load(folder / "weights.pt")


@pytest.mark.parametrize("backend", ["gloo", "syncengine"])
def test_two_workers(tmp_path: Path, over_ddp: dict[str, torch.Tensor], backend: str):
    same(trained(tmp_path, EXAMPLE, f"Parallel over {backend}", "--backend", backend), over_ddp)


def test_the_name_is_enough(tmp_path: Path, over_ddp: dict[str, torch.Tensor], without_its_import: Path):
    made = "DistributedDataParallel over syncengine"
    same(trained(tmp_path, without_its_import, made, "--ddp", "--backend", "syncengine"), over_ddp)


def test_no_line_changed(
    tmp_path: Path, over_ddp: dict[str, torch.Tensor], without_its_import: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its processes have the variable of the one that starts them."""
    monkeypatch.setenv("SYNCENGINE_PATCH", "1")
    same(trained(tmp_path, without_its_import, "DistributedDataParallel over gloo", "--ddp"), over_ddp)
