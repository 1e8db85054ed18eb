"""The page of a report: HTML that needs nothing else, no script among it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from syncengine.report import pictures
from syncengine.report.advice import Change, advise, changes, compare_verdict
from syncengine.report.analysis import Analysis
from syncengine.report.steps import ms_text, size_text

# What the reasons of sync_stats() mean; docs/memory.md has more.
REASONS = {
    "copied small": "Gradients of less than a page, which share pages with other tensors: cheap, and made on purpose.",
    "copied unused": "Parameters without a gradient on this rank: zeros stand in for it.",
    "copied layout": "Gradients whose elements lie in another order than their parameter's.",
    "copied graph": "The graph still holds the gradient's memory (create_graph, or a tensor that shares it).",
    "copied shared storage": "Several gradients share one storage.",
    "copied comm hook": "A communication hook gets its bucket as one flat tensor.",
    "copied compression": "Gradients that travel in 16 bits.",
    "copied bucket": "On a device a bucket is one flat piece of memory.",
    "staged setting": 'gradient_memory="torch": gradients do not lie where the peers reach them.',
    "staged numerics": 'numerics="ring" scales before it adds.',
    "staged compression": "What travels is a copy in 16 bits.",
    "staged shortage": "The arena could not grow: raise its size, or the limit on shared memory.",
    "staged elsewhere": "Autograd got that memory from somewhere else than the engine's pool.",
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #57606a; --line: #d0d7de; --card: #f6f8fa;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9da7b3; --line: #30363d;
  --card: #161b22; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 20px 16px 48px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 15px; font-weight: 600; color: var(--soft); margin: 0 0 6px; }
h2 { font-size: 20px; margin: 36px 0 10px; }
#verdict p.verdict { font-size: clamp(20px, 3vw, 28px); line-height: 1.3; font-weight: 650; margin: 0 0 14px;
  padding-left: 14px; border-left: 5px solid var(--accent); text-wrap: balance; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 26px; color: var(--soft); margin: 0; padding: 0; list-style: none; }
.facts b { color: var(--ink); font-weight: 600; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 10px; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure svg { display: block; width: 100%; max-width: 470px; height: auto; margin: 0 auto; color: var(--ink); }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
td:not(.number) { overflow-wrap: anywhere; min-width: 5.5em; }
td.number { background: linear-gradient(90deg, color-mix(in srgb, var(--accent) 25%, transparent) var(--part, 0%),
  transparent var(--part, 0%)) no-repeat 0 7px / 100% 1.5em; }
.side h1 { margin-top: 36px; }
.pictures > *, .side > * { min-width: 0; }
@media (max-width: 600px) { td, th { font-size: 13px; padding-right: 6px; } }
.note { color: var(--soft); }
.wrong { border-left: 5px solid #d55e00; padding-left: 14px; }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 0 28px; }
"""


def page_of(one: Analysis, where: Path) -> str:
    """Of one trace."""
    sections = [_verdict(one.verdict, one, where), *_sections(one, "one")]
    return _page(f"{one.model or 'syncengine'}: report", sections)


def page_of_two(before: Analysis, after: Analysis, where: Sequence[Path]) -> str:
    """Of two traces, side by side, with what has changed."""
    sections = [
        f'<section id="verdict"><h1>syncengine report: {escape(str(where[0]))}, then {escape(str(where[1]))}</h1>'
        f'<p class="verdict">{_text(compare_verdict(before, after))}</p></section>',
        f'<section id="changes"><h2>What has changed</h2>{_changes(before, after)}</section>',
    ]
    halves = [
        (_verdict(of.verdict, of, path, f"-{name}"), *_sections(of, name, f"-{name}"))
        for of, path, name in ((before, where[0], "before"), (after, where[1], "after"))
    ]
    sections += [
        '<div class="side">' + "".join(f"<div>{part}</div>" for part in half) + "</div>"
        for half in zip(*halves, strict=True)
    ]
    return _page("two traces: report", sections)


def _page(title: str, sections: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _verdict(text: str, of: Analysis, where: Path, suffix: str = "") -> str:
    waits = max((o.exposed for o in of.overlap.values()), default=0.0)
    facts = [
        ("model", of.model or "none"),
        ("ranks", str(len(of.phases))),
        ("steps", str(of.steps)),
        ("a step", ms_text(of.step_ms)),
        ("that nothing hides", ms_text(waits)),
        ("reduced a step", size_text(of.reduced_bytes)),
    ]
    items = "".join(f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in facts)
    wrong = "".join(f'<p class="wrong">{escape(text)}</p>' for text in of.went_wrong[:10])
    notes = f'<p class="note">{escape(". ".join(of.incomplete))}.</p>' if of.incomplete else ""
    return (
        f'<section id="verdict{suffix}"><h1>syncengine report: {escape(str(where))}</h1>'
        f'<p class="verdict">{_text(text)}</p>{wrong}<ul class="facts">{items}</ul>{notes}</section>'
    )


def _sections(of: Analysis, name: str, suffix: str = "") -> list[str]:
    """The same ones, in the same order, whatever there is to say."""
    drawn = [pictures.phases(of, name), pictures.one_step(of, name)] if of.steps else []
    figures = "".join(f"<figure>{picture}</figure>" for picture in drawn)
    contents = {
        "time": (
            "Where the time goes",
            f'<div class="pictures">{figures}</div>' if drawn else _note("No step to show."),
        ),
        "overlap": ("Overlap", _overlap(of)),
        "buckets": ("Buckets that nothing hides", _buckets(of)),
        "copies": ("Bytes copied", _copies(of)),
        "try": ("What to try", _advice(of)),
    }
    return [
        f'<section id="{section}{suffix}"><h2>{title}{suffix.replace("-", ", ")}</h2>{content}</section>'
        for section, (title, content) in contents.items()
    ]


def _text(text: str) -> str:
    """Numbers stay with their units."""
    return re.sub(r"(\d) (ms|%|bytes|KiB|MiB|GiB)", "\\1\N{NO-BREAK SPACE}\\2", escape(text))


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


class _Number(NamedTuple):
    """In a cell, with a bar as long as its part of what the column's longest would be."""

    text: str
    part: float = 0.0


_Rows = list[list[str | _Number]]


def _table(columns: Sequence[str], rows: _Rows) -> str:
    """Numbers are on the right."""
    kinds = ["words" if isinstance(cell, str) else "number" for cell in rows[0]]
    head = "".join(f'<th class="{kind}">{name}</th>' for kind, name in zip(kinds, columns, strict=True))
    lines = [
        "".join(
            f"<td>{_text(cell)}</td>"
            if isinstance(cell, str)
            else f'<td class="number" style="--part: {100 * cell.part:.0f}%">{_text(cell.text)}</td>'
            for cell in row
        )
        for row in rows
    ]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _overlap(of: Analysis) -> str:
    if not of.overlap:
        return _note("No bucket was reduced in these steps.")
    rows: _Rows = [
        [
            f"rank {rank}",
            *(_Number(f"{100 * part:.0f} %", part) for part in (o.achieved, o.possible)),
            *(_Number(ms_text(ms)) for ms in (o.reducing, o.exposed)),
        ]
        for rank, o in sorted(of.overlap.items())[: pictures.RANKS_SHOWN]
    ]
    head = ("", "hidden behind backward", "possible with these buckets", "reductions of a step", "not hidden")
    return _table(head, rows) + _note("What a late rank makes the others wait is not counted here.")


def _buckets(of: Analysis) -> str:
    if not of.buckets:
        return _note("None: every bucket was reduced while backward still ran.")
    most = of.buckets[0].ms
    rows: _Rows = [
        [
            ", ".join(b.parameters[:4]) + (" ..." if len(b.parameters) > 4 else ""),
            _Number(size_text(b.bytes)),
            _Number(ms_text(b.ms), b.ms / most),
            _Number(f"{b.percent:.0f} %"),
        ]
        for b in of.buckets[:8]
    ]
    return _table(("parameters", "size", "of a step", "of the steps"), rows)


def _copies(of: Analysis) -> str:
    if not of.copies:
        return _note("None: every gradient was reduced where autograd had left it.")
    most = max(of.copies.values())
    rows: _Rows = [
        [why, REASONS.get(why, ""), _Number(size_text(size), size / most)] for why, size in of.copies.items()
    ]
    return _table(("reason", "what that is", "of a step"), rows)


def _advice(of: Analysis) -> str:
    rows: _Rows = [[one.text, _Number(ms_text(one.gain)), _Number(f"{one.percent:.0f} %")] for one in advise(of)]
    if not rows:
        return _note("Nothing that would gain one percent of a step, as far as this trace shows.")
    return _table(("what", "gains about", "of a step"), rows) + _note("Estimates; they do not add up.")


def _changes(before: Analysis, after: Analysis) -> str:
    def value(change: Change, number: float) -> _Number:
        return _Number(size_text(number) if change.unit == "bytes" else f"{number:.3g} {change.unit}")

    rows: _Rows = [
        [
            change.what,
            value(change, change.before),
            value(change, change.after),
            _Number(f"{100 * change.ratio:+.0f} %" if change.before and change.unit != "%" else ""),
        ]
        for change in changes(before, after)
    ]
    return _table(("", "before", "after", "change"), rows)
