"""The main job and the benchmarks, each in a tiny size: what they compute and write, never how fast."""

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from ports import unused_ports
from repository import ROOT

import syncengine
from benchmarks import all_reduce, cuda_train_step, train_step
from benchmarks.support import output, ranks, stats
from examples import train_gpt
from examples.gpt import compare
from examples.gpt.compare import difference
from examples.gpt.data import ALPHABET, Batches, decode, encode, load_text
from examples.gpt.engine import ENGINES, adamw
from examples.gpt.train import load

TINY = ["--steps=24", "--layers=1", "--width=32", "--batch=2"]


def said_by(*arguments: object) -> str:
    """The standard output of `python -m examples.train_gpt arguments`, which must succeed, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert train_gpt.main([str(argument) for argument in arguments]) == 0
    return said.getvalue()


def call_main(module: str, arguments: list[str]) -> None:
    """`python -m module arguments` on a rank of the pool; a process group that is there stays."""
    initialized = dist.is_initialized()
    sys.argv[1:] = arguments
    assert importlib.import_module(module).main() == 0
    assert dist.is_initialized() == initialized


def call_main_alone(module: str, arguments: list[str]) -> None:
    """The same where no launcher has been."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    call_main(module, arguments)


def same_bits(checkpoint: Path, other: Path) -> bool:
    return difference(load(checkpoint), load(other)) == (0, 0.0)


# ---- the main job ----


@pytest.fixture(scope="module")
def compared(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder, output) of one comparison. Torchrun really starts the ranks of its first run, the pool the others'."""

    def launch(count: int, engine: str, out: Path, arguments: list[str], trace: Path | None = None) -> None:
        if engine == "syncengine":
            by_torchrun(count, engine, out, arguments, trace)
        else:
            train = ["train", f"--engine={engine}", f"--out={out}", *arguments]
            environ = {"MASTER_PORT": str(unused_ports()[0])}
            pool.run(call_main, "examples.train_gpt", train, world=count, settings=None, environ=environ)

    by_torchrun = compare.launch
    out = tmp_path_factory.mktemp("compare")
    with mock.patch.object(compare, "launch", launch):
        return out, said_by("compare", "--out", out, *TINY)


@pytest.mark.thorough
def test_compare_trains_the_same_bits(compared):
    out, text = compared
    for engine in ("syncengine", "sharded"):
        assert same_bits(out / engine / "checkpoint.pt", out / "ddp" / "checkpoint.pt")
    assert "largest difference between the trained models: 0 (0 elements" in text
    for row in ("validation loss", "median step time", "sync overhead per step", "memory per rank"):
        assert row in text
    for column in ("syncengine", "DDP + Gloo", "ShardedOptimizer"):
        assert column in text


@pytest.mark.thorough
def test_compare_ends_with_the_report_of_its_first_run(compared):
    out, text = compared
    page = out / "trace" / "report.html"
    assert text.rstrip().endswith(f"report      {page}")
    assert "Parallel(GPT)" in page.read_text()
    assert "ranks <b>2</b>" in page.read_text()


@pytest.mark.thorough
def test_compare_leaves_metrics_and_a_plot(compared):
    out, _ = compared
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    for engine in ENGINES:
        metrics = json.loads((out / engine / "metrics.json").read_text())
        assert metrics["memory_bytes"] > 0 or engine != "syncengine"  # the pool's ranks share what they have
        assert (metrics["engine"], metrics["ranks"], len(metrics["losses"])) == (engine, 2, 24)
        assert len(metrics["sync_seconds"]) == len(metrics["no_sync_seconds"]) == 3
        assert len(metrics["step_seconds"]) == 24 - 10 - 3


def test_the_third_run_is_sharded():
    assert type(adamw(torch.nn.Linear(3, 2), "sharded", lr=1e-3)) is syncengine.ShardedOptimizer
    assert type(adamw(torch.nn.Linear(3, 2), "syncengine", lr=1e-3)) is torch.optim.AdamW


@pytest.mark.thorough
def test_the_model_learns(compared):
    losses = json.loads((compared[0] / "syncengine" / "metrics.json").read_text())["losses"]
    assert sum(losses[-4:]) / 4 < losses[0] - 0.3


@pytest.mark.thorough
def test_a_plain_process_loads_the_checkpoint(compared):
    out, _ = compared
    checkpoint = out / "syncengine" / "checkpoint.pt"
    text = said_by("sample", "--checkpoint", checkpoint, "--length", 20)
    loss = json.loads((out / "syncengine" / "metrics.json").read_text())["validation_loss"]
    assert text.startswith(f"validation loss {loss:.6f}\n\ndef ")
    assert len(text.split("\n\n", 1)[1]) == len("def ") + 20 + len("\n")


@pytest.mark.thorough
def test_inside_an_initialized_process_group(pool, compared, tmp_path):
    pool.run(call_main, "examples.train_gpt", ["train", f"--out={tmp_path}", *TINY], gloo=True, settings=None)
    assert same_bits(tmp_path / "checkpoint.pt", compared[0] / "syncengine" / "checkpoint.pt")


def test_a_single_process_trains_too(pool, tmp_path):
    pool.run(call_main_alone, "examples.train_gpt", ["train", f"--out={tmp_path}", *TINY], world=1, settings=None)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["ranks"] == 1
    assert metrics["losses"][-1] < metrics["losses"][0]
    assert load(tmp_path / "checkpoint.pt").config.width == 32


def test_compare_exits_with_1_if_the_models_differ(monkeypatch, tmp_path):
    monkeypatch.setattr(train_gpt, "compare", lambda *_: False)
    assert train_gpt.main(["compare", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize(("value", "changed"), [(1.0, 1.0 + 2**-23), (0.0, -0.0), (float("nan"), 1.0)])
def test_difference_counts_single_bits(value, changed):
    one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    other.load_state_dict(one.state_dict())
    assert difference(one, other) == (0, 0.0)
    one.weight.data[0, 0], other.weight.data[0, 0] = value, changed
    assert difference(one, other)[0] == 1


@pytest.mark.thorough
def test_the_text_is_the_same_each_time():
    training, validation = load_text()
    assert all(torch.equal(one, other) for one, other in zip(load_text(), (training, validation), strict=True))
    assert len(training) > 3 * len(validation) > 0
    assert 0 <= int(training.min()) < int(training.max()) < len(ALPHABET)
    assert decode(encode("def f(x):\n    return 'é~'")) == "def f(x):\n    return '~'"


def test_batches_depend_on_the_seed_only():
    text = torch.arange(1000)
    inputs, targets = Batches(text, batch=3, context=8, seed=5).next()
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs, Batches(text, batch=3, context=8, seed=5).next()[0])
    assert not torch.equal(inputs, Batches(text, batch=3, context=8, seed=6).next()[0])


# ---- the benchmarks ----


def benchmark(name: str, out: Path, *arguments: object) -> dict:
    """The result file of a tiny run."""
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.main(["--out", str(out), *map(str, arguments)]) == 0
    document = json.loads(out.read_text())
    assert document["benchmark"] == name
    assert f"benchmarks.{name}" in document["command"]
    assert "--worker" not in document["command"]
    assert document["machine"]["kernel"]
    assert document["versions"]["torch"] == importlib.metadata.version("torch")
    return document


def call_benchmark(module: str, arguments: list[str]) -> None:
    output.round_trip = lambda: None  # a compiler's run, which other benchmarks have
    call_main(module, arguments)


@pytest.fixture
def on_the_pool(pool: RankPool, monkeypatch: pytest.MonkeyPatch, unused_port: int) -> Iterator[None]:
    """Ranks that torchrun would start are new processes of the pool, which have torch imported.

    The test of the benchmark all_reduce has real ones.
    """

    def run_ranks(module: str, count: int, launcher: str, arguments: list[str]) -> int:
        assert launcher == "torchrun"
        pool.refresh()
        environ = {"MASTER_PORT": str(unused_port)}
        pool.run(call_benchmark, module, arguments, world=count, settings=None, environ=environ)
        return 0

    monkeypatch.setattr(output, "round_trip", lambda: None)
    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    yield
    pool.refresh()


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["torchrun", "openmpi", "mpich"])
def test_all_reduce_benchmark(tmp_path, launcher):
    if launcher != "torchrun" and not (ROOT / f".venv-{launcher}" / "bin" / "mpirun").exists():
        pytest.skip(f"no .venv-{launcher}: `make test` installs it")
    options = ["--launcher", launcher, "--sizes", "8", "4Ki", "1Mi", "--rounds", 3, 5, "--seconds", 0.1]
    document = benchmark("all_reduce", tmp_path / "result.json", *options)
    peers = {"floor", "empty", "tensor", "gloo"} | ({"mpi"} if launcher != "torchrun" else set())
    assert [result["bytes"] for result in document["results"]] == [8, 4096, 2**20]
    for result in document["results"]:
        assert result["peers"].keys() == peers
        for times in result["peers"].values():
            calls = 10 if result["bytes"] <= 64 * 2**10 else 1
            assert 3 <= times["count"] / calls <= 5
            assert 0 < times["p0"] <= times["p10"] <= times["p50"] <= times["p90"] <= times["p100"]
    assert ("mpi" in document["versions"]) == (launcher != "torchrun")


TWO_A_HOST = ("--ranks-per-host", 2, "--dtype", "bfloat16", "--peers", "tensor", "pump", "gloo", "fast")


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), TWO_A_HOST], ids=["one_a_host", "two_a_host"])
def test_hosts_benchmark(tmp_path, more):
    options = ["--rate", "none", "--sizes", "4Ki", "1Mi", "--rounds", 2, 3, "--seconds", 0.1, *more]
    document = benchmark("hosts", tmp_path / "result.json", *options)
    for result, bytes_ in zip(document["results"], [4096, 2**20], strict=True):
        assert result["bytes"] == bytes_
        assert result["peers"].keys() == result["sent_over_paper"].keys() == {"pump", "tensor", "gloo", *more[-1:]}
        assert all(times["p50"] > 0 for times in result["peers"].values())
        # Loopback counts what both hosts send: with two ranks each, three halves of what must be sent.
        assert result["sent_over_paper"]["tensor"] > (2.9 if more else 1.9)


@pytest.mark.nightly
@pytest.mark.usefixtures("on_the_pool")
def test_train_step_benchmark(tmp_path):
    document = benchmark("train_step", tmp_path / "result.json", "--models", "small", "--pairs", 3)
    (result,) = document["results"]
    assert (result["model"], result["parameters"]) == ("small", 500 * (16 * 16 + 16))
    engines = result["engines"]
    assert engines.keys() == {"plain", "waiting", "syncengine", "ddp", "backend"}
    assert engines["syncengine"]["loss"] == engines["ddp"]["loss"] == engines["backend"]["loss"]
    for engine in ("syncengine", "ddp"):
        assert engines[engine]["sync_ms"]["count"] == engines[engine]["no_sync_ms"]["count"] == 3
        for quantity in ("overhead_ms", "no_sync_over_plain"):
            interval = engines[engine][quantity]
            assert interval["lower"] <= interval["median"] <= interval["upper"]


@pytest.mark.nightly
@pytest.mark.usefixtures("on_the_pool")
def test_memory_benchmark(tmp_path):
    options = ["--models", "small", "--engines", "syncengine", "--steps", 2, "--repeats", 1]
    (result,) = benchmark("memory", tmp_path / "result.json", *options)["results"]
    growth = result["growth_bytes"]
    assert list(growth) == ["plain", "syncengine"]
    # SGD with momentum: gradients and as much again.
    assert all(len(found) == 1 and found[0] > 2 * result["gradient_bytes"] for found in growth.values())


def test_all_reduce_benchmark_notices_a_wrong_sum():
    mine, theirs = all_reduce.pattern(1000, 0), all_reduce.pattern(1000, 1)
    tensor = torch.empty(1000)

    def right() -> None:
        tensor.add_(theirs * float(tensor[0] / mine[0]))  # the peer scales its input as we do

    def swapped() -> None:
        right()
        tensor.copy_(torch.cat([tensor[512:], tensor[:512]]))

    start_line = SimpleNamespace(wait=lambda: None)
    error = "peer: wrong sum of 4000 bytes in round 1"
    for call in (right, lambda: None, swapped):
        peer = all_reduce.Peer("peer", tensor, call, mine + theirs)
        with contextlib.nullcontext() if call is right else pytest.raises(AssertionError, match=error):
            all_reduce.one_round(1, [peer], mine, start_line)


def test_train_step_benchmark_notices_different_models(monkeypatch):
    monkeypatch.setattr(ranks, "everywhere", bool)
    trainees = {}
    for engine in ("syncengine", "ddp"):
        torch.manual_seed(0)
        model = torch.nn.Sequential()
        model.module = torch.nn.Linear(3, 2)  # where a wrapper keeps the model
        trainees[engine] = train_step.Trainee(engine, model, torch.optim.SGD(model.parameters()), loss=0.5)
    train_step.verify_equal("tiny", trainees)
    trainees["ddp"].model.module.bias.data[1] += 1e-7
    with pytest.raises(AssertionError, match=r"1 of 2 tensors differ: \['bias'\]"):
        train_step.verify_equal("tiny", trainees)


@pytest.mark.parametrize(("text", "bytes_"), [("8", 8), ("4Ki", 4096), ("25Mi", 25 * 2**20)])
def test_sizes(text, bytes_):
    assert all_reduce.parse_size(text) == bytes_
    assert all_reduce.format_size(bytes_) == text


@pytest.mark.parametrize("text", ["0", "6", "4Gi", "-8", "1.5Mi", ""])
def test_sizes_that_are_refused(text):
    with pytest.raises(SystemExit, match="--sizes"):
        all_reduce.parse_size(text)


def test_median_interval():
    samples = torch.linspace(0, 10, 101).numpy()
    median, lower, upper = stats.median_interval(samples)
    assert median == pytest.approx(5)
    assert 3 < lower < median < upper < 7
    assert stats.median_interval([2.0] * 10) == (2.0, 2.0, 2.0)


def kernel(name: str, begin: float, end: float) -> dict:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}


@pytest.mark.parametrize(
    ("others", "hidden"),
    [
        ([], 0.0),
        ([(0, 100)], 1.0),
        ([(0, 15), (45, 60)], 0.75),  # before and after, with a gap between
        ([(12, 18), (12, 20), (14, 16), (100, 110)], 0.4),  # beside each other: counted once
    ],
)
def test_overlap_of_the_engines_kernels(others: list[tuple[float, float]], hidden: float):
    ours = [kernel("void syncengine::cuda::reduce<float>", 10, 20), kernel("syncengine::cuda::copy", 50, 60)]
    events = [*ours, *(kernel("gemm", *each) for each in others), {"cat": "cpu_op", "name": "gemm", "ts": 0, "dur": 99}]
    assert cuda_train_step.overlap(events) == pytest.approx(hidden)
    assert cuda_train_step.overlap(events[2:]) is None


@pytest.mark.nightly
def test_the_elastic_example_gives_the_same_weights():
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "examples.elastic"], cwd=ROOT, env=environ, timeout=300, check=True)
