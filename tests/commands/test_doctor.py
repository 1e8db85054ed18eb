"""`syncengine doctor`: what is broken is broken for real, and its report must say so, and what to do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command import LAUNCHERS, Result, by_hand, launched, syncengine
from pool import RankPool
from repository import ROOT

from syncengine import _C
from syncengine.__main__ import main
from syncengine.bench.collectives import Case
from syncengine.doctor.checks import find_all, ranks_text, size_text, split_remedy
from syncengine.doctor.rescue import _arguments_of_doctor

CPUS = _C.machine()["available_cores"]
PATIENT = ("--timeout", "120")  # a loaded machine starts ranks late
enough_cpus = pytest.mark.skipif(CPUS < 2, reason="two ranks on one CPU are a finding")


def report_of(result: Result) -> dict[str, Any]:
    """The JSON on stdout, whose exit code must be the process's."""
    assert result.stdout.startswith("{"), result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["exit_code"] == result.returncode, result.stderr
    return report


def finding(report: dict[str, Any], name: str) -> dict[str, Any]:
    found = [one for one in report["findings"] if one["name"] == name]
    assert len(found) == 1, report["findings"]
    return found[0]


# --- Where all is well


def test_alone_it_says_how_to_start():
    result = syncengine("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("syncengine doctor: 1 rank on 1 host\n")
    assert _C.build_id in result.stdout
    assert "\n0 findings\n" in result.stdout
    assert "torchrun --nproc-per-node 2 -m syncengine doctor" in result.stdout
    assert "syncengine doctor --ranks 2" in result.stdout


@enough_cpus
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_of_a_launcher_are_well(launcher: str):
    result = launched(launcher, "doctor", "--json", *PATIENT)
    report = report_of(result)
    assert result.returncode == 0, result.stderr
    assert report["status"] == "fine"
    assert report["launcher"] == ("torchrun" if launcher == "torchrun" else "mpi")
    assert [facts["rank"] for facts in report["ranks"]] == [0, 1]
    for outcome in report["self_test"].values():
        assert outcome["wrong"] == {}
        assert outcome["collectives"] > 0


@enough_cpus
def test_it_starts_ranks_itself_and_prints_one_report():
    result = syncengine("doctor", "--ranks", "2", *PATIENT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("syncengine doctor:") == 1
    assert "2 ranks on 1 host" in result.stdout
    assert "every result verified" in result.stdout


def test_wrong_arguments_are_refused():
    assert syncengine("doctor", "--ranks", "65").returncode == 2
    assert syncengine("doctor", "--timeout", "soon").returncode == 2
    assert "COMMAND" in syncengine().stderr


# --- What slows training


def examine(environs: list[dict[str, str]], prepare: Callable[..., Any] | None, *arguments: str) -> tuple[int, Any]:
    """The command on this rank, in this process, after `prepare()`: its exit code, and what it printed."""
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


def use_many_threads() -> None:
    torch.set_num_threads(16)


def test_too_many_threads_are_counted(pool: RankPool):
    report = examined(pool, 1, prepare=use_many_threads)
    found = finding(report, "too many threads")
    assert report["status"] == "findings"
    assert found["ranks"] == [0, 1]
    assert found["text"].startswith(f"2 ranks with 16 threads each on {CPUS} CPU")
    assert found["remedy"] == f"set OMP_NUM_THREADS={max(1, CPUS // 2)}"


@enough_cpus
def test_threads_are_those_of_the_variable():
    """As a user meets it."""
    result = syncengine("doctor", "--ranks", "2", *PATIENT, environ={"OMP_NUM_THREADS": str(CPUS)})
    assert result.returncode == 1
    assert f"\n1 finding:\n1. 2 ranks with {CPUS} threads each on {CPUS} CPUs of " in result.stdout
    assert f"\n   remedy: set OMP_NUM_THREADS={CPUS // 2}\n" in result.stdout


def use_one_cpu() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_ranks_that_share_one_cpu_are_counted(pool: RankPool):
    found = finding(examined(pool, 1, prepare=use_one_cpu), "too many ranks")
    assert found["text"].startswith("2 ranks on 1 CPU of ")
    assert "start at most 1 there" in found["remedy"]
    assert ("--bind-to none" in found["remedy"]) == ((os.cpu_count() or 1) > 1)


def test_variables_that_nothing_reads_are_named(pool: RankPool):
    environs = [{"SYNCENGINE_TIMOUT": "5", "SYNCENGINE_COLOUR": "red"}, {"SYNCENGINE_TIMOUT": "5"}]
    report = examined(pool, 1, environs=environs)
    found = {one["text"]: one["remedy"] for one in report["findings"] if one["name"] == "unknown variable"}
    assert found["ranks 0, 1: SYNCENGINE_TIMOUT is set, and nothing reads it"] == "set SYNCENGINE_TIMEOUT instead"
    assert found["rank 0: SYNCENGINE_COLOUR is set, and nothing reads it"].startswith("unset SYNCENGINE_COLOUR")


@pytest.mark.skipif(_C.machine()["best_instruction_set"] == "scalar", reason="this processor has no better kernels")
def test_slow_kernels_are_named(pool: RankPool):
    found = finding(examined(pool, 1, environs=[{}, {"SYNCENGINE_ISA": "scalar"}]), "slow kernels")
    assert "rank 1: SYNCENGINE_ISA chooses scalar" in found["text"]
    assert found["remedy"] == "unset SYNCENGINE_ISA"


def allow_64_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def test_few_descriptors_are_counted(pool: RankPool):
    found = finding(examined(pool, 1, prepare=allow_64_descriptors), "file descriptors")
    assert found["ranks"] == [0, 1]
    assert "ulimit -n is 64" in found["text"]
    assert "connecting takes 3" in found["text"]
    assert found["remedy"] == "raise ulimit -n to 1024"


# --- What keeps training from running


def allow_few_descriptors() -> None:
    """Ten more than are open."""
    few = len(list(Path("/proc/self/fd").iterdir())) + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))


def test_too_few_descriptors_to_connect(pool: RankPool):
    """Each rank is a host of its own, to be reached over TCP by many connections."""
    environs = [{"SYNCENGINE_HOST_ID": f"host {i}", "SYNCENGINE_SOCKETS": "16"} for i in range(2)]
    report = examined(pool, 2, environs=environs, prepare=allow_few_descriptors)
    found = finding(report, "file descriptors")
    assert found["severity"] == "fatal"
    assert "connecting takes 20" in found["text"]
    assert found["remedy"] == "raise ulimit -n to 1024"
    assert report["status"] == "can't run"
    assert report["self_test"] == {}


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_shared_memory_that_cannot_be_made(pool: RankPool):
    """By a limit on the size of files, of which shared memory is one."""
    found = finding(examined(pool, 2, prepare=limit_files), "shared memory")
    assert found["ranks"] == [0, 1]
    assert "can't size shared memory" in found["text"]
    assert "ulimit -f" in found["remedy"]


def copy_of_package(folder: Path, change: Any) -> dict[str, str]:
    """A package of its own in `folder`, with an extension that `change` has made of ours; the environment to use it."""
    shutil.copytree(ROOT / "syncengine", folder / "syncengine", ignore=shutil.ignore_patterns("_C.*.so", "__pycache__"))
    ours = Path(_C.__file__)
    (folder / "syncengine" / ours.name).write_bytes(change(ours.read_bytes()))
    return {"PYTHONPATH": str(folder)}


def damaged(extension: bytes) -> bytes:
    return bytes(len(extension))


def of_another_torch(extension: bytes) -> bytes:
    """Which wants a function that this one does not have."""
    name = b"_ZN3c1010TensorImpl12mutable_gradEv\0"
    assert name in extension
    return extension.replace(name, name.replace(b"mutable", b"altered"))


def of_another_build(extension: bytes) -> bytes:
    """With another build number: the constant that the code returns."""
    number = struct.pack("<Q", int(_C.build_id, 16))
    assert number in extension
    return extension.replace(number, struct.pack("<Q", 0x0123456789ABCDEF))


@pytest.mark.parametrize("change", [damaged, of_another_torch])
def test_an_extension_that_cannot_be_loaded(tmp_path: Path, change: Any):
    environ = copy_of_package(tmp_path, change)
    result = syncengine("doctor", "--json", environ=environ, cwd=tmp_path)
    found = finding(report_of(result), "extension")
    assert result.returncode == 2
    assert f"{Path(_C.__file__).name} can't be loaded: " in found["text"]
    assert "install syncengine again" in found["remedy"]
    text = syncengine("doctor", environ=environ, cwd=tmp_path)
    assert text.returncode == 2
    assert "can't be loaded" in text.stdout
    assert "Traceback" not in text.stdout + text.stderr
    other = syncengine("bench", environ=environ, cwd=tmp_path)
    assert "ImportError" in other.stderr


def test_an_extension_that_one_rank_cannot_load(tmp_path: Path, unused_port: int):
    broken = copy_of_package(tmp_path, damaged)
    results = by_hand([{}, broken], unused_port, "doctor", "--json", *PATIENT)
    assert [result.returncode for result in results] == [2, 0], results[1].stderr
    report = report_of(results[0])
    found = finding(report, "extension")
    assert found["ranks"] == [1]
    assert found["text"].startswith("rank 1 on ")
    assert report["self_test"] == {}
    assert results[1].stdout == ""


def test_an_extension_that_rank_0_cannot_load(tmp_path: Path, unused_port: int):
    broken = copy_of_package(tmp_path, damaged)
    results = by_hand([broken, {}], unused_port, "doctor", *PATIENT)
    assert [result.returncode for result in results] == [2, 0], results[1].stderr
    assert "rank 0 on " in results[0].stdout
    assert results[1].stdout == ""


def test_ranks_of_different_builds(tmp_path: Path, unused_port: int):
    other = copy_of_package(tmp_path, of_another_build)
    results = by_hand([{}, other], unused_port, "doctor", "--json", *PATIENT)
    found = finding(report_of(results[0]), "builds")
    assert results[0].returncode == 2
    assert found["ranks"] == [1]
    assert f"rank 0: {_C.build_id}; rank 1: 0123456789abcdef" in found["text"]
    assert "the same version of syncengine" in found["remedy"]


@pytest.mark.parametrize("comes", [0, 1])
def test_a_rank_that_does_not_come(unused_port: int, comes: int):
    """Whoever is there reports. Rank 0 serves the store, so rank 1 finds none."""
    environ = {"RANK": str(comes)}
    (result,) = by_hand([environ], unused_port, "doctor", "--json", "--timeout", "2", world=2)
    report = report_of(result)
    found = finding(report, "missing ranks")
    assert result.returncode == 2
    assert found["ranks"] == [1 - comes]
    assert f"rank {1 - comes} did not " in found["text"]
    assert "see whether their processes were started" in found["remedy"]
    assert report["self_test"] == {}


def stay_away() -> None:
    if os.environ["RANK"] == "2":
        sys.exit(0)


def test_two_of_three_ranks_report_once(pool: RankPool):
    """Which is missing is known when the time is over."""
    with pool.spawn_ranks(examine, [], stay_away, "--timeout", "8", world=3, settings=None) as ranks:
        (code, report), other = (rank.result(120) for rank in ranks[:2])
    found = finding(report, "missing ranks")
    assert (code, other) == (2, (0, None))
    assert found["ranks"] == [2]
    assert found["text"] == "rank 2 did not come"
    assert [facts["rank"] for facts in report["ranks"]] == [0, 1]


def test_settings_that_differ(pool: RankPool):
    found = finding(examined(pool, 2, environs=[{}, {"SYNCENGINE_NUMERICS": "ring"}]), "setting numerics")
    assert "rank 0: rank_order; rank 1: ring" in found["text"]
    assert found["remedy"] == "give all ranks the same SYNCENGINE_NUMERICS"


def test_settings_that_are_wrong(pool: RankPool):
    found = finding(examined(pool, 2, environs=[{}, {"SYNCENGINE_TIMEOUT": "soon"}]), "settings")
    assert "rank 1: SYNCENGINE_TIMEOUT='soon' is not allowed" in found["text"]
    assert found["remedy"].startswith("give seconds")


def forget_world_size() -> None:
    del os.environ["WORLD_SIZE"]


def test_launch_variables_that_contradict_each_other(pool: RankPool):
    found = finding(examined(pool, 2, prepare=forget_world_size, world=1), "launch")
    assert "WORLD_SIZE is missing" in found["text"]
    assert found["remedy"] == "set it, or unset them all"


def test_kernels_that_are_not_there(pool: RankPool):
    found = finding(examined(pool, 2, environs=[{}, {"SYNCENGINE_ISA": "mmx"}]), "kernels")
    assert "rank 1: SYNCENGINE_ISA=mmx" in found["text"]
    assert "unset it" in found["remedy"]


HOSTS = [{"SYNCENGINE_HOST_ID": f"host {i}"} for i in range(2)]


def test_hosts_that_cannot_connect(pool: RankPool):
    """One would listen on an interface that it does not have."""
    environs = [HOSTS[0], HOSTS[1] | {"SYNCENGINE_INTERFACE": "=eth99"}]
    report = examined(pool, 2, environs=environs)
    found = [one for one in report["findings"] if one["name"] == "self-test"]
    assert any("no network interface matches '=eth99'" in one["text"] for one in found), found
    assert {rank for one in found for rank in one["ranks"]} == {0, 1}


def test_hosts_that_connect(pool: RankPool):
    with pool.spawn_ranks(examine, HOSTS, None, settings=None) as ranks:
        (_, report), _ = [rank.result(120) for rank in ranks]
    assert [one["severity"] for one in report["findings"] if one["name"] == "no secret"] == ["note"]
    assert report["self_test"]["0"]["links"] != ""
    assert report["self_test"]["1"]["wrong"] == {}


def die_in_the_self_test() -> None:
    from syncengine.doctor import self_test

    if os.environ["RANK"] == "1":
        self_test._is_over = lambda *_: os._exit(3)


def test_a_rank_that_dies_in_the_self_test(pool: RankPool):
    with pool.spawn_ranks(examine, [], die_in_the_self_test, "--timeout", "6", settings=None) as ranks:
        code, report = ranks[0].result(120)
    assert code == 2
    (own, missing) = [one for one in report["findings"] if one["name"] == "self-test"]
    assert own["text"].startswith("rank 0: PeerLost: rank 1 ")
    assert missing["text"] == "rank 1 did not come back from the self-test"
    assert missing["remedy"] == "see what that rank said before it ended"


# --- Parts


def self_test_with_a_broken_rank(broken: int) -> dict[str, Any]:
    from syncengine.doctor import self_test

    call = Case.call

    def broken_call(self: Case) -> None:
        call(self)
        if self.rank == broken and self.shape.name == "all_gather":
            self.output[:3] += 1

    Case.call = broken_call
    try:
        return self_test.run_self_test(60.0)
    finally:
        Case.call = call


def test_wrong_results_are_counted_and_named(pool: RankPool):
    from syncengine.doctor.examination import _failures

    good, bad = pool.run(self_test_with_a_broken_rank, 1, settings=None)
    assert good["wrong"] == {}
    assert bad["wrong"].keys() == {"all_gather"}
    assert bad["wrong"]["all_gather"] % 3 == 0
    (found,) = _failures({0: good, 1: bad}, set(), several_hosts=False)
    assert found.ranks == [1]
    assert re.match(r"rank 1 got wrong elements: \d+ of all_gather", found.text)


def facts(rank: int, **changes: Any) -> dict[str, Any]:
    """Of a rank on a machine where all is well."""
    mib = 2**20
    well = {
        "rank": rank,
        "host": "a",
        "extension": {
            "build": "1",
            "has_cuda": True,
            "has_test_hooks": False,
            "instruction_set": "avx2",
            "best_instruction_set": "avx2",
            "host_key": "kernel",
        },
        "versions": {"syncengine": "1", "torch": "2", "python": "3"},
        "cpus": {"affinity": [0, 1, 2, 3], "of_machine": 4, "threads": 1, "available": 4},
        "memory": {"available": 8192 * mib, "total": 16384 * mib, "shm_free": 8192 * mib, "shm_total": 8192 * mib},
        "descriptors": {"limit": 1024, "open": 10},
        "settings": {
            "algorithm": "auto",
            "numerics": "rank_order",
            "interhost": "tcp",
            "host_algorithm": "auto",
            "sockets": 4,
            "checksum": False,
            "has_secret": True,
        },
        "cuda": {"version": None, "devices": []},
        "variables": {},
        "unknown_variables": {},
    }
    return {name: {**well[name], **changes.pop(name)} if name in changes else well[name] for name in well} | changes


def names(*everyone: dict[str, Any]) -> list[str]:
    return [found.name for found in find_all(everyone)]


def test_where_all_is_well_nothing_is_found():
    assert names(facts(0), facts(1)) == []


def test_findings_from_facts():
    assert names(facts(0), facts(1, versions={"torch": "2.1"})) == ["versions of torch"]
    assert names(facts(0, memory={"available": 100 * 2**20})) == ["little memory"]
    assert names(facts(0, memory={"shm_total": 64 * 2**20})) == ["small /dev/shm"]
    assert names(facts(0, cuda={"devices": ["H100"]}, extension={"has_cuda": False})) == ["no CUDA"]
    assert names(facts(0, extension={"has_test_hooks": True})) == ["test build"]
    apart = facts(1, extension={"host_key": "another namespace"})
    assert names(facts(0), apart) == ["separate hosts"]
    assert "rank 0 and rank 1 run on a" in find_all([facts(0), apart])[0].text
    for_itself = [facts(rank, cpus={"affinity": [rank], "available": 1}) for rank in range(4)]
    assert names(*for_itself) == []  # each bound to a CPU of its own
    (found,) = find_all([facts(rank, cpus={"threads": 16}) for rank in range(4)])
    assert found.text == "4 ranks with 16 threads each on 4 CPUs of a"
    assert found.remedy == "set OMP_NUM_THREADS=1"
    worst, *_ = find_all([facts(0, cpus={"threads": 16}), facts(1, extension={"build": "2"}, cpus={"threads": 16})])
    assert worst.severity == "fatal"  # first


def test_texts():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 1, 2, 7, 8]) == "ranks 0-2, 5, 7, 8"
    assert size_text(3 * 2**29) == "1.5 GiB"
    assert size_text(2**20) == "1 MiB"
    assert split_remedy("a: b is wrong: do c") == ("a: b is wrong", "do c")
    assert split_remedy("no idea") == ("no idea", "see docs/errors.md")


def test_it_knows_when_it_is_the_program():
    rest = ["syncengine", "doctor", "--json"]
    assert _arguments_of_doctor("-m", ["python", "-u", "-m", *rest]) == ["--json"]
    assert _arguments_of_doctor("/bin/syncengine", ["python", "/bin/syncengine", "doctor"]) == []
    assert _arguments_of_doctor("/bin/syncengine", ["python", "/bin/syncengine", "bench"]) is None
    assert _arguments_of_doctor("train.py", ["python", "train.py", *rest]) is None
