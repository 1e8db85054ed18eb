"""Pictures of a trace, drawn by matplotlib in colours that colour-blind people tell apart (Okabe and Ito)."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from syncengine.report.analysis import PHASES_SHOWN, RANKS_SHOWN, Analysis
from syncengine.tracing import Kind, Phase

_REDUCTIONS = "reductions"
_COLORS = {
    "input": "#E69F00",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "wait": "#D55E00",
    "optimizer": "#009E73",
    _REDUCTIONS: "#CC79A7",
}
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.transparent": True,
    "svg.hashsalt": "syncengine",  # the same picture each time
}
_WIDTH = 4.2  # inches: about that of a phone

Bar = tuple[str, float, float]  # a phase, or reductions; begin and length in milliseconds


def _draw(title: str, axis: str, rows: Mapping[int, Sequence[Bar]]) -> tuple[str, str]:
    """Draws a line for each rank, with the reductions below the phases. Returns title and picture: SVG, in base 64."""
    ranks = sorted(rows)[:RANKS_SHOWN]
    shown = {what for row in rows.values() for what, *_ in row}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 1.5 + 0.4 * len(ranks)), layout="constrained")
        axes = figure.subplots()
        for what in (each for each in _COLORS if each in shown):
            for i, rank in enumerate(ranks):
                axes.broken_barh(
                    [(begin, length) for each, begin, length in rows[rank] if each == what],
                    (i + 0.1, 0.24) if what == _REDUCTIONS else (i - 0.36, 0.42 if _REDUCTIONS in shown else 0.7),
                    facecolors=_COLORS[what],
                    hatch="///" if what == "wait" else None,
                    edgecolor="white",
                    linewidth=0.3,
                    label=PHASES_SHOWN.get(what, what) if i == 0 else None,
                )
        axes.set(title=title, xlabel=axis, yticks=range(len(ranks)), yticklabels=[f"rank {rank}" for rank in ranks])
        axes.set_xlim(left=0)
        axes.invert_yaxis()
        figure.legend(loc="outside lower left", ncols=3, handlelength=1.2, columnspacing=1.2)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return title, base64.b64encode(file.getvalue()).decode()


def phases(of: Analysis) -> tuple[str, str]:
    """A picture of the phases of a step on each rank: medians."""
    rows = {}
    for rank, of_rank in of.ranks.items():
        times = [of_rank.phases_ms[phase] for phase in PHASES_SHOWN]
        begins = itertools.accumulate(times, initial=0.0)
        rows[rank] = list(zip(PHASES_SHOWN, begins, times, strict=False))
    return _draw("Where a step's time goes on each rank", "milliseconds of a step, median", rows)


def one_step(of: Analysis) -> tuple[str, str]:
    """A picture of one step of middle length: the phases of each rank, and its reductions of buckets."""
    first = min(step.begin for step in of.example.values())
    rows = {
        rank: [
            (
                _REDUCTIONS if event.kind == Kind.REDUCED else Phase(event.lane).name.lower(),
                (event.begin - first) / 1e6,
                (event.end - event.begin) / 1e6,
            )
            for event in step.events
            if event.kind == Kind.PHASE or (event.kind == Kind.REDUCED and event.lane == 1)
        ]
        for rank, step in of.example.items()
    }
    return _draw("One step of middle length", "milliseconds", rows)
