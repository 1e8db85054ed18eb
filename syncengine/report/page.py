"""The page of a report: one HTML file without scripts, which needs no other file. page.html is its template."""

from collections.abc import Sequence
from pathlib import Path

from syncengine.errors import InvalidUsage
from syncengine.report.advice import advise, changes, compare_verdict
from syncengine.report.analysis import RANKS_SHOWN, Analysis, ms_text

# Explanations of the reasons that sync_stats() gives; docs/memory.md has more.
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


def page_of(analyses: Sequence[Analysis], directories: Sequence[Path]) -> str:
    """The page of one trace; or of two traces, side by side, with the changes between them."""
    try:
        import jinja2

        from syncengine.report import pictures
    except ModuleNotFoundError as error:
        raise InvalidUsage("the page needs matplotlib and jinja2: pip install matplotlib jinja2") from error
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(ms=ms_text, percent=lambda part: f"{100 * part:.0f} %")
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    traces = zip(analyses, directories, ("before", "after"), pictures.draw(analyses), strict=False)
    halves = [
        {"of": of, "where": where, "name": name, "advice": advise(of), "pictures": drawn}
        for of, where, name, drawn in traces
    ]
    compared = {"verdict": compare_verdict(*analyses), "changes": changes(*analyses)} if len(analyses) > 1 else None
    return template.render(halves=halves, compared=compared, reasons=REASONS, most_ranks=RANKS_SHOWN)
