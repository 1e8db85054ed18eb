"""Fills the README's tables from benchmarks/results, so that they can't differ.

python -m benchmarks.readme            writes README.md
python -m benchmarks.readme --check    fails if it is not what the results say
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from statistics import median

from benchmarks.support.output import RESULTS
from benchmarks.support.ranks import REPOSITORY

README = REPOSITORY / "README.md"
SHOWN_BYTES = (8, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20, 256 << 20)
MODELS = {
    "mlp": "MLP",
    "gpt": "GPT",
    "conv": "conv net with BatchNorm",
    "small": "1000 small parameters",
    "many": "10 000 small parameters",
}


def main(argv: list[str] | None = None) -> int:
    """Writes the README, or checks it."""
    parser = argparse.ArgumentParser(prog="benchmarks.readme", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    text = README.read_text()
    filled = fill(text)
    if not check:
        README.write_text(filled)
    elif filled != text:
        print("README.md differs from benchmarks/results: run `python -m benchmarks.readme`", file=sys.stderr)
        return 1
    return 0


def fill(text: str) -> str:
    """The README with what stands between its markers made anew."""
    sections: dict[str, Callable[[], str]] = {"all_reduce": all_reduce, "train_step": train_step}
    for name, section in sections.items():
        opening, closing = f"<!-- measured:{name} -->", f"<!-- /measured:{name} -->"
        before, rest = text.split(opening)
        after = rest.split(closing)[1]
        text = f"{before}{opening}\n{section()}\n{closing}{after}"
    return text


def load(name: str) -> dict:
    """One result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def all_reduce() -> str:
    """The collective alone, beside others."""
    openmpi, mpich = load("all_reduce-2ranks-openmpi"), load("all_reduce-2ranks-mpich")
    theirs = {result["bytes"]: result["peers"]["mpi"]["p50"] for result in mpich["results"]}
    rows = []
    for result in openmpi["results"]:
        size, peers = result["bytes"], result["peers"]
        if size in SHOWN_BYTES:
            times = [peers[name]["p50"] for name in ("floor", "empty", "tensor", "gloo", "mpi")]
            rows.append([bytes_text(size), *map(microseconds, [*times, theirs[size]])])
    head = ["", "floor", "`syncengine.empty`", "any tensor", "Gloo", "Open MPI", "MPICH"]
    caption = f"""
        All-reduce of float32 in place, 2 ranks on 2 cores, one thread each: median microseconds of a Python
        call, slowest rank, all peers interleaved in one run (MPICH in a run of its own),
        {openmpi["machine"]["Model name"]}, torch {openmpi["versions"]["torch"]}, {distance(openmpi)} ns from
        core to core and back. *Floor*: each rank scales the bytes in place. *`syncengine.empty`*: in memory
        that peers read and write. Results with spread are in [benchmarks/results](benchmarks/results)."""
    return f"{markdown(head, rows)}\n\n{wrapped(caption)}"


def train_step() -> str:
    """The first screen's table: what a model costs, in time and memory."""
    step, memory = load("train_step-2ranks"), load("memory-2ranks")
    growth = {result["model"]: beyond_plain(result["growth_bytes"]) for result in memory["results"]}
    rows = []
    for result in step["results"]:
        name, engines = result["model"], result["engines"]
        ours, theirs = engines["syncengine"]["overhead_ms"], engines["ddp"]["overhead_ms"]
        rows.append(
            [
                MODELS[name],
                f"{result['parameters'] / 1e6:.1f} M",
                f"{result['floor_ms']['p50']:.2f}",
                f"{ours['median']:.2f} ({ours['lower']:.2f} to {ours['upper']:.2f})",
                f"{theirs['median']:.1f}",
                f"{ours['median'] / theirs['median']:.2f}",
                *(mebibytes(growth.get(name, {}).get(engine)) for engine in ("syncengine", "ddp", "ddp_view")),
            ]
        )
    worst = max(result["engines"]["syncengine"]["no_sync_over_plain"]["median"] for result in step["results"])
    head = ["model", "parameters", "floor, ms", "overhead, ms", "DDP's, ms", "ratio"]
    head += ["peak memory, MiB", "DDP's", "DDP's with views"]
    title = """
        What synchronization adds to a training step (forward and backward), and what wrapping adds to a
        rank's peak memory; 2 ranks on 2 cores, one thread each, DDP over Gloo interleaved in the same
        processes, trained models bit-equal:"""
    caption = f"""
        Medians of {step["options"]["pairs"]} pairs with bootstrap intervals (95 %), {distance(step)} ns from
        core to core and back. *Floor*: scaling the gradients in place. Without synchronization a step takes
        at most {worst:.3f} times what it takes in plain torch."""
    return f"{wrapped(title)}\n\n{markdown(head, rows)}\n\n{wrapped(caption)}"


def beyond_plain(growth: dict[str, list[int]]) -> dict[str, float]:
    """By engine: MiB that the peak grows by, less what it grows by with the model alone."""
    return {engine: (median(found) - median(growth["plain"])) / 2**20 for engine, found in growth.items()}


def distance(document: dict) -> int:
    """Median nanoseconds of a round trip between the cores when the benchmark ended."""
    (found,) = (value for key, value in document["machine"].items() if key.startswith("core to core"))
    return found[1]


def wrapped(text: str) -> str:
    """A paragraph in lines as long as the README's."""
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, break_long_words=False)


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """The first column to the left, the others to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(re.sub(r"^\|  \|", "| |", "| " + " | ".join(line) + " |") for line in lines)


def bytes_text(size: int) -> str:
    """As people say it."""
    if size >= 2**20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size >= 2**10 else f"{size} B"


def mebibytes(value: float | None) -> str:
    """Nothing for what was not measured."""
    return "" if value is None else f"{value:.1f}"


def microseconds(value: float) -> str:
    """Three digits or more."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}".replace(",", " ")


if __name__ == "__main__":
    sys.exit(main())
