"""The pictures of a report, as SVG that goes into a page: made by matplotlib, in colours that colour-blind people tell
apart (Okabe and Ito). Texts and lines have the page's own colour, so a dark page stays legible."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncengine.errors import InvalidUsage
from syncengine.report.analysis import Analysis, ExposedBucket, Overlap
from syncengine.report.steps import PHASE_NAMES, ms_text, size_text
from syncengine.tracing import Event, Kind, Phase

_COLORS = {
    Phase.INPUT: "#E69F00",
    Phase.FORWARD: "#56B4E9",
    Phase.BACKWARD: "#0072B2",
    Phase.WAIT: "#D55E00",
    Phase.OPTIMIZER: "#009E73",
}
_REDUCTION = "#CC79A7"
_ORDER = (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.WAIT, Phase.OPTIMIZER)
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
_RANKS_SHOWN = 16


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidUsage("the report's pictures need matplotlib: pip install 'syncengine[report]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw(name: str, height: float, paint: Callable[[Any], None], described: str) -> str:
    pyplot = _pyplot()
    with pyplot.rc_context({**_STYLE, "svg.hashsalt": name}):  # the same picture each time
        figure, axes = pyplot.subplots(figsize=(_WIDTH, height))
        paint(axes)
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
    return text.replace("<svg ", f'<svg role="img" aria-label="{described}" ', 1)


def _bars(axes: Any, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def phases(of: Analysis, name: str) -> str:
    """Where a step's time goes on each rank."""
    ranks = sorted(of.phases)[:_RANKS_SHOWN]

    def paint(axes: Any) -> None:
        left = [0.0] * len(ranks)
        handles = []
        for phase in _ORDER:
            width = [of.phases[rank][phase] for rank in ranks]
            handles.append(
                axes.barh(
                    range(len(ranks)),
                    width,
                    left=left,
                    color=_COLORS[phase],
                    height=0.7,
                    hatch="///" if phase == Phase.WAIT else None,
                    edgecolor="white",
                    linewidth=0.5,
                )
            )
            left = [a + b for a, b in zip(left, width, strict=True)]
        _bars(axes, [f"rank {rank}" for rank in ranks])
        axes.set_xlabel("milliseconds of a step, median")
        axes.set_title("Where a step's time goes on each rank")
        axes.figure.legend(
            handles,
            [PHASE_NAMES[p] for p in _ORDER],
            loc="outside lower left",
            ncols=3,
            handlelength=1.2,
            columnspacing=1.2,
        )

    return _draw(f"{name}-phases", 1.5 + 0.3 * len(ranks), paint, "Bars: milliseconds of each phase on each rank")


def lateness(of: Analysis, name: str) -> str:
    """How late each rank is, step by step."""
    markers = "osD^vP*X"
    shades = list(_COLORS.values())

    def paint(axes: Any) -> None:
        for i, rank in enumerate(sorted(of.lateness)[:8]):
            axes.plot(
                range(1, of.steps + 1),
                of.lateness[rank],
                color=shades[i % 5],
                marker=markers[i],
                markersize=3,
                linewidth=1,
                markevery=max(1, of.steps // 25),
                label=f"rank {rank}",
            )
        axes.axhline(0.1 * of.step_ms, color=_INK, linewidth=0.8, linestyle=":", label="10 % of a step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step of the trace")
        axes.set_ylabel("milliseconds")
        axes.set_title("How much later than the fastest rank each one is")
        axes.figure.legend(loc="outside lower left", ncols=4, handlelength=1.5, columnspacing=1.2)

    return _draw(f"{name}-lateness", 2.9, paint, "Lines: lateness of each rank by step")


def one_step(of: Analysis, name: str) -> str:
    """What each rank did in a step of middle length, and when buckets were reduced."""
    ranks = sorted(of.example)[:_RANKS_SHOWN]
    begin = min(e.begin for rank in ranks for e in of.example[rank] if _is_step(e, of.model))
    end = max(e.end for rank in ranks for e in of.example[rank] if _is_step(e, of.model))

    def spans(events: Sequence[Event], chosen: Callable[[Event], bool]) -> list[tuple[float, float]]:
        cut = [(max(begin, e.begin), min(end, e.end)) for e in events if chosen(e)]
        return [((a - begin) / 1e6, (b - a) / 1e6) for a, b in cut if b > a]

    def paint(axes: Any) -> None:
        handles: dict[str, Any] = {}
        for i, rank in enumerate(ranks):
            events = of.example[rank]
            for phase in _ORDER:
                of_phase = spans(events, lambda e, p=phase: e.kind == Kind.PHASE and e.lane == p)  # type: ignore[misc]
                handles[PHASE_NAMES[phase]] = axes.broken_barh(
                    of_phase,
                    (i - 0.36, 0.42),
                    facecolors=_COLORS[phase],
                    hatch="///" if phase == Phase.WAIT else None,
                    edgecolor="white",
                    linewidth=0.3,
                )
            reduced = spans(events, lambda e: e.kind == Kind.REDUCED and e.lane == 1)
            handles["reductions"] = axes.broken_barh(
                reduced, (i + 0.1, 0.24), facecolors=_REDUCTION, edgecolor="white", linewidth=0.3
            )
        _bars(axes, [f"rank {rank}" for rank in ranks])
        axes.set_xlim(0, (end - begin) / 1e6)
        axes.set_xlabel("milliseconds")
        axes.set_title("One step of middle length")
        axes.figure.legend(
            handles.values(), handles.keys(), loc="outside lower left", ncols=3, handlelength=1.2, columnspacing=1.2
        )

    return _draw(f"{name}-step", 1.5 + 0.42 * len(ranks), paint, "A time line of one step: phases and reductions")


def overlap(of: Mapping[int, Overlap], name: str) -> str:
    """How much of the reductions is hidden behind backward, and could be."""
    ranks = sorted(of)[:_RANKS_SHOWN]

    def paint(axes: Any) -> None:
        places = range(len(ranks))
        a = axes.barh([p - 0.18 for p in places], [100 * of[r].achieved for r in ranks], height=0.34, color="#0072B2")
        b = axes.barh([p + 0.18 for p in places], [100 * of[r].possible for r in ranks], height=0.34, color="#56B4E9")
        for bars in (a, b):
            axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=8)
        _bars(axes, [f"rank {rank}" for rank in ranks])
        axes.set_xlim(0, 115)
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.set_xlabel("% of the time that reductions take")
        axes.set_title("Hidden behind backward")
        axes.figure.legend(
            [a, b], ["achieved", "possible with these buckets"], loc="outside lower left", ncols=2, handlelength=1.2
        )

    return _draw(f"{name}-overlap", 1.4 + 0.4 * len(ranks), paint, "Bars: overlap achieved and possible by rank")


def buckets(of: Sequence[ExposedBucket], name: str) -> str:
    """Those whose reduction nothing hides, by the names of their parameters."""
    shown = of[:8]

    def paint(axes: Any) -> None:
        bars = axes.barh(range(len(shown)), [b.ms for b in shown], height=0.3, color="#D55E00")
        axes.bar_label(bars, [ms_text(b.ms) for b in shown], padding=3, fontsize=8)
        # Names are long: above their bars, not beside them.
        for i, bucket in enumerate(shown):
            axes.annotate(
                _short(bucket.name), (0, i - 0.2), xytext=(0, 1), textcoords="offset points", fontsize=8.5, va="bottom"
            )
        axes.set_yticks([])
        axes.set_ylim(len(shown) - 0.6, -0.75)
        axes.set_xlim(0, 1.2 * max(b.ms for b in shown))
        axes.set_xlabel("milliseconds of a step, where it is longest")
        axes.set_title("Buckets that nothing hides")

    return _draw(f"{name}-buckets", 0.9 + 0.45 * len(shown), paint, "Bars: milliseconds that each bucket is exposed")


def copies(of: Mapping[str, float], name: str) -> str:
    """Bytes that are copied, by the reason."""
    shown = list(of.items())[:8]

    def paint(axes: Any) -> None:
        unit, name_of_unit = (2**20, "MiB") if max(size for _, size in shown) >= 2**20 else (2**10, "KiB")
        bars = axes.barh(range(len(shown)), [size / unit for _, size in shown], height=0.6, color="#E69F00")
        axes.bar_label(bars, [size_text(size) for _, size in shown], padding=3, fontsize=8)
        _bars(axes, [reason for reason, _ in shown])
        axes.set_xlim(0, 1.25 * max(size for _, size in shown) / unit)
        axes.set_xlabel(f"{name_of_unit} of a step, on the rank that copies most")
        axes.set_title("Bytes copied, and why")

    return _draw(f"{name}-copies", 0.9 + 0.32 * len(shown), paint, "Bars: MiB copied by reason")


def _is_step(event: Event, model: str) -> bool:
    return event.kind == Kind.STEP and event.text == model


def _short(text: str, most: int = 56) -> str:
    return text if len(text) <= most else "..." + text[3 - most :]
