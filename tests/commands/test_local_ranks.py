"""`--ranks` where this machine can't serve ranks of its own: said at once, with the remedy, by doctor and bench."""

import functools
import resource
from collections.abc import Callable, Iterator

import pytest
from command import alone, syncengine
from doctor_ranks import finding, report_of
from hosts import Hosts
from pool import RankPool


@pytest.fixture(scope="module")
def without_loopback(needs_hosts: None) -> Iterator[Callable[[int], None]]:
    """Moves a process where the loopback interface is down."""
    with Hosts(0) as hosts:
        yield hosts.entering_switch()


def limit_descriptors(limit: int, _: int = 0) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def test_doctor_finds_that_loopback_is_down(programs: RankPool, without_loopback: Callable[[int], None]):
    result = alone(programs, "doctor", "--ranks", "2", "--json", prepare=without_loopback)
    report = report_of(result)
    assert report["exit_code"] == 2
    found = finding(report, "launch")
    assert found["text"].startswith("the loopback interface, 127.0.0.1, can't be reached (")
    assert found["remedy"] == "bring it up (ip link set lo up)"
    assert "Traceback" not in result.stderr


def test_bench_says_that_loopback_is_down(programs: RankPool, without_loopback: Callable[[int], None]):
    result = alone(programs, "bench", "--ranks", "2", "-b", "8", "-e", "8", prepare=without_loopback)
    assert result.returncode == 2
    assert result.stderr.startswith("syncengine bench: the loopback interface, 127.0.0.1, can't be")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("limit", [16, 20])  # starting a process takes more; the store does
def test_doctor_finds_too_few_descriptors_to_start_ranks(programs: RankPool, limit: int):
    lower = functools.partial(limit_descriptors, limit)
    report = report_of(alone(programs, "doctor", "--ranks", "2", "--json", prepare=lower))
    assert report["exit_code"] == 2
    found = finding(report, "launch")
    assert found["text"] == f"ulimit -n is {limit}, and starting 2 ranks takes 24"
    assert found["remedy"] == "raise ulimit -n to 1024"


@pytest.mark.nightly
def test_descriptors_that_just_suffice():
    """What is asked for is enough."""
    lower = functools.partial(limit_descriptors, 24)
    report = report_of(syncengine("doctor", "--ranks", "2", "--json", "--timeout", "120", preexec_fn=lower))
    assert finding(report, "file descriptors")["severity"] == "warning"
    assert report["self_test"]["1"]["wrong"] == {}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "environ", "text"),
    [
        (("--compare",), {"GLOO_SOCKET_IFNAME": "nosuch"}, "(GLOO_SOCKET_IFNAME is nosuch): "),
        (("-e", "4096G", "-b", "4096G"), {}, ": give a smaller -e"),
    ],
)
def test_a_bench_that_cannot_run_is_not_one_with_wrong_results(
    programs: RankPool, arguments: tuple[str, ...], environ: dict[str, str], text: str
):
    """1 would say that elements were wrong."""
    result = alone(programs, "bench", "--ranks", "2", "-b", "8", "-e", "8", *arguments, environ=environ)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("syncengine bench: ")]
    assert any(text in line for line in lines), result.stderr
