"""Fills the tables of README.md and docs/ from benchmarks/results, so that they agree.

python -m benchmarks.readme            writes them
python -m benchmarks.readme --check    fails if they are not what the results say

A result that was measured with changes that were not committed, or at a commit that is none of main, is refused: its
table says so instead.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from statistics import median

from benchmarks.support.output import RESULTS, said
from benchmarks.support.ranks import REPOSITORY

README = REPOSITORY / "README.md"
FIGURES = REPOSITORY / "docs" / "benchmarks" / "results.md"
SHARDING = REPOSITORY / "docs" / "sharding.md"
NUMERICS = REPOSITORY / "docs" / "numerics.md"
ADOPTING = REPOSITORY / "docs" / "adopting.md"
DOCUMENTS = (README, FIGURES, SHARDING, NUMERICS, ADOPTING)
SHOWN_BYTES = (8, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20, 256 << 20)
MODELS = {
    "mlp": "MLP",
    "mlp67": "large MLP",
    "gpt": "GPT",
    "conv": "conv net with BatchNorm",
    "small": "1000 small parameters",
    "many": "10 000 small parameters",
    "elsewhere": "10 ms asleep, then an MLP of 0.7 M",
    "buffers_1": "MLP of 0.7 M that writes 1 MiB of buffers",
    "buffers_16": "MLP of 0.7 M that writes 16 MiB of buffers",
}


def main(argv: list[str] | None = None) -> int:
    """Writes the tables, or checks them."""
    parser = argparse.ArgumentParser(prog="benchmarks.readme", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    differ = 0
    refused.clear()
    for document in DOCUMENTS:
        text = document.read_text()
        filled = fill(text)
        if not check:
            document.write_text(filled)
        elif filled != text:
            print(
                f"{document.name} differs from benchmarks/results: run `python -m benchmarks.readme`", file=sys.stderr
            )
            differ = 1
    for why in refused:
        print(f"refused: {why}", file=sys.stderr)
    return differ or (not check and bool(refused))


def fill(text: str) -> str:
    """A document in which the sections between markers are made anew."""
    sections: dict[str, Callable[[], str]] = {
        "ratios": ratios,
        "all_reduce": all_reduce,
        "train_step": train_step,
        "sharded": sharded,
        "sharded_memory": sharded_memory,
        "micro_batches": micro_batches,
        "elastic": elastic,
        "replicate": replicate,
    }
    for name in re.findall(r"<!-- measured:(\w+) -->", text):
        opening, closing = f"<!-- measured:{name} -->", f"<!-- /measured:{name} -->"
        before, rest = text.split(opening)
        after = rest.split(closing)[1]
        try:
            section = sections[name]()
        except RefusedError as why:
            refused.append(str(why))
            section = wrapped("*Not measured at a commit of main yet: `make figures` does that.*")
        text = f"{before}{opening}\n{section}\n{closing}{after}"
    return text


class RefusedError(Exception):
    """A result that no table may show."""


refused: list[str] = []  # why tables were not filled


def check_commit(commit: str, of: str) -> None:
    """Raises RefusedError where changes were not committed, or if the commit is no ancestor of this checkout's head.

    Without git, or in a shallow clone, nobody knows the ancestors, and any commit will do.
    """
    if commit.endswith("-dirty"):
        raise RefusedError(f"{of} has changes that are not committed ({commit}): commit them, and measure again")
    if knows_history() and (not commit or said("git", "merge-base", commit, "HEAD")[:12] != commit[:12]):
        raise RefusedError(f"{of} is of {commit or 'no commit'}, which is none of main: measure after landing")


def load(name: str) -> dict:
    """One result file, unless it is refused."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise RefusedError(f"{name} was not measured")
    document = json.loads(path.read_text())
    check_commit(document["commit"], name)
    return document


def knows_history() -> bool:
    """Whether this is a git checkout that is not shallow."""
    return said("git", "rev-parse", "--is-shallow-repository") == "false"


def used() -> list[str]:
    """Names of the result files that tables show."""
    sharded = sorted(path.stem for path in RESULTS.glob("sharded_memory-*ranks.json"))
    names = ["all_reduce-2ranks-openmpi", "all_reduce-2ranks-mpich", "train_step-2ranks", "memory-2ranks"]
    return [*names, "sharded-2ranks", *sharded, "micro_batches-4ranks", "elastic-4ranks", "replicate-2ranks"]


def ratios() -> str:
    """The README's table: a whole step, beside DDP's."""
    step = load("train_step-2ranks")
    rows = []
    for result in step["results"]:
        engines = result["engines"]
        plain = engines["plain"]["no_sync_ms"]["p50"]
        ours, theirs = (plain + engines[name]["overhead_ms"]["median"] for name in ("syncengine", "ddp"))
        times = [f"{plain:.1f}", f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.1f} x"]
        rows.append([MODELS[result["model"]], f"{result['parameters'] / 1e6:.1f} M", *times])
    head = ["model", "parameters", "no synchronization, ms", "DDP over Gloo, ms", "syncengine, ms", "faster than DDP"]
    caption = f"""
        A training step (forward and backward), 2 ranks on 2 cores with one thread each, {distance(step)} ns from core
        to core and back; the trained models are bit-equal. `.venv/bin/python -m benchmarks.train_step` measures it.
        {measured_at(step)}"""
    return f"{markdown(head, rows)}\n\n{wrapped(caption)}"


def all_reduce() -> str:
    """The table of all-reduce alone, beside others."""
    openmpi, mpich = load("all_reduce-2ranks-openmpi"), load("all_reduce-2ranks-mpich")
    theirs = {result["bytes"]: result["peers"]["mpi"]["p50"] for result in mpich["results"]}
    rows = []
    for result in openmpi["results"]:
        size, peers = result["bytes"], result["peers"]
        if size in SHOWN_BYTES:
            ours = [microseconds(peers[name]["p50"]) for name in ("floor", "empty", "tensor")]
            gloo = " to ".join(microseconds(peers["gloo"][quartile]) for quartile in ("p25", "p75"))
            mpis = [microseconds(time) for time in (peers["mpi"]["p50"], theirs[size])]
            rows.append([bytes_text(size), *ours, f"{microseconds(peers['gloo']['p50'])} ({gloo})", *mpis])
    head = ["", "floor", "`syncengine.empty`", "any tensor", "Gloo", "Open MPI", "MPICH"]
    caption = f"""
        All-reduce of float32 in place, 2 ranks on 2 cores, one thread each: median microseconds of a Python
        call, slowest rank, all peers interleaved in one run (MPICH in a run of its own),
        {openmpi["machine"]["Model name"]}, torch {openmpi["versions"]["torch"]}, {distance(openmpi)} ns from
        core to core and back. *Floor*: each rank scales the bytes in place. *`syncengine.empty`*: in memory
        that peers read and write. *Gloo*: with quartiles, since its own threads compete with the ranks for the cores
        and its times vary. Results with spread are in `benchmarks/results`. {measured_at(openmpi, mpich)}"""
    return f"{markdown(head, rows)}\n\n{wrapped(caption)}"


def train_step() -> str:
    """The first screen's table: the time and memory that synchronizing a model costs."""
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
                f"{engines['plain']['no_sync_ms']['p50']:.1f}",
                f"{result['floor_ms']['p50']:.2f}",
                f"{ours['median']:.2f} ({ours['lower']:.2f} to {ours['upper']:.2f})",
                f"{theirs['median']:.1f}",
                f"{ours['median'] / theirs['median']:.2f}" if ours["lower"] > 0 else "below noise",
                *(mebibytes(growth.get(name, {}).get(engine)) for engine in ("syncengine", "ddp", "ddp_view")),
            ]
        )
    worst = max(result["engines"]["syncengine"]["no_sync_over_plain"]["median"] for result in step["results"])
    head = ["model", "parameters", "step, ms", "floor, ms", "overhead, ms", "DDP's overhead, ms"]
    head += ["ratio of overheads", "peak memory, MiB", "DDP's", "DDP's with views"]
    title = """
        The *overhead* is the time that synchronization adds to a training step: the time of forward and backward
        with it, less their time without it, in the same process and on the slowest rank. *Peak memory* is the memory
        that wrapping adds to a rank's peak. 2 ranks
        on 2 cores, one thread each; DDP at its defaults, over Gloo, takes turns with `syncengine.Parallel`; trained
        models bit-equal:"""
    caption = f"""
        *Step*: in plain torch. *Floor*: scaling the gradients in place, timed in the same way, so that an overhead
        may be below it. *With views*: `gradient_as_bucket_view=True`. Medians of {step["options"]["pairs"]} pairs
        with bootstrap intervals (95 %), {distance(step)} ns from core to core and back; of memory, medians of
        {memory["options"]["repeats"]} runs, which vary by some tenths of a MiB. A step of the wrapped model that is
        not synchronized takes at most {worst:.3f} times a plain one.
        {measured_at(step, memory)}"""
    return f"{wrapped(title)}\n\n{markdown(head, rows)}\n\n{wrapped(caption)}"


def sharded() -> str:
    """The table of a whole step with one copy of the weights on a host, beside the plain optimizer and ZeRO."""
    step = load("sharded-2ranks")
    rows = []
    for result in step["results"]:
        engines = result["engines"]
        found = engines["today"]["step_ratio"]
        rows.append(
            [
                MODELS[result["model"]],
                f"{result['parameters'] / 1e6:.1f} M",
                *(f"{engines[name]['step_ms']['p50']:.1f}" for name in ("ddp", "zero", "today", "sharded")),
                f"{found['median']:.2f} ({found['lower']:.2f} to {found['upper']:.2f})",
                *(f"{engines[name]['update_ms']['p50']:.1f}" for name in ("today", "sharded")),
            ]
        )
    head = ["model", "parameters", "step, ms: DDP", "DDP, ZeRO", "plain", "sharded", "of plain"]
    head += ["optimizer, ms: plain", "sharded"]
    caption = f"""
        A whole step with AdamW (fused), 2 ranks on 2 cores, one thread each, all interleaved in the same
        processes, trained weights bit-equal: medians of {step["options"]["rounds"]} with a bootstrap interval
        (95 %), {distance(step)} ns from core to core and back. *Plain*: `syncengine.Parallel` with
        torch.optim.AdamW on each rank. *Of plain*: the median of the ratios of each round, which may differ from the
        quotient of the two columns. *ZeRO*: torch's `ZeroRedundancyOptimizer`. *Optimizer*: its part of the
        step, ranks start together. {measured_at(step)}"""
    return f"{markdown(head, rows)}\n\n{wrapped(caption)}"


def sharded_memory() -> str:
    """The table of a rank's memory by the number of ranks, beside that of one copy."""
    rows = []
    documents = [load(name) for name in used() if name.startswith("sharded_memory")] or [load("sharded_memory-2ranks")]
    for document in sorted(documents, key=lambda document: document["options"]["ranks"]):
        for result in document["results"]:
            held, one_copy = peaks(result), result["one_copy_bytes"] / 2**20
            row = [
                MODELS[result["model"]],
                str(document["options"]["ranks"]),
                f"{held['today']:.0f}",
                f"{held['sharded']:.0f}",
            ]
            row += [f"{held['sharded'] / held['today']:.2f}", f"{one_copy:.0f}", f"{held['sharded'] / one_copy:.2f}"]
            rows.append(row)
    head = ["model", "ranks", "plain, MiB", "sharded, MiB", "of plain", "one copy, MiB", "of one copy"]
    caption = f"""
        Growth of a rank's memory (Pss) from before the model is built to the peak of training with AdamW, of the
        rank that grew most. *One copy*: weights and two moments divided by the number of ranks, and a gradient;
        activations and everything else come on top. {measured_at(*documents)}"""
    return f"{markdown(head, sorted(rows, key=lambda row: row[0]))}\n\n{wrapped(caption)}"


def micro_batches() -> str:
    """The table of steps whose bits do not depend on the number of ranks: beside rank_order, and by ranks."""
    document = load("micro_batches-4ranks")
    rows: dict[str, list[str]] = {}
    for result in document["results"]:
        row = rows.setdefault(result["model"], [MODELS[result["model"]]])
        if "micro_batches" in result["ms"]:
            found = result["ratio"]["micro_batches"]
            row.append(f"{found['median']:.3f} ({found['lower']:.3f} to {found['upper']:.3f})")
        else:
            row += [f"{ms['p50']:.1f}" for ms in result["ms"].values()]
    head = ["model", "of `rank_order`, 2 ranks", "4 ranks", "M = 8, ms: 1 rank", "2", "3 (4, 2, 2)", "4", "3, 3, 2"]
    caption = f"""
        The columns *of `rank_order`* compare a step of one micro-batch a rank with a step of `Parallel` alone, with
        bootstrap intervals (95 %). The columns of *M = 8* have a step of eight micro-batches by the number of ranks;
        the last column is for comparison, a deal of 3, 3 and 2 that syncengine does not make. Twelve micro-batches
        would be dealt as 4, 4, 4. Medians of {document["options"]["steps"]} steps without the optimizer, interleaved in
        the same processes, on 2 cores with one thread a rank; runs that trained the same have the same bits.
        {measured_at(document)}"""
    return f"{markdown(head, rows.values())}\n\n{wrapped(caption)}"


def elastic() -> str:
    """The table of the time from the kill of one rank to the next step of the others."""
    document = load("elastic-4ranks")
    rows = []
    for result in document["results"]:
        ms = result["ms"]["next step"]
        shown = [f"{ms[p]:.0f}" for p in ("p50", "p95", "p100")]
        rows.append([MODELS[result["model"]], *shown, *(str(count or "") for count in result["histogram"].values())])
    edges = [f"{edge.replace('>= ', 'from ')} ms" for edge in document["results"][0]["histogram"]]
    caption = f"""
        One of 4 ranks on 2 cores is killed at a random instant of a step of eight micro-batches, with AdamW.
        *Median*, *95th percentile* and *longest* are the ms from the kill until the last survivor begins its next
        step; the other columns are a histogram of the {document["options"]["runs"]} runs. All end with the weights of
        a run in which nobody died. {measured_at(document)}"""
    return f"{markdown(['model', 'median', '95th percentile', 'longest', *edges], rows)}\n\n{wrapped(caption)}"


def replicate() -> str:
    """The table of FSDP2's functions, over Gloo and over the engine, beside Parallel."""
    document = load("replicate-2ranks")
    names = ("plain", "parallel", "ddp", "replicate", "replicate_gloo", "fsdp", "fsdp_gloo")
    rows = []
    for result in document["results"]:
        engines = result["engines"]
        over = engines["replicate"]["of_parallel"]
        of_parallel = f"{over['median']:.2f} ({over['lower']:.2f} to {over['upper']:.2f})"
        steps = (f"{engines[name]['step_ms']['p50']:.1f}" for name in names)
        rows.append([MODELS[result["model"]], *steps, of_parallel])
    head = ["model", "plain torch, ms", "Parallel", "DDP, Gloo", "replicate, engine", "replicate, Gloo"]
    head += ["fully_shard, engine", "fully_shard, Gloo", "replicate, engine / Parallel"]
    caption = f"""
        A whole step with AdamW, 2 ranks on 2 cores, one thread each, all interleaved in the same processes, trained
        weights bit-equal: medians of {document["options"]["rounds"]}, and a ratio with a bootstrap interval (95 %).
        `python -m benchmarks.replicate` measures it. {measured_at(document)}"""
    return f"{markdown(head, rows)}\n\n{wrapped(caption)}"


def peaks(result: dict) -> dict[str, float]:
    """The growth of the peak in MiB, by engine."""
    return {engine: median(each["peak"] for each in found) / 2**20 for engine, found in result["growth_bytes"].items()}


def beyond_plain(growth: dict[str, list[int]]) -> dict[str, float]:
    """The growth of the peak in MiB beyond that of the model alone, by engine."""
    return {engine: (median(found) - median(growth["plain"])) / 2**20 for engine, found in growth.items()}


def measured_at(*documents: dict) -> str:
    """A sentence that names the commits of these results; "-dirty" means uncommitted changes, too."""
    commits = sorted({document["commit"] for document in documents})
    return f"Measured at {' and '.join(commits)}."


def distance(document: dict) -> int:
    """Median nanoseconds of a round trip between the cores when the benchmark ended."""
    (found,) = (value for key, value in document["machine"].items() if key.startswith("core to core"))
    return found[1]


def wrapped(text: str) -> str:
    """A paragraph in lines as long as the README's."""
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, break_long_words=False)


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown, with the first column to the left and the others to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(re.sub(r"^\|  \|", "| |", "| " + " | ".join(line) + " |") for line in lines)


def bytes_text(size: int) -> str:
    """Bytes as a text such as 4 MiB."""
    if size >= 2**20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size >= 2**10 else f"{size} B"


def mebibytes(value: float | None) -> str:
    """A number with one digit; empty if it was not measured."""
    return "" if value is None else f"{value:.1f}"


def microseconds(value: float) -> str:
    """A number with three digits or more."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}".replace(",", " ")


if __name__ == "__main__":
    sys.exit(main())
