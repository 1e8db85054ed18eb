"""What `syncengine doctor` makes of facts, findings and the self-test: its report, and its exit code."""

import argparse
import importlib.metadata
import io
import json
import os
import platform
import re
import resource
import socket
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_facts import MIB, broken, facts, on, said
from repository import ROOT

import syncengine
from syncengine import _C
from syncengine.__main__ import main
from syncengine.config import Config
from syncengine.doctor import examination
from syncengine.doctor.checks import FATAL, NOTE, WARNING, Finding, find_all, size_text, split_remedy
from syncengine.doctor.facts import collect_facts
from syncengine.doctor.report import HOW_TO_START, print_report
from syncengine.doctor.rescue import _arguments_of_command
from syncengine.errors import InvalidUsage, name_ranks
from syncengine.launch import Launch
from syncengine.launch.environment import detect

# --- What the self-test has shown

GOOD = {"wrong": {}}
PEER = "see what that rank said before it ended"


def raised(kind: str, error: str) -> dict[str, str]:
    return {"kind": kind, "error": error}


@pytest.mark.parametrize(
    ("outcomes", "missing", "several_hosts", "expected"),
    [
        ({0: GOOD, 1: GOOD}, set(), True, []),
        (
            {0: GOOD, 1: {"wrong": {"all_gather": 3, "broadcast": 1}}},
            set(),
            True,
            [
                "fatal, wrong results of [1]: rank 1 got wrong elements: 3 of all_gather, 1 of broadcast -> test this "
                "host's memory and network; on healthy ones it is a bug of syncengine: report it"
            ],
        ),
        (
            {0: raised("PeerLost", "rank 2 died"), 1: raised("PeerLost", "rank 2 died")},
            {2},
            False,
            [
                f"fatal, self-test of [0, 1]: ranks 0, 1: PeerLost: rank 2 died -> {PEER}",
                f"fatal, self-test of [2]: rank 2 did not come back from the self-test -> {PEER}",
            ],
        ),
        (
            {0: raised("Timeout", "too late: x"), 1: raised("Aborted", "rank 0 failed: x")},
            set(),
            False,
            [
                "fatal, self-test of [0]: rank 0: Timeout: too late: x -> see what those ranks are doing",
                "fatal, self-test of [1]: rank 1: Aborted: rank 0 failed: x -> mend what that rank names",
            ],
        ),
        *[
            ({0: GOOD, 1: raised(kind, "x: y")}, set(), True, [f"fatal, self-test of [1]: rank 1: {kind}: {what}"])
            for kind, what in (
                ("Timeout", f"x: y -> {examination._PORTS}"),
                ("PeerLost", f"x: y -> {examination._PORTS}"),
                ("Aborted", "x: y -> mend what that rank names"),
                ("InvalidUsage", "x -> y"),
            )
        ],
    ],
)
def test_failures_of_the_self_test(outcomes: Any, missing: set[int], several_hosts: bool, expected: list[str]):
    assert list(map(said, examination._failures(outcomes, missing, several_hosts))) == expected
    assert "open all ports between the hosts" in examination._PORTS


# --- Facts


def test_facts_of_this_process():
    """Beside what others say of it."""
    found = json.loads(json.dumps(collect_facts(Launch("single", 0, 1), "")))
    extension, cpus, memory = found["extension"], found["cpus"], found["memory"]
    assert (found["rank"], found["world_size"], found["launcher"], found["pid"]) == (0, 1, "single", os.getpid())
    assert found["host"] == socket.gethostname()
    assert (extension["build"], extension["file"]) == (_C.build_id, _C.__file__)
    assert (extension["has_cuda"], extension["has_test_hooks"]) == (_C.has_cuda, _C.has_test_hooks)
    assert extension["instruction_set"] == _C.instruction_set()
    assert ["lo", "127.0.0.1"] in extension["interfaces"]
    assert extension["host_key"] == _C.host_key("")
    assert extension["death_notices"] == ["robust futexes", "process handles"]
    assert extension["shared_memory"] is None  # no error, and nothing to say
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["syncengine"] == syncengine.__version__
    assert cpus["affinity"] == sorted(os.sched_getaffinity(0))
    assert (cpus["of_machine"], cpus["threads"]) == (os.cpu_count(), torch.get_num_threads())
    assert 1 <= cpus["available"] <= len(cpus["affinity"])
    assert 0 < memory["available"] <= memory["total"] <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    assert memory["address_space"] == (None if space == resource.RLIM_INFINITY else space)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found["descriptors"]["limit"] == limit
    assert 3 <= found["descriptors"]["open"] <= len(list(Path("/proc/self/fd").iterdir()))
    assert found["settings"] == {**Config().shared(), "interface": "", "has_secret": False}
    assert found["cuda"]["version"] == torch.version.cuda
    assert len(found["cuda"]["devices"]) == torch.cuda.device_count()


def test_another_projects_distribution_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The one that has our import's name on the package index."""
    about = tmp_path / "syncengine-0.3.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: syncengine\nVersion: 0.3.0\n")
    found = json.loads(json.dumps(collect_facts(Launch("single", 0, 1), "")))
    assert [one.name for one in find_all([found]) if one.name == "two distributions"] == []
    monkeypatch.syspath_prepend(tmp_path)
    found = json.loads(json.dumps(collect_facts(Launch("single", 0, 1), "")))
    assert found["versions"]["syncengine"] == syncengine.__version__
    (one,) = [one for one in find_all([found]) if one.name == "two distributions"]
    assert (one.severity, one.ranks) == ("fatal", [0])
    assert "syncengine 0.3.0 is installed beside syncengine-torch" in one.text
    assert one.remedy.startswith("pip uninstall syncengine syncengine-torch")


def test_facts_of_the_entry_point(monkeypatch: pytest.MonkeyPatch):
    """As torch reads its switch, and pip's metadata says it."""

    def found() -> object:
        return collect_facts(Launch("single", 0, 1), "")["entry_point"]

    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    assert found() == {"installed": True, "switched_off": False}
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert found() == {"installed": False, "switched_off": True}


def test_facts_without_the_extension(monkeypatch: pytest.MonkeyPatch):
    """As far as Python knows them; they are enough for all checks."""
    monkeypatch.setitem(sys.modules, "syncengine._C", None)
    monkeypatch.delattr(syncengine, "_C")
    found = collect_facts(Launch("single", 0, 1), "no such file: install it")
    assert found["extension"] == {"error": "no such file: install it"}
    assert found["cpus"]["available"] == len(os.sched_getaffinity(0))
    assert found["memory"].keys() == {"address_space"}
    assert found["descriptors"] == {"limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    assert [one.name for one in find_all([found]) if one.severity == FATAL] == ["extension"]


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SYNCENGINE_SECRET", "sesame, sixteen bytes")
    monkeypatch.setenv("SYNCENGINE_SILENCE", "7")
    monkeypatch.setenv("SYNCENGINE_TEST_SOMETHING", "1")
    monkeypatch.setenv("SYNCENGINE_SOCKET", "2")
    found = collect_facts(Launch("single", 0, 1), "")
    assert "sesame" not in json.dumps(found)
    assert found["variables"]["SYNCENGINE_SECRET"] == "(set)"
    assert found["settings"]["has_secret"]
    assert found["variables"]["SYNCENGINE_SILENCE"] == "7"
    assert found["unknown_variables"] == {"SYNCENGINE_SOCKET": "SYNCENGINE_SOCKETS"}


def test_every_documented_variable_is_known(monkeypatch: pytest.MonkeyPatch):
    names = set(re.findall(r"SYNCENGINE_[A-Z_]+", (ROOT / "docs/configuration.md").read_text()))
    assert {"SYNCENGINE_PATCH", "SYNCENGINE_SECRET_FILE", "SYNCENGINE_TIMEOUT"} < names
    for name in names:
        monkeypatch.setenv(name, "1")
    assert collect_facts(Launch("single", 0, 1), "")["unknown_variables"] == {}


def test_a_part_that_fails_is_a_fact(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: 1 / 0)
    found = collect_facts(Launch("single", 0, 1), "it can't be loaded: install it again")
    assert found["memory"] == {"error": "ZeroDivisionError: division by zero"}
    assert found["extension"] == {"error": "it can't be loaded: install it again"}
    assert find_all([found])[0].remedy.endswith(": install it again")


# --- The report


def printed(everyone: list[dict[str, Any]], findings: list[Finding], launch: Launch, as_json: bool = False) -> str:
    with redirect_stdout(io.StringIO()) as said:
        print_report(everyone, {}, findings, 2, launch, "", as_json)
    return said.getvalue()


def test_the_text_of_a_report():
    """One line where ranks are alike; numbered findings, and notes behind them."""
    everyone = [facts(0), facts(1), on("b", 2, cpus={"threads": 3}), broken(3, "versions", "lost", "b")]
    findings = [
        Finding("x", FATAL, [0], "first", "do this"),
        Finding("y", WARNING, [1], "second", "do that"),
        Finding("z", NOTE, [1], "third", "perhaps this"),
    ]
    lines = printed(everyone, findings, Launch("torchrun", 0, 4)).splitlines()
    assert lines[0] == "syncengine doctor: 4 ranks on 2 hosts, started by torchrun"
    assert "  versions     ranks 0-2: syncengine 1 (build 1), torch 2, Python 3" in lines
    assert "               rank 3: lost" in lines
    assert "  CPUs         ranks 0, 1, 3: 4 of 4, 1 thread, kernels avx2" in lines
    assert "               rank 2: 4 of 4, 3 threads, kernels avx2" in lines
    assert "  memory       a: 8.0 GiB available of 16.0 GiB" in lines
    assert "  descriptors  a: 10 open, ulimit -n 1024" in lines
    assert "               b: lo 127.0.0.1" in lines
    assert "  self-test    not run: see the findings" in lines
    assert lines[lines.index("2 findings:") :] == [
        "2 findings:",
        "1. first (training can't run)",
        "   remedy: do this",
        "2. second",
        "   remedy: do that",
        "",
        "note: third",
        "   perhaps this",
    ]


def test_a_report_as_json():
    (found,) = findings = [Finding("x", FATAL, [0], "first", "do this")]
    report = json.loads(printed([facts(0)], findings, Launch("mpi", 0, 1), as_json=True))
    assert (report["status"], report["exit_code"], report["launcher"]) == ("can't run", 2, "mpi")
    assert report["findings"] == [asdict(found)]
    assert report["ranks"] == [facts(0)]


def test_one_process_is_told_how_to_start_ranks():
    assert printed([facts(0)], [], Launch("single", 0, 1)).endswith(f"\n0 findings\n\n{HOW_TO_START}\n")
    for command in ("torchrun --nproc-per-node 2 -m syncengine doctor", "syncengine doctor --ranks 2"):
        assert command in HOW_TO_START


@pytest.mark.parametrize(
    ("severities", "status", "code"),
    [([], "fine", 0), ([NOTE], "fine", 0), ([NOTE, WARNING], "findings", 1), ([WARNING, FATAL], "can't run", 2)],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, severities: list[str], status: str, code: int):
    """Of one rank. What is fatal spares the self-test."""
    tested = []
    monkeypatch.setattr(examination, "_self_test", lambda timeout: tested.append(timeout) or GOOD)
    found = [Finding("x", severity, [0], "text", "remedy") for severity in severities]
    monkeypatch.setattr(examination, "find_all", lambda everyone, also: found)
    monkeypatch.setattr("syncengine.launch.find_launch", lambda: Launch("torchrun", 0, 1))
    options = argparse.Namespace(json=True, ranks=None, timeout=3.0)
    with redirect_stdout(io.StringIO()) as said:
        assert examination.examine(options, []) == code
    report = json.loads(said.getvalue())
    assert (report["status"], report["exit_code"]) == (status, code)
    assert tested == ([] if FATAL in severities else [3.0])


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "5", "WORLD_SIZE": "2"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "2"},
    ],
)
def test_a_launchers_errors_have_a_remedy(environ: dict[str, str]):
    """Which is an imperative, not the rest of the sentence."""
    with pytest.raises(InvalidUsage) as raised:
        detect(environ)
    what, remedy = split_remedy(str(raised.value))
    assert remedy.startswith("start every rank by "), what


# --- Parts


def test_texts():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 1, 2, 7, 8]) == "ranks 0-2, 5, 7, 8"
    assert size_text(3 * 2**29) == "1.5 GiB"
    assert size_text(2**30) == "1.0 GiB"
    assert size_text(MIB) == "1 MiB"
    assert split_remedy("a: b is wrong: do c") == ("a: b is wrong", "do c")
    assert split_remedy("a: b is wrong; do c") == ("a: b is wrong", "do c")
    assert split_remedy("no idea") == ("no idea", "see docs/errors.md")


def test_it_knows_when_it_is_the_program():
    rest = ["syncengine", "doctor", "--json"]
    assert _arguments_of_command("-m", ["python", "-u", "-m", *rest]) == ["doctor", "--json"]
    assert _arguments_of_command("/bin/syncengine", ["python", "/bin/syncengine", "doctor"]) == ["doctor"]
    assert _arguments_of_command("/bin/syncengine", ["python", "/bin/syncengine", "bench"]) == ["bench"]
    assert _arguments_of_command("train.py", ["python", "train.py", *rest]) is None


@pytest.mark.parametrize("ranks", ["65", "1"])
def test_too_many_and_too_few_ranks_are_a_finding(ranks: str, capfd: pytest.CaptureFixture[str]):
    assert main(["doctor", "--ranks", ranks]) == 2
    assert f"1. --ranks {ranks} (training can't run)\n   remedy: give 2 to 64" in capfd.readouterr().out


@pytest.mark.parametrize("arguments", [["--ranks", "two"], ["--timeout", "soon"], ["--timeout", "0"]])
def test_wrong_arguments_are_refused(arguments: list[str], capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert "COMMAND" in capfd.readouterr().err
