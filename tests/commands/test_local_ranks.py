"""`--ranks` where this machine can't serve ranks of its own: said at once, with the remedy, by doctor and bench."""

from __future__ import annotations

import resource
import shutil
import subprocess
from typing import Any

import pytest
from command import environ_of, syncengine
from doctor_ranks import finding, report_of


def run(*arguments: str, limit: int | None = None, prefix: tuple[str, ...] = ()) -> Any:
    def lower() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    return syncengine(*arguments, prefix=prefix, preexec_fn=lower)


@pytest.fixture(scope="module")
def without_loopback() -> tuple[str, ...]:
    """What starts a command in a network namespace whose loopback interface is down."""
    prefix = ("unshare", "-rn")
    if shutil.which("unshare") is None:
        pytest.skip("needs the program unshare")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False, env=environ_of())
    if tried.returncode != 0:
        pytest.skip(f"no network namespaces: {tried.stderr}")
    return prefix


def test_doctor_finds_that_loopback_is_down(without_loopback: tuple[str, ...]):
    result = run("doctor", "--ranks", "2", "--json", prefix=without_loopback)
    report = report_of(result)
    assert report["exit_code"] == 2
    found = finding(report, "launch")
    assert found["text"].startswith("the loopback interface, 127.0.0.1, can't be reached (")
    assert found["remedy"] == "bring it up (ip link set lo up)"
    assert "Traceback" not in result.stderr


def test_bench_says_that_loopback_is_down(without_loopback: tuple[str, ...]):
    result = run("bench", "--ranks", "2", "-b", "8", "-e", "8", prefix=without_loopback)
    assert result.returncode == 2
    assert result.stderr.startswith("syncengine bench: InvalidUsage: the loopback interface, 127.0.0.1, can't be")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("limit", [16, 20])  # starting a process takes more; the store does
def test_doctor_finds_too_few_descriptors_to_start_ranks(limit: int):
    report = report_of(run("doctor", "--ranks", "2", "--json", limit=limit))
    assert report["exit_code"] == 2
    found = finding(report, "launch")
    assert found["text"] == f"ulimit -n is {limit}, and starting 2 ranks takes 24"
    assert found["remedy"] == "raise ulimit -n to 1024"


def test_descriptors_that_just_suffice():
    """What is asked for is enough."""
    report = report_of(run("doctor", "--ranks", "2", "--json", "--timeout", "120", limit=24))
    assert finding(report, "file descriptors")["severity"] == "warning"
    assert report["self_test"]["1"]["wrong"] == {}


@pytest.mark.parametrize(
    ("arguments", "environ", "text"),
    [
        (("--compare",), {"GLOO_SOCKET_IFNAME": "nosuch"}, "(GLOO_SOCKET_IFNAME is nosuch): "),
        (("-e", "4096G", "-b", "4096G"), {}, ": give a smaller -e"),
    ],
)
def test_a_bench_that_cannot_run_is_not_one_with_wrong_results(
    arguments: tuple[str, ...], environ: dict[str, str], text: str
):
    """1 would say that elements were wrong."""
    result = syncengine("bench", "--ranks", "2", "-b", "8", "-e", "8", *arguments, environ=environ)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("syncengine bench: ")]
    assert any(text in line for line in lines), result.stderr
