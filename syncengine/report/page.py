"""The page of a report: HTML that needs nothing else, no script among it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

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
td.number, th.number { text-align: right; white-space: nowrap; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 16px 24px;
  align-items: start; }
.pair p { margin: 0; }
td:not(.number) { overflow-wrap: anywhere; min-width: 5.5em; }
.pictures > *, .pair > *, .side > * { min-width: 0; }
.note { color: var(--soft); }
@media (max-width: 600px) { .wide { display: none; } }
.wrong { border-left: 5px solid #d55e00; padding-left: 14px; }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 0 28px; }
"""


def page_of(one: Analysis, where: Path) -> str:
    """Of one trace."""
    sections = [_verdict(one.verdict, one, where), *_sections(one, "one")]
    return _page(f"{one.model or 'syncengine'}: report", sections)


def page_of_two(before: Analysis, after: Analysis, where: Sequence[Path]) -> str:
    """Of two traces, side by side, with what has changed."""
    rows = "".join(_row(change) for change in changes(before, after))
    head = '<tr><th></th><th class="number">before</th><th class="number">after</th><th class="number">change</th></tr>'
    sections = [
        f'<section id="verdict"><h1>syncengine report: {escape(str(where[0]))}, then {escape(str(where[1]))}</h1>'
        f'<p class="verdict">{_text(compare_verdict(before, after))}</p></section>',
        f'<section id="changes"><h2>What has changed</h2><table>{head}{rows}</table></section>',
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
    notes = f'<p class="note">Incomplete: {escape("; ".join(of.incomplete))}.</p>' if of.incomplete else ""
    return (
        f'<section id="verdict{suffix}"><h1>syncengine report: {escape(str(where))}</h1>'
        f'<p class="verdict">{_text(text)}</p>{wrong}<ul class="facts">{items}</ul>{notes}</section>'
    )


def _sections(of: Analysis, name: str, suffix: str = "") -> list[str]:
    """The same ones, in the same order, whatever there is to say."""
    return [
        _section(
            f"time{suffix}",
            "Where the time goes",
            _figures(
                [pictures.phases(of, name), pictures.one_step(of, name), pictures.lateness(of, name)]
                if of.steps
                else []
            ),
        ),
        _section(f"overlap{suffix}", "Overlap", _overlap(of, name)),
        _section(f"buckets{suffix}", "Buckets that nothing hides", _buckets(of, name)),
        _section(f"copies{suffix}", "Bytes copied", _copies(of, name)),
        _section(f"try{suffix}", "What to try", _advice(of)),
    ]


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{content}</section>'


def _figures(drawn: Sequence[str]) -> str:
    if not drawn:
        return '<p class="note">There is no step to show.</p>'
    return '<div class="pictures">' + "".join(f"<figure>{picture}</figure>" for picture in drawn) + "</div>"


def _pair(picture: str, words: str) -> str:
    return f'<div class="pair"><figure>{picture}</figure><div>{words}</div></div>'


def _text(text: str) -> str:
    """Numbers stay with their units."""
    return re.sub(r"(\d) (ms|%|bytes|KiB|MiB|GiB)", "\\1\N{NO-BREAK SPACE}\\2", escape(text))


def _overlap(of: Analysis, name: str) -> str:
    if not of.overlap:
        return '<p class="note">No bucket was reduced in these steps.</p>'
    worst = max(of.overlap.values(), key=lambda o: o.exposed)
    took, exposed, least = ms_text(worst.reducing), ms_text(worst.exposed), ms_text(worst.least_exposed)
    text = (
        f"Reductions take {took} of a step on the rank that waits longest; backward does not hide {exposed} of that. "
    )
    text += f"With these buckets it could be {least}: the last one can begin only when backward has ended. "
    text += "What a late rank makes the others wait is not counted here."
    return _pair(pictures.overlap(of.overlap, name), f"<p>{_text(text)}</p>")


def _buckets(of: Analysis, name: str) -> str:
    if not of.buckets:
        return '<p class="note">None: every bucket was reduced while backward still ran.</p>'
    rows = "".join(
        f'<tr><td class="wide">{b.index}</td><td>{escape(", ".join(b.parameters[:4]))}'
        f"{' ...' if len(b.parameters) > 4 else ''}</td>"
        f'<td class="number">{size_text(b.bytes)}</td><td class="number">{ms_text(b.ms)}</td>'
        f'<td class="number wide">{b.percent:.0f} %</td></tr>'
        for b in of.buckets[:8]
    )
    head = (
        '<tr><th class="wide">bucket</th><th>parameters</th><th class="number">size</th>'
        '<th class="number">of a step</th><th class="number wide">steps</th></tr>'
    )
    return _pair(pictures.buckets(of.buckets, name), f"<table>{head}{rows}</table>")


def _copies(of: Analysis, name: str) -> str:
    if not of.copies:
        return '<p class="note">None: every gradient was reduced where autograd had left it.</p>'
    rows = "".join(
        f"<tr><td>{escape(reason)}</td><td>{escape(REASONS.get(reason, ''))}</td>"
        f'<td class="number">{size_text(size)}</td></tr>'
        for reason, size in of.copies.items()
    )
    head = '<tr><th>reason</th><th>what that is</th><th class="number">of a step</th></tr>'
    return _pair(pictures.copies(of.copies, name), f"<table>{head}{rows}</table>")


def _advice(of: Analysis) -> str:
    advice = advise(of)
    if not advice:
        return '<p class="note">Nothing that would gain one percent of a step, as far as this trace shows.</p>'
    rows = "".join(
        f'<tr><td>{_text(one.text)}</td><td class="number">{ms_text(one.gain)}</td>'
        f'<td class="number">{one.percent:.0f} %</td></tr>'
        for one in advice
    )
    head = '<tr><th>what</th><th class="number">gains about</th><th class="number">of a step</th></tr>'
    return f'<table>{head}{rows}</table><p class="note">Estimates from this trace; they do not add up.</p>'


def _row(change: Change) -> str:
    def value(number: float) -> str:
        return size_text(number) if change.unit == "bytes" else f"{number:.3g} {change.unit}"

    ratio = f"{100 * change.ratio:+.0f} %" if change.before and change.unit != "%" else ""
    return (
        f'<tr><td>{escape(change.what)}</td><td class="number">{value(change.before)}</td>'
        f'<td class="number">{value(change.after)}</td><td class="number">{ratio}</td></tr>'
    )
