"""Prints the results of `syncengine bench`: the columns of nccl-tests, or JSON."""

import argparse
from typing import Any

import torch

from syncengine._C import Communicator, build_id, instruction_set


class Table:
    """The table of one collective, printed row by row, so that a user sees it grow."""

    def __init__(self, options: argparse.Namespace, communicator: Communicator, name: str) -> None:
        self._compares = options.compare
        self._rows: list[dict[str, Any]] = []
        memory = "any tensors" if options.memory == "torch" else "tensors of syncengine.empty"
        between = f"; between hosts: {communicator.links}" if communicator.links else ""
        print(
            f"# syncengine bench, {name}: {communicator.size} ranks, numerics {communicator.numerics}, kernels "
            f"{instruction_set()}, {torch.get_num_threads()} threads, torch {torch.__version__}{between}\n"
            f"# {memory}; medians of {options.iters} calls after {options.warmup_iters}, of the slowest rank\n#"
        )
        heads = [
            ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"),
            ("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", ""),
        ]
        gloo = [("Gloo time", "busbw", "#wrong", "ratio", "(quartiles)"), ("(us)", "(GB/s)", "", "", "")]
        for head, theirs in zip(heads, gloo, strict=True):
            print(("#" + _left(head)[1:] + (_right(theirs) if self._compares else "")).rstrip())

    def add(self, row: dict[str, Any]) -> None:
        """Prints one row of the table, that of a message size."""
        self._rows.append(row)
        cells = (row["size"], row["count"], row["type"], row["redop"], row["root"], *_figures(row))
        line = _left(tuple(map(str, cells)))
        if self._compares:
            line += _right(_beside(row))
        print(line.rstrip(), flush=True)

    def end(self) -> None:
        """Prints the lines with which nccl-tests ends: wrong values, and the mean bandwidth."""
        checked = [row["wrong"] for row in self._rows if row["wrong"] is not None]
        wrong = sum(checked)
        verdict = "not checked" if not checked else f"{wrong} {'FAILED' if wrong else 'OK'}"
        mean = sum(row["busbw"] for row in self._rows) / len(self._rows)
        print(f"# Wrong values: {verdict}\n# Avg bus bandwidth: {mean:g} GB/s\n#", flush=True)


def as_json(options: argparse.Namespace, communicator: Communicator, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All results for JSON, in microseconds and 10^9 bytes a second; `ratio` is Gloo's time over ours."""
    return {
        "ranks": communicator.size,
        "numerics": communicator.numerics,
        "links": communicator.links,
        "instruction_set": instruction_set(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "build": build_id,
        "memory": options.memory,
        "iters": options.iters,
        "warmup_iters": options.warmup_iters,
        "rows": rows,
    }


def _figures(row: dict[str, Any]) -> tuple[str, str, str, str]:
    wrong = "N/A" if row["wrong"] is None else str(row["wrong"])
    return _number(row["time"]), f"{row['algbw']:.2f}", f"{row['busbw']:.2f}", wrong


def _beside(row: dict[str, Any]) -> tuple[str, ...]:
    gloo = row["gloo"]
    if "missing" in gloo:
        return ("-", "-", "-", "-", f"({gloo['missing']})")
    time, _, busbw, wrong = _figures(gloo)
    ratio = row["ratio"]
    return time, busbw, wrong, f"{ratio['median']:.2f}", f"({ratio['p25']:.2f} to {ratio['p75']:.2f})"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def _left(cells: tuple[str, ...]) -> str:
    widths = (12, 14, 10, 8, 8, 9, 8, 8, 8)
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _right(cells: tuple[str, ...]) -> str:
    widths = (13, 8, 8, 8)
    fixed = "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False))
    return f"{fixed}  {cells[4]}"
