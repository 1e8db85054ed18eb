"""`syncengine bench`: nccl-tests' columns and formulas, results that are verified, Gloo beside it."""

import argparse
import importlib
import io
import itertools
import json
import math
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from command import syncengine
from marks import mostly_nightly
from pool import RankPool

from syncengine.__main__ import main
from syncengine.bench.collectives import (
    COLLECTIVES,
    PERIOD,
    Case,
    Shape,
    bus_factor,
    count_wrong,
    reduced,
    tile,
    values,
)
from syncengine.bench.options import DTYPES, OPS, add_options, parse_size, sizes
from syncengine.bench.report import Table

SHORT = ("-n", "4", "-w", "1")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


# --- Formulas


@pytest.mark.parametrize(
    ("name", "factors"),  # of 2, 4 and 8 ranks, as nccl-tests' doc/PERFORMANCE.md has them
    [
        ("all_reduce", (1, 1.5, 1.75)),
        ("all_gather", (0.5, 0.75, 0.875)),
        ("reduce_scatter", (0.5, 0.75, 0.875)),
        ("all_to_all", (0.5, 0.75, 0.875)),
        ("broadcast", (1, 1, 1)),
    ],
)
def test_bus_bandwidth(name: str, factors: tuple[float, ...]):
    assert tuple(bus_factor(name, ranks) for ranks in (2, 4, 8)) == factors


def test_sizes_and_counts():
    for name in ("all_reduce", "broadcast"):
        shape = Shape.of_size(name, 4, 1024, torch.float32, "sum", 0)
        assert (shape.size, shape.count, shape.input_count, shape.output_count) == (1024, 256, 256, 256)
    for name, counts in (("all_gather", (64, 256)), ("reduce_scatter", (256, 64)), ("all_to_all", (256, 256))):
        shape = Shape.of_size(name, 4, 1024, torch.float32, "sum", 0)
        assert (shape.size, shape.count) == (1024, 64)
        assert (shape.input_count, shape.output_count) == counts
    assert Shape.of_size("all_gather", 4, 8, torch.float32, "sum", 0).size == 16  # one element a rank at least
    assert Shape.of_size("barrier", 4, 0, torch.float32, "sum", 0).size == 0


def test_options_of_nccl_tests():
    options = parsed("-b", "8", "-e", "128M", "-f", "2")
    assert sizes(options) == [8 << i for i in range(25)]
    long = parsed("--minbytes", "8", "--maxbytes", "128M", "--stepfactor", "2", "--warmup_iters", "5", "--iters", "50")
    assert vars(long) == vars(options)
    assert sizes(parsed("-b", "1K", "-e", "4K", "-i", "1K")) == [1024, 2048, 3072, 4096]
    assert [parse_size(text) for text in ("8", "4K", "4KiB", "1m", "2GB")] == [8, 4096, 4096, 2**20, 2**31]
    assert parsed("--datatype", "half").dtype == "half"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("-b", "8X"), "no number of bytes"),
        (("-d", "complex64"), "invalid choice: 'complex64'"),
        (("-n", "0"), "at least 1"),
        (("-b", "8", "-e", "4", "--ranks", "2"), "-e 4 is less than -b 8"),
        (("-o", "avg", "-d", "int32", "--ranks", "2"), "avg has no meaning for int32"),
        (("-o", "avg", "-d", "int64", "--ranks", "2"), "avg has no meaning for int64"),
        (("--ranks", "1"), "give 2 to 64"),
        ((), "give --ranks N"),
    ],
)
def test_what_cannot_work_is_refused(arguments: tuple[str, ...], text: str, capfd: pytest.CaptureFixture[str]):
    try:
        code = main(["bench", *arguments])
    except SystemExit as ended:
        code = ended.code
    said = capfd.readouterr()
    assert (code, said.out) == (2, "")
    assert text in said.err


# --- What is right


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_sums_of_patterns_are_exact(dtype: torch.dtype, op: str):
    """In any order, of up to 64 ranks: against the same in Python's own integers."""
    for ranks in (2, 3, 64):
        period = [values(rank, ranks, 5, dtype, op).tolist() for rank in range(ranks)]
        reduce = {"sum": sum, "avg": sum, "min": min, "max": max, "prod": math.prod}[op]
        expected = [reduce(column) // (ranks if op == "avg" else 1) for column in zip(*period, strict=True)]
        assert reduced(ranks, 5, dtype, op).tolist() == expected
        if dtype.itemsize > 1:  # bytes wrap around, in additions and here
            assert torch.tensor(expected).to(dtype).tolist() == expected
            assert all(sum(column) == int(torch.tensor(sum(column)).to(dtype)) for column in zip(*period, strict=True))


def test_wrong_elements_are_counted():
    expected = tile(torch.arange(PERIOD), 3, 1000, torch.float32)
    assert expected[:3].tolist() == [3, 4, 5]
    assert expected[PERIOD - 3] == 0
    assert count_wrong(expected.clone(), expected) == 0
    result = expected.clone()
    result[[1, 500, 999]] += torch.tensor([1, 2**-10, torch.nan])
    assert count_wrong(result, expected) == 3
    assert count_wrong(result[:10], expected) == 1000


def measured(arguments: tuple[str, ...], broken: int = 0) -> tuple[int, dict[str, Any] | None]:
    """Runs the command on this rank, in this process. Rank 1 spoils `broken` elements of each result."""
    call = Case.call

    def broken_call(self: Case) -> None:
        call(self)
        if self.rank == 1:
            self.output[:broken] += 1

    with mock.patch.object(Case, "call", broken_call if broken else call), redirect_stdout(io.StringIO()) as said:
        code = main(["bench", "--json", *SHORT, *arguments])
    return code, json.loads(said.getvalue()) if said.getvalue() else None


@pytest.mark.thorough
@pytest.mark.parametrize("memory", mostly_nightly(["torch", "shared"], 1))
def test_every_collective_is_right(pool: RankPool, memory: str):
    """Three ranks: parts of sizes that are no powers of two."""
    wanted = ("--collective", "all", "-b", "8", "-e", "300K", "-f", "37", "--memory", memory)
    (code, report), *others = pool.run(measured, wanted, world=3, settings=None)
    assert code == 0
    assert others == [(0, None), (0, None)]
    assert report["ranks"] == 3
    rows = report["rows"]
    assert {row["collective"] for row in rows} == set(COLLECTIVES)
    for row in rows:
        assert row["wrong"] == (None if row["collective"] == "barrier" else 0)
        assert row["time"] > 0
        assert row["algbw"] == pytest.approx(row["size"] / row["time"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * bus_factor(row["collective"], 3))


KINDS = [
    (dtype, op)
    for dtype, op in itertools.product(["half", "bfloat16", "double", "int8", "int64"], OPS)
    if op != "avg" or DTYPES[dtype].is_floating_point
]


@pytest.mark.parametrize(
    ("dtype", "op"),
    mostly_nightly(KINDS, *(i for i, (dtype, op) in enumerate(KINDS) if dtype == "half" or op == "sum")),
)
def test_every_reduction_is_right(pool: RankPool, dtype: str, op: str):
    wanted = ("-d", dtype, "-o", op, "-b", "5000", "-e", "5000")
    (code, report), _, _ = pool.run(measured, wanted, world=3, settings=None)
    assert (code, report["rows"][0]["wrong"]) == (0, 0)


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_to_all"])
def test_a_broken_result_is_counted(pool: RankPool, name: str):
    """By elements, in each of the turns, and the exit code says it."""
    wanted = ("--collective", name, "-b", "4K", "-e", "4K")
    (code, report), (other, _) = pool.run(measured, wanted, 5, settings=None)
    turns = 4
    assert report["rows"][0]["wrong"] == 5 * turns
    assert (code, other) == (1, 0)


def measured_beside_a_broken_gloo(arguments: tuple[str, ...], broken: int) -> tuple[int, dict[str, Any] | None]:
    """Rank 1 spoils `broken` elements of each of Gloo's results."""
    measure = importlib.import_module("syncengine.bench.measure")  # whose name there is that of a function
    case_of = measure.gloo_case

    def broken_case(shape: Shape, group: Any) -> Case:
        case = case_of(shape, group)
        call = case.call

        def broken_call() -> None:
            call()
            if case.rank == 1:
                case.output[:broken] += 1

        case.call = broken_call
        return case

    with mock.patch.object(measure, "gloo_case", broken_case):
        return measured(("--compare", *arguments))


def test_broken_results_of_gloo_are_counted_beside_right_ones(pool: RankPool):
    (code, report), (other, _) = pool.run(measured_beside_a_broken_gloo, ("-b", "4K", "-e", "4K"), 3, settings=None)
    (row,) = report["rows"]
    assert (row["wrong"], row["gloo"]["wrong"]) == (0, 3 * 4)
    assert row["ratio"]["median"] > 0
    assert (code, other) == (1, 0)


def test_times_are_those_of_the_slowest_rank():
    """Of two, one of which takes three times as long; wrong elements are all ranks'."""
    own: list[torch.Tensor] = []

    def all_gather(output: torch.Tensor, input: torch.Tensor) -> None:
        own.append(input)
        output.copy_(torch.stack([input, 3 * input]))

    communicator = SimpleNamespace(size=2, barrier=lambda: None, all_gather=all_gather)
    case = SimpleNamespace(check=lambda turn, communicator: 2, call=lambda: None)
    take_turns = importlib.import_module("syncengine.bench.measure").take_turns
    times, wrong = take_turns({"one": case, "other": case}, 5, 1, True, communicator)
    (said,) = own
    assert torch.equal(torch.stack([times["one"], times["other"]]).flatten(), 3 * said[:10])
    assert wrong == {"one": 4 * 5 * 2, "other": 4 * 5 * 2}


def test_the_ratio_is_gloos_time_over_ours(monkeypatch: pytest.MonkeyPatch):
    measure = importlib.import_module("syncengine.bench.measure")
    times = {"syncengine": torch.tensor([1.0, 2, 4]).double(), "gloo": torch.tensor([3.0, 8, 20]).double()}
    monkeypatch.setattr(measure, "gloo_case", lambda *_: SimpleNamespace(call=lambda: None))
    monkeypatch.setattr(measure, "take_turns", lambda *_: (times, {"syncengine": 0, "gloo": 1}))
    row = measure.measure("all_reduce", 1024, parsed("-w", "0"), SimpleNamespace(size=2, rank=0), object())
    assert row["ratio"] == {"p25": 3.5, "median": 4.0, "p75": 4.5}
    assert (row["time"], row["wrong"]) == (2.0, 0)
    assert row["spread"] == {"p25": 1.5, "median": 2.0, "p75": 3.0}
    assert (row["gloo"]["time"], row["gloo"]["wrong"]) == (8.0, 1)


def test_unchecked_results_are_not_called_right(pool: RankPool):
    (code, report), _ = pool.run(measured, ("-c", "0", "-b", "4K", "-e", "4K"), 5, settings=None)
    assert (code, report["rows"][0]["wrong"]) == (0, None)


def test_a_root_that_is_no_rank(pool: RankPool):
    results = pool.run(measured, ("--collective", "broadcast", "-r", "2"), settings=None)
    assert [code for code, _ in results] == [2, 2]


# --- The command


@pytest.mark.nightly
def test_columns():
    ended = syncengine("bench", "--ranks", "2", "-b", "8", "-e", "64", "--collective", "all", "--compare", *SHORT)
    assert ended.returncode == 0, ended.stderr
    out = ended.stdout
    lines = out.splitlines()
    tables = [i for i, line in enumerate(lines) if line.startswith("# syncengine bench, ")]
    assert len(tables) == len(COLLECTIVES)
    columns = ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
    head = lines[tables[0] + 3].lstrip("#").split()
    assert head == [*columns, "Gloo", "time", "busbw", "#wrong", "ratio", "(quartiles)"]
    rows = [line.split() for line in lines[tables[0] : tables[1]] if not line.startswith("#")]
    assert [row[:5] for row in rows] == [[str(b), str(b // 4), "float", "sum", "-1"] for b in (8, 16, 32, 64)]
    for row in rows:
        time, algbw, busbw, wrong, gloo_time, _, gloo_wrong, ratio = row[5:13]
        assert (wrong, gloo_wrong) == ("0", "0")
        assert float(algbw) == pytest.approx(int(row[0]) / float(time) / 1e3, abs=0.01)
        assert algbw == busbw  # of two ranks
        assert float(gloo_time) > 0
        assert float(ratio) > 0
    assert out.count("# Wrong values: 0 OK") == len(COLLECTIVES) - 1


def table_of(rows: list[dict[str, Any]], *arguments: str) -> list[str]:
    """What the table says from its first row on."""
    communicator = SimpleNamespace(size=2, numerics="rank_order", links="")
    with redirect_stdout(io.StringIO()) as said:
        table = Table(parsed(*arguments), communicator, "all_reduce")
        for row in rows:
            table.add(row)
        table.end()
    return said.getvalue().splitlines()[5:]


def row_of(wrong: int | None, **more: Any) -> dict[str, Any]:
    place = {"size": 8, "count": 2, "type": "float", "redop": "sum", "root": -1}
    return place | {"time": 2.0, "algbw": 0.004, "busbw": 0.006, "wrong": wrong} | more


def test_the_table_says_what_is_wrong():
    row, *end = table_of([row_of(0), row_of(7)])[1:]
    assert row.split()[-1] == "7"
    assert end == ["# Wrong values: 7 FAILED", "# Avg bus bandwidth: 0.006 GB/s", "#"]
    assert table_of([row_of(None)])[0].split()[-1] == "N/A"
    assert table_of([row_of(None)])[1] == "# Wrong values: not checked"


def test_the_table_compares():
    gloo = {"time": 6.0, "algbw": 0.001, "busbw": 0.002, "wrong": 3}
    row, *_ = table_of([row_of(0, gloo=gloo, ratio={"p25": 2.5, "median": 3, "p75": 3.25})], "--compare")
    assert row.split()[8:] == ["0", "6.00", "0.00", "3", "3.00", "(2.50", "to", "3.25)"]
    row, *_ = table_of([row_of(0, gloo={"missing": "it has no such thing"})], "--compare")
    assert row.split()[8:] == ["0", "-", "-", "-", "-", "(it", "has", "no", "such", "thing)"]
