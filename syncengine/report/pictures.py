"""The pictures of a report, as SVG that goes into a page: made by matplotlib, in colours that colour-blind people tell
apart (Okabe and Ito). Texts and lines have the page's own colour, so a dark page stays legible."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from syncengine.errors import InvalidUsage
from syncengine.report.analysis import Analysis
from syncengine.report.steps import PHASE_NAMES
from syncengine.tracing import Kind, Phase

_REDUCTIONS = "reductions"
_COLORS = {
    PHASE_NAMES[Phase.INPUT]: "#E69F00",
    PHASE_NAMES[Phase.FORWARD]: "#56B4E9",
    PHASE_NAMES[Phase.BACKWARD]: "#0072B2",
    PHASE_NAMES[Phase.WAIT]: "#D55E00",
    PHASE_NAMES[Phase.OPTIMIZER]: "#009E73",
    _REDUCTIONS: "#CC79A7",
}
_INK = "#010203"  # stands for the page's own colour
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.transparent": True,
    "figure.constrained_layout.use": True,
}
_WIDTH = 4.2  # inches: about that of a phone
RANKS_SHOWN = 16


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidUsage("the report's pictures need matplotlib: pip install 'syncengine[report]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


class _Span(NamedTuple):
    what: str
    begin: float  # milliseconds
    length: float


def _draw(name: str, title: str, axis: str, rows: Mapping[int, Sequence[_Span]]) -> str:
    """A line for each rank, with the reductions below the phases."""
    pyplot = _pyplot()
    ranks = sorted(rows)[:RANKS_SHOWN]
    with pyplot.rc_context({**_STYLE, "svg.hashsalt": name}):  # the same picture each time
        figure, axes = pyplot.subplots(figsize=(_WIDTH, 1.5 + 0.4 * len(ranks)))
        shown = {span.what for row in rows.values() for span in row}
        for what in (each for each in _COLORS if each in shown):
            for i, rank in enumerate(ranks):
                axes.broken_barh(
                    [(span.begin, span.length) for span in rows[rank] if span.what == what],
                    (i + 0.1, 0.24) if what == _REDUCTIONS else (i - 0.36, 0.42 if _REDUCTIONS in shown else 0.7),
                    facecolors=_COLORS[what],
                    hatch="///" if what == PHASE_NAMES[Phase.WAIT] else None,
                    edgecolor="white",
                    linewidth=0.3,
                    label=what if i == 0 else None,
                )
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        axes.invert_yaxis()
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(left=0)
        axes.set_xlabel(axis)
        axes.set_title(title)
        figure.legend(loc="outside lower left", ncols=3, handlelength=1.2, columnspacing=1.2)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        pyplot.close(figure)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"font: ([^;\"]*?)'[^;\"]*", r"font: \1sans-serif", text)
    # No two pictures of a page share an id.
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def phases(of: Analysis, name: str) -> str:
    """Where a step's time goes on each rank."""
    rows = {}
    for rank, times in of.phases.items():
        ends = itertools.accumulate(times[phase] for phase in PHASE_NAMES)
        rows[rank] = [_Span(PHASE_NAMES[p], end - times[p], times[p]) for p, end in zip(PHASE_NAMES, ends, strict=True)]
    return _draw(f"{name}-phases", "Where a step's time goes on each rank", "milliseconds of a step, median", rows)


def one_step(of: Analysis, name: str) -> str:
    """What each rank did in a step of middle length, and when buckets were reduced."""
    steps = [e for events in of.example.values() for e in events if e.kind == Kind.STEP and e.text == of.model]
    begin, end = min(e.begin for e in steps), max(e.end for e in steps)
    rows: dict[int, list[_Span]] = {}
    for rank, events in of.example.items():
        rows[rank] = []
        for event in events:
            first, last = max(begin, event.begin), min(end, event.end)
            reduces = event.kind == Kind.REDUCED and event.lane == 1
            if last > first and (reduces or event.kind == Kind.PHASE):
                what = _REDUCTIONS if reduces else PHASE_NAMES[Phase(event.lane)]
                rows[rank].append(_Span(what, (first - begin) / 1e6, (last - first) / 1e6))
    return _draw(f"{name}-step", "One step of middle length", "milliseconds", rows)
