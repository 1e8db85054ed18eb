"""The entry point that torch calls at the end of its import: the backend without an import. It can't break torch."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command import ranks_by_hand
from installation import copy_of_packages
from pool import RankPool
from programs import run_programs
from repository import TESTS
from test_launchers_real import by_rank
from torch.distributed.distributed_c10d import Backend, BackendConfig
from torch.nn.parallel import DistributedDataParallel

import syncengine_autoload
from syncengine import _C, torch_backend

SCRIPTS = TESTS / "scripts"


def run(command: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SYNCENGINE_")}
    clean |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ}
    told = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=600)
    assert told.returncode == 0, told.stdout + told.stderr
    return told


def expected(model: str) -> list[dict[str, Any]]:
    same = {"imported": False, "backend": "syncengine", "total": [0.0, 3.0, 6.0], "model": model}
    return [{"rank": rank, **same} for rank in range(2)]


def test_the_name_is_enough(programs: RankPool, unused_port: int):
    told = run_programs(programs, [str(SCRIPTS / "autoload.py")], ranks_by_hand([{}, {}], unused_port))
    assert by_rank("".join(rank.stdout for rank in told)) == expected("DistributedDataParallel")


@pytest.mark.nightly
def test_spawned_children_have_the_name_and_the_patch(tmp_path: Path):
    command = [sys.executable, str(SCRIPTS / "autoload.py"), str(tmp_path / "store")]
    told = run(command, tmp_path, SYNCENGINE_PATCH="1")
    assert by_rank(told.stdout) == expected("Parallel")
    assert told.stderr.count("syncengine: ") == 1
    assert "DistributedDataParallel is syncengine.Parallel, since SYNCENGINE_PATCH=1 (2 ranks, " in told.stderr


WHAT_IT_IMPORTS = """
import os, sys, threading
import torch
before, threads = set(sys.modules), threading.active_count()
from importlib.metadata import entry_points
for patch in ("0", "1"):
    os.environ["SYNCENGINE_PATCH"] = patch
    for point in entry_points(group="torch.backends", name="syncengine"):
        point.load()()
    patched = "__new__" in vars(torch.nn.parallel.DistributedDataParallel)
    print(sorted(set(sys.modules) - before), threading.active_count() - threads, patched)
"""


@pytest.mark.thorough
def test_it_imports_nothing_and_starts_nothing(tmp_path: Path):
    """Also with the patch."""
    said = run([sys.executable, "-c", WHAT_IT_IMPORTS], tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout
    assert said.splitlines() == ["['syncengine_autoload'] 0 False", "['syncengine_autoload'] 0 True"]


def test_this_installation_has_the_entry_point():
    (point,) = importlib.metadata.entry_points(group="torch.backends", name="syncengine")
    assert point.load() is syncengine_autoload.load


@pytest.mark.thorough
def test_an_extension_that_does_not_load_breaks_only_what_needs_it(tmp_path: Path):
    """An installation of its own, found first. With the patch asked for: DDP serves, and a line says why."""
    extension = copy_of_packages(tmp_path, lambda _: b"of another time")
    about = tmp_path / "syncengine_torch-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: syncengine-torch\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nsyncengine = syncengine_autoload:load\n")
    shutil.copy(SCRIPTS / "broken_installation.py", tmp_path)
    told = run([sys.executable, "broken_installation.py"], tmp_path, SYNCENGINE_PATCH="1")
    model, group = told.stdout.splitlines()
    assert model == "model: DistributedDataParallel"
    assert group.startswith(f"group: syncengine's extension {extension} can't be loaded: ")
    assert f"this is torch {torch.__version__}: install syncengine-torch again, for this torch" in group
    (line,) = [line for line in told.stderr.splitlines() if line.startswith("syncengine: ")]
    assert line.startswith("syncengine: SYNCENGINE_PATCH=1 has no effect on the DistributedDataParallel of a Linear")
    assert f"syncengine can't be imported: ImportError: syncengine's extension {extension} can't be loaded" in line


@pytest.fixture
def as_torch_knows_it(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Puts back what a test registers."""
    monkeypatch.setattr(Backend, "backend_list", [name for name in Backend.backend_list if name != "syncengine"])
    monkeypatch.setattr(Backend, "backend_capability", dict(Backend.backend_capability))
    monkeypatch.setattr(Backend, "_plugins", dict(Backend._plugins))
    return monkeypatch


@pytest.mark.parametrize("has_cuda", [False, True])
def test_devices_are_known_before_and_after_the_import(as_torch_knows_it: pytest.MonkeyPatch, has_cuda: bool):
    as_torch_knows_it.setattr(_C, "has_cuda", has_cuda)
    as_torch_knows_it.setattr(torch_backend, "has_cuda", has_cuda)
    all_devices = ["cpu", "cuda"] if has_cuda else ["cpu"]
    syncengine_autoload.load()
    devices = Backend.backend_capability["syncengine"]
    assert list(devices) == all_devices
    assert len(devices) == len(all_devices)
    assert ("cuda" in devices) == has_cuda
    assert list(BackendConfig(Backend("syncengine")).get_device_backend_map()) == all_devices
    torch_backend.register()  # as `import syncengine` does
    assert Backend.backend_capability["syncengine"] == all_devices
    assert Backend._plugins["SYNCENGINE"].creator_fn is torch_backend.create
    syncengine_autoload.load()
    assert Backend._plugins["SYNCENGINE"].creator_fn is torch_backend.create


def test_a_torch_that_registers_otherwise_is_a_line_and_no_error(
    as_torch_knows_it: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*args: object, **kwargs: object) -> None:
        raise TypeError("no such argument: devices")

    as_torch_knows_it.setattr(Backend, "register_backend", refuse)
    syncengine_autoload.load()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("syncengine", "WARNING")
    assert "without `import syncengine`: TypeError('no such argument: devices')" in record.getMessage()


def test_a_torch_without_distributed_is_left_alone(
    as_torch_knows_it: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    as_torch_knows_it.setattr(dist, "is_available", lambda: False)
    syncengine_autoload.load()
    assert "syncengine" not in Backend.backend_list
    assert capfd.readouterr().err == ""


def test_another_value_of_the_variable_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("SYNCENGINE_PATCH", "yes")
    syncengine_autoload.load()
    assert caplog.messages == ["SYNCENGINE_PATCH='yes' is not allowed, and has no effect: give 1 or 0"]
    assert "__new__" not in vars(DistributedDataParallel)
