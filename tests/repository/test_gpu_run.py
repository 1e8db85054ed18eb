"""scripts/gpu_run.py, by steps of programs that pass, fail, hang, leave processes behind and are not there."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from repository import ROOT

HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
started = [subprocess.Popen(["sleep", "1000"], start_new_session=apart) for apart in (False, True)]
print("pids", os.getpid(), *(process.pid for process in started), flush=True)
def waits_for_ever(): time.sleep(1000)
waits_for_ever()
"""
LEAVES = """
import subprocess
print("pids", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
"""
STEPS = [
    ("good", 10, ["echo", "what it prints"], []),
    ("fails", 60, ["sh", "-c", "echo its last words; exit 3"], []),
    ("is-missing", 60, ["/nowhere/program"], []),
    ("hangs", 2, [sys.executable, "-c", HANGS], []),
    ("leaves", 60, [sys.executable, "-c", LEAVES], []),
    ("needs-good", 60, ["cat", "{out}/summary.txt"], ["good"]),
    ("needs-fails", 60, ["echo", "never"], ["fails", "good"]),
    ("too-late", 60, ["echo", "never"], []),
]
# In a process of its own: it ends all processes below it.
PROGRAM = """
import json, sys
from pathlib import Path
import gpu_run
out, folder, *rest = json.load(sys.stdin)
gpu_run.adopt_orphans()
steps = [gpu_run.Step(*step) for step in rest[0]]
sys.exit(0 if gpu_run.run_all(steps, Path(out), Path(folder), rest[1]) else 1)
"""


def run(folder: Path, steps: list, seconds: float) -> subprocess.CompletedProcess[str]:
    folders = [folder / "out", folder / "logs"]
    for path in folders:
        path.mkdir()
    given = [[*step[:2], [word.format(out=folders[0]) for word in step[2]], step[3]] for step in steps]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), "PYTHONFAULTHANDLER": "1", "COMMIT": "abc"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env=environ,
        input=json.dumps([*map(str, folders), given, seconds]),
    )


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The summary's lines by step, the logs, what was printed, and the limit of the step that hangs."""
    for limit in (2, 20):  # on a busy machine that step may need longer to come to where it hangs
        folder = tmp_path_factory.mktemp("gpu_run")
        steps = [(step[0], limit, *step[2:]) if step[0] == "hangs" else step for step in STEPS[:-1]]
        done = run(folder, steps, 3600.0)
        assert done.returncode == 1, done.stderr
        first, *lines = (folder / "out" / "summary.txt").read_text().splitlines()
        assert first == "commit abc"
        with tarfile.open(folder / "out" / "run.tar.gz") as tar:
            logs = {Path(name).stem: tar.extractfile(name).read().decode() for name in tar.getnames() if "." in name}
        if "in waits_for_ever" in logs["hangs"]:
            break
    return {line.split()[0]: line for line in lines}, logs, done.stdout, limit


def ended(log: str) -> bool:
    """Whether the processes that it names are gone."""
    pids = log.partition("pids ")[2].splitlines()[0].split()
    return len(pids) > 0 and not any(Path("/proc", pid).exists() for pid in pids)


def test_each_step_has_its_outcome(outcome):
    lines, _, _, limit = outcome
    ends = {name: line.partition(" s  ")[2] for name, line in lines.items()}
    assert ends == {
        "good": "passed",
        "fails": "failed: exit status 3",
        "is-missing": "not started: [Errno 2] No such file or directory: '/nowhere/program'",
        "hangs": f"hung: ended after {limit} s",
        "leaves": "passed",
        "needs-good": "passed",
        "needs-fails": "left out: needs fails",
    }


def test_each_step_has_its_log_and_bad_ones_are_printed(outcome):
    _, logs, printed, _ = outcome
    assert "what it prints" in logs["good"] and "what it prints" not in printed
    assert "its last words" in logs["fails"] and "its last words" in printed
    assert "never" not in logs


def test_what_hangs_prints_its_stack_and_nothing_lives_on(outcome):
    logs = outcome[1]
    assert "in waits_for_ever" in logs["hangs"]
    assert ended(logs["hangs"])
    assert ended(logs["leaves"])


def test_results_are_kept_after_each_step(outcome):
    assert "fails" in outcome[1]["needs-good"] and "hangs" in outcome[1]["needs-good"]


def test_a_step_without_time_is_left_out(tmp_path):
    done = run(tmp_path, [STEPS[0], STEPS[-1]], 17.0)
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert first.startswith("good") and first.endswith("passed")
    assert second.startswith("too-late") and second.endswith("left out: no time")


def test_the_steps_exist():
    """The tests and modules that steps name; and the modules find what they import."""
    program = "import gpu_run, json, pathlib; print(json.dumps(gpu_run.all_steps(pathlib.Path('results'))))"
    environ = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environ)
    names, modules = set(), set()
    for name, _, command, needs in json.loads(said.stdout):
        assert names.issuperset(needs), f"{name} needs what comes later, or is not there"
        names.add(name)
        for word in command:
            path, _, test = word.partition("::")
            if path.startswith("tests/"):
                text = (ROOT / path).read_text()
                assert not test or f"def {test.partition('[')[0]}(" in text, word
            if word.startswith("benchmarks."):
                modules.add(word)
    assert len(names) > 10 and len(modules) == 4
    program = f"import {', '.join(sorted(modules))}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
