"""Pictures of a trace, drawn by matplotlib in colours that colour-blind people tell apart (Okabe and Ito)."""

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
Rows = Mapping[int, Sequence[Bar]]  # by rank


def draw(analyses: Sequence[Analysis]) -> list[list[tuple[str, str]]]:
    """The pictures of each trace, with the same axes: titles, and SVG in base 64."""
    drawn: list[list[tuple[str, str]]] = [[] for _ in analyses]
    for rows_of, title, axis in (
        (_phases, "Where a step's time goes on each rank", "milliseconds of a step, median"),
        (_one_step, "One step of middle length", "milliseconds"),
    ):
        rows = [rows_of(of) if of.steps else {} for of in analyses]
        bars = [bar for of_trace in rows for of_rank in of_trace.values() for bar in of_rank]
        until = max((begin + length for _, begin, length in bars), default=0.0)
        for of_trace, pictures in zip(rows, drawn, strict=True):
            if of_trace:
                pictures.append((title, _draw_one(title, axis, of_trace, 1.02 * until)))
    return drawn


def _draw_one(title: str, axis: str, rows: Rows, until: float) -> str:
    """Draws a line for each rank, with the reductions below the phases."""
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
        axes.set_xlim(0, until)
        axes.invert_yaxis()
        figure.legend(loc="outside lower left", ncols=3, handlelength=1.2, columnspacing=1.2)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()


def _phases(of: Analysis) -> Rows:
    rows = {}
    for rank, of_rank in of.ranks.items():
        times = [of_rank.phases_ms[phase] for phase in PHASES_SHOWN]
        begins = itertools.accumulate(times, initial=0.0)
        rows[rank] = list(zip(PHASES_SHOWN, begins, times, strict=False))
    return rows


def _one_step(of: Analysis) -> Rows:
    first = min(step.begin for step in of.example.values())
    return {
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
