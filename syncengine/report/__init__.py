"""`syncengine report`: makes one page of a trace, the verdict first."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from syncengine.errors import InvalidUsage
from syncengine.report.advice import advise, changes, compare_verdict
from syncengine.report.analysis import Analysis, analyze
from syncengine.report.page import page_of
from syncengine.tracing import read

__all__ = ["add_report", "analyze", "write_report"]


def add_report(commands: Any) -> None:
    """Adds the command ``syncengine report`` to those of the parser."""
    parser = commands.add_parser(
        "report",
        help="one page of where a traced run's time goes",
        description="Reads the traces that SYNCENGINE_TRACE=DIR or syncengine.trace(DIR) left, and writes a page: who "
        "is late, what nothing hides, what to try. Of two directories: what has changed. Exit code: 0, or 2 if there "
        "is no trace.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", type=Path, help="of a trace; or two, before and after")
    parser.add_argument(
        "--out", type=Path, help="the page; default: report.html in DIR; of two, compared.html in the last"
    )
    parser.add_argument("--json", action="store_true", help="print what the page says as JSON, and write none")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, _arguments: Sequence[str]) -> int:
    """Writes the page, or prints JSON. Returns the exit code."""
    directories: list[Path] = options.directories
    if len(directories) > 2:
        raise InvalidUsage(f"give one directory or two, not {len(directories)}")
    if options.json:
        print(json.dumps(_as_dict([analyze(read(directory)) for directory in directories]), indent=2))
    else:
        print(*write_report(*directories, out=options.out), sep="\n")
    return 0


def write_report(*directories: Path, out: Path | None = None) -> tuple[str, Path]:
    """Writes the page of one trace, or of two. Returns its verdict and path. Raises ``InvalidUsage`` if it can't."""
    analyses = [analyze(read(directory)) for directory in directories]
    out = out or directories[-1] / ("report.html" if len(directories) == 1 else "compared.html")
    page = page_of(analyses, directories)
    try:
        with out.open("w", encoding="utf-8") as file:
            try:
                file.write(page)
                file.flush()
            except OSError:
                if out.is_file():
                    out.unlink()  # a part of it
                raise
    except OSError as error:
        raise InvalidUsage(f"{out} can't be written: {error.strerror}: make room, or give another path") from error
    return analyses[0].verdict if len(analyses) == 1 else compare_verdict(*analyses), out


def _as_dict(analyses: Sequence[Analysis]) -> dict[str, Any]:
    if len(analyses) == 1:
        return {**analyses[0].as_dict(), "advice": [vars(one) for one in advise(analyses[0])]}
    before, after = analyses
    return {
        "verdict": compare_verdict(before, after),
        "changes": [{**vars(change), "ratio": change.ratio} for change in changes(before, after)],
        "before": _as_dict([before]),
        "after": _as_dict([after]),
    }
