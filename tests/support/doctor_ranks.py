"""`syncengine doctor` on ranks of the pool, which have torch imported: each is broken or slowed as a test wants."""

import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from pool import RankPool
from programs import Result

PATIENT = ("--timeout", "120")  # a loaded machine starts ranks late


def report_of(result: Result) -> dict[str, Any]:
    """The JSON on stdout, whose exit code must be the process's."""
    assert result.stdout.startswith("{"), result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["exit_code"] == result.returncode, result.stderr
    return report


def finding(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The only one of that name."""
    found = [one for one in report["findings"] if one["name"] == name]
    assert len(found) == 1, report["findings"]
    return found[0]


def examine(environs: list[dict[str, str]], prepare: Callable[..., Any] | None, *arguments: str) -> tuple[int, Any]:
    """The command on this rank, in this process, after `prepare()`: its exit code, and what it printed.

    Its self-test is short: how long it is elsewhere, test_launched.py knows.
    """
    from syncengine.__main__ import main
    from syncengine.doctor import meeting, self_test

    self_test.SECONDS, meeting._LEAVE_TIMEOUT = 0.02, 0.5  # the pool's ranks meet in a file, which nobody serves
    os.environ.update(environs[int(os.environ["RANK"])] if environs else {})
    if prepare is not None:
        prepare()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(["doctor", "--json", *PATIENT, *arguments])
    return code, json.loads(said.getvalue()) if said.getvalue() else None


def examined(
    pool: RankPool,
    code: int,
    *arguments: str,
    environs: Sequence[dict[str, str]] = (),
    prepare: Callable[..., Any] | None = None,
    world: int = 2,
) -> dict[str, Any]:
    """Rank 0's report; only this rank has one, and only it exits with `code`."""
    with pool.spawn_ranks(examine, list(environs), prepare, *arguments, world=world, settings=None) as ranks:
        (own, report), *others = [rank.result(120) for rank in ranks]
    assert others == [(0, None)] * (world - 1)
    assert own == report["exit_code"] == code, report["findings"]
    return report
