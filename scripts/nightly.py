#!/usr/bin/env python3
"""Runs all tests, in parts: those that CI runs on each change, and those that would take too long for that.

    make nightly                 all parts; goes on after one that fails
    make nightly PART=chaos      one part, or several

A part has a limit, after which it is ended, and a log in build/nightly/. At the end each part's outcome is printed,
with its tests' last lines and the tests that failed. The exit status is 1 if a part failed. CONTRIBUTING.md has a table
of the parts. A part's variable that is in the environment goes to that part alone, and its limit grows as the number:
for a release SYNCENGINE_TEST_CHAOS=5000 and SYNCENGINE_TEST_TRIES=100.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from typing import NamedTuple

from gpu_run import ROOT, Step, adopt_orphans, end_all, run

LOGS = ROOT / "build" / "nightly"
PYTEST = ".venv/bin/python -m pytest -q"
# Four workers, since a third of what tests do is waiting. A file's cases may run beside each other: some only wait.
# Stories of chaos compute all the time, and take much longer beside each other.
IN_FOUR = f"{PYTEST} --numprocesses 4 --dist worksteal"
PROGRAMS = [
    "tests/parallel/test_random_programs.py",
    "tests/sharded/test_sharded_programs.py",
    "tests/torch_backend/test_torch_backend_programs.py",
]
CHAOS = "tests/faults/test_chaos.py"
IN_OTHER_PARTS = " ".join(f"--ignore={file}" for file in [*PROGRAMS, CHAOS])
# Lines in which pytest, the core's tests and make say how tests ended, and why a part failed.
SAYS = re.compile(r"(FAILED|ERROR|HUNG) .*|\d+ (passed|failed|skipped).*|make.*\*\*\*.*|.*: skipped; .*|not among .*")


class Part(NamedTuple):
    """A shell command, and the variables that it gets."""

    minutes: int  # that it takes on a quiet machine of two cores; its limit is three times that
    command: str
    variables: dict[str, str] = {}  # numbers  # noqa: RUF012 (none is changed)


PARTS = {
    "lint": Part(1, "make lint"),
    "build": Part(3, "make build-for-tests .venv-openmpi/ready .venv-mpich/ready"),
    "docs": Part(1, "make docs"),
    "core": Part(14, "make core-test sanitize pages"),
    "tests": Part(35, f"{IN_FOUR} {IN_OTHER_PARTS} -m 'not alone'"),
    "alone": Part(2, f"{PYTEST} -m 'alone and not gpu'"),
    "programs": Part(8, f"{IN_FOUR} {' '.join(PROGRAMS)}", {"SYNCENGINE_TEST_PROGRAMS": "30"}),
    "kills": Part(6, f"{IN_FOUR} -k random tests/sharded/test_sharded_kills.py tests/faults/test_elastic.py",
                  {"SYNCENGINE_TEST_KILLS": "200"}),
    "ends": Part(4, f"{IN_FOUR} tests/faults/test_ends.py -k 'exit-raises or launchers and raises or spawn_shows'",
                 {"SYNCENGINE_TEST_TRIES": "8"}),
    "chaos": Part(20, f"{PYTEST} {CHAOS}", {"SYNCENGINE_TEST_CHAOS": "2000"}),
    "garbage": Part(7, "make -C tests/core FLAVORS=asan build && export TEST_DEADLINE=20000 && "
                    "printf '%s\\n' fuzz_messages_to_the_first fuzz_messages_to_the_last scribbles | "
                    "xargs -P 2 -n 1 build/core-asan/core_tests",
                    {"SYNCENGINE_TEST_MESSAGES": "4000000", "SYNCENGINE_TEST_SCRIBBLES": "20000"}),
    "frameworks": Part(13, "make test-integrations"),
    "cuda": Part(8, "make cuda-check cuda-torch-check"),
    "arm": Part(13, "make arm"),
    "loaded": Part(14, "trap 'kill $(jobs -p)' EXIT; for _ in 1 2 3 4; do (while :; do :; done) & done; make test"),
}  # fmt: skip


def report(name: str, outcome: str, seconds: float) -> str:
    """The lines of a part's log about its tests, above its outcome."""
    text = (LOGS / f"{name}.log").read_text(errors="replace")
    said = [line for line in text.splitlines() if SAYS.fullmatch(line.strip())]
    return "\n".join([*(f"    {line[:300]}" for line in said), f"{name:12}{seconds / 60:6.1f} min  {outcome}"])


def main() -> int:
    """Runs the parts that the command line names, or all."""
    if unknown := set(sys.argv[1:]) - set(PARTS):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    reports, failed = [], False
    given = {key: os.environ.pop(key) for part in PARTS.values() for key in part.variables if key in os.environ}
    for name in sys.argv[1:] or PARTS:
        part, begin = PARTS[name], time.monotonic()
        variables = {key: given.get(key, usual) for key, usual in part.variables.items()}
        os.environ.update(variables)
        times = max([1.0, *(int(variables[key]) / int(usual) for key, usual in part.variables.items())])
        step = Step(name, round(part.minutes * 180 * times), ["bash", "-c", part.command])
        print(f"{name}: {shlex.join(step.command)}", flush=True)
        outcome = run(step, step.seconds, LOGS / f"{name}.log", spared=0)
        for key in part.variables:
            del os.environ[key]
        failed |= outcome != "passed"
        reports.append(report(name, outcome, time.monotonic() - begin))
        print(reports[-1], flush=True)
    end_all(0)
    summary = "\n".join(reports)
    (LOGS / "summary.txt").write_text(summary + "\n")
    print(f"\n{summary}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
