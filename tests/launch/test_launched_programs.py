"""The commands and the examples under each launcher: all of them in one launch of two ranks."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from pool import RankPool
from repository import SUPPORT
from test_launchers_real import command_of, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from examples import train_gpt
from examples.gpt.compare import difference
from examples.gpt.train import load
from examples.horovod_mnist import digits, make_model
from syncengine import _C

pytestmark = pytest.mark.thorough

SHORT = ("-n", "4", "-w", "1")
GPT = ("train", "--steps=18", "--layers=1", "--width=32", "--batch=2")


class Launch(NamedTuple):
    launcher: str
    folder: Path
    outcomes: dict[str, list[list[Any]]]  # of each program: every rank's exit code and output, rank 0's first


@pytest.fixture(scope="module", params=mostly_nightly(["torchrun", "openmpi", "mpich"], 1))
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    folder = tmp_path_factory.mktemp(request.param)
    programs = {
        "doctor": ["syncengine", "doctor", "--json", "--timeout", "120"],
        "bench": ["syncengine", "bench", "-b", "1K", "-e", "1M", "-f", "1024", "--compare", "--json", *SHORT],
        "gpt": ["examples.train_gpt", *GPT, f"--out={folder}"],
        "queries": ["horovod_queries"],
        "horovod": ["examples.horovod_mnist", f"--save={folder / 'weights.pt'}"],
    }
    script = [str(SUPPORT / "launched_programs.py"), str(folder), json.dumps(list(programs.values()))]
    ended = start([*command_of(request.param), *script])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ranks = [json.loads(file.read_text()) for file in folder.glob("*.json") if file.name != "metrics.json"]
    ranks.sort(key=lambda outcomes: outcomes[0][1] == "")  # rank 0 reports
    return Launch(request.param, folder, dict(zip(programs, map(list, zip(*ranks, strict=True)), strict=True)))


def only_rank_0(outcomes: list[list[Any]]) -> str:
    """What it has written; the others nothing, and all end well."""
    (code, said), other = outcomes
    assert (code, other) == (0, [0, ""]), outcomes
    return said


@pytest.mark.skipif(_C.machine()["available_cores"] < 2, reason="two ranks on one CPU are a finding")
def test_doctor_finds_nothing(launch: Launch):
    report = json.loads(only_rank_0(launch.outcomes["doctor"]))
    assert (report["status"], report["exit_code"]) == ("fine", 0)
    assert report["launcher"] == ("torchrun" if launch.launcher == "torchrun" else "mpi")
    assert [facts["rank"] for facts in report["ranks"]] == [0, 1]
    for outcome in report["self_test"].values():
        assert outcome["wrong"] == {}
        assert outcome["collectives"] > 0
    assert report["self_test"]["0"]["seconds"] > 1.0  # so long it lasts, on this rank's clock


def test_bench_measures_and_compares(launch: Launch):
    report = json.loads(only_rank_0(launch.outcomes["bench"]))
    assert [row["size"] for row in report["rows"]] == [1024, 2**20]
    for row in report["rows"]:
        assert row["wrong"] == row["gloo"]["wrong"] == 0
        assert 0 < row["ratio"]["p25"] <= row["ratio"]["median"] <= row["ratio"]["p75"]
        assert 0 < row["spread"]["p25"] <= row["time"] <= row["spread"]["p75"]


def train_gpt_here(out: str) -> None:
    assert train_gpt.main([*GPT, f"--out={out}"]) == 0


def test_train_gpt_has_the_same_bits(launch: Launch, pool: RankPool, tmp_path: Path):
    """By a rendezvous over a file, and by every launcher's."""
    assert [code for code, _ in launch.outcomes["gpt"]] == [0, 0]
    pool.run(train_gpt_here, str(tmp_path), settings=None)
    ours, expected = load(launch.folder / "checkpoint.pt"), load(tmp_path / "checkpoint.pt")
    assert difference(ours, expected) == (0, 0.0)


def test_horovods_queries_know_the_launcher(launch: Launch):
    torchrun = launch.launcher == "torchrun"
    for rank, (code, said) in enumerate(launch.outcomes["queries"]):
        answer = json.loads(said)
        assert (code, answer["rank"], answer["size"], answer["local"]) == (0, rank, 2, rank)
        assert answer["enabled"] == ([False, None] if torchrun else [True, True])
        assert torchrun or answer["built"]


def train_by_ddp() -> dict[str, torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42 + rank)
    dataset = digits(1024)
    sampler = DistributedSampler(dataset)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * size, momentum=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.module.state_dict().items()}


def test_the_example_for_horovod_has_the_weights_of_ddp(launch: Launch, pool: RankPool):
    said = only_rank_0(launch.outcomes["horovod"]).splitlines()
    assert [line.split(":")[0] for line in said] == ["epoch 0", "epoch 1"]
    assert said[-1].endswith("on 2 ranks")
    assert float(said[-1].split("accuracy ")[1].split()[0]) > 0.8
    trained = torch.load(launch.folder / "weights.pt", weights_only=True)
    for expected in pool.run(train_by_ddp, settings=None, gloo=True):
        assert trained.keys() == expected.keys()
        assert all(torch.equal(trained[name], expected[name]) for name in trained)
