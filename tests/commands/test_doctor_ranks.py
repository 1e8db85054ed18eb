"""`syncengine doctor` on ranks: what is broken is broken for real, and its report must say so, and what to do.

test_doctor_findings.py has all findings, of facts; here are those whose facts take something to be made, or found out.
"""

import importlib
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from command import by_hand
from doctor_ranks import examine, examined, finding
from marks import mostly_nightly
from pool import RankPool

import syncengine
from syncengine import _C
from syncengine.bench.collectives import Case
from syncengine.doctor import examination, self_test
from syncengine.errors import SyncError

CPUS = _C.machine()["available_cores"]

# --- What slows training


def slow_down() -> None:
    """In more than one way."""
    torch.set_num_threads(16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def test_what_slows_ranks_is_found_with_one_report(pool: RankPool):
    environs = [{"SYNCENGINE_TIMOUT": "5", "SYNCENGINE_COLOUR": "red"}, {"SYNCENGINE_TIMOUT": "5"}]
    report = examined(pool, 1, environs=environs, prepare=slow_down)
    assert report["status"] == "findings"
    threads = finding(report, "too many threads")
    assert threads["ranks"] == [0, 1]
    assert threads["text"].startswith(f"2 ranks with 16 threads each on {CPUS} CPU")
    assert threads["remedy"] == f"set OMP_NUM_THREADS={max(1, CPUS // 2)}"
    unread = {one["text"]: one["remedy"] for one in report["findings"] if one["name"] == "unknown variable"}
    assert unread["ranks 0, 1: SYNCENGINE_TIMOUT is set, and nothing reads it"] == "set SYNCENGINE_TIMEOUT instead"
    assert unread["rank 0: SYNCENGINE_COLOUR is set, and nothing reads it"].startswith("unset SYNCENGINE_COLOUR")
    few = finding(report, "file descriptors")
    assert few["ranks"] == [0, 1]
    assert "ulimit -n is 64" in few["text"]
    assert "connecting takes 3" in few["text"]


def use_one_cpu() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_ranks_that_share_one_cpu_are_counted(pool: RankPool):
    found = finding(examined(pool, 1, prepare=use_one_cpu), "too many ranks")
    assert found["text"].startswith("2 ranks on 1 CPU of ")
    assert "start at most 1 there" in found["remedy"]
    assert ("--bind-to none" in found["remedy"]) == ((os.cpu_count() or 1) > 1)


# --- What keeps training from running


def allow_few_descriptors() -> None:
    """Lets this rank open thirty descriptors more than are open now."""
    few = len(list(Path("/proc/self/fd").iterdir())) + 30
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))


def test_too_few_descriptors_to_connect(pool: RankPool):
    """Each rank is a host of its own, to be reached over TCP by many connections."""
    environs = [{"SYNCENGINE_HOST_ID": f"host {i}", "SYNCENGINE_SOCKETS": "16"} for i in range(2)]
    report = examined(pool, 2, environs=environs, prepare=allow_few_descriptors)
    found = finding(report, "file descriptors")
    assert found["severity"] == "fatal"
    assert "connecting takes 36" in found["text"]
    assert found["remedy"] == "raise ulimit -n to 1024"
    assert report["status"] == "can't run"
    assert report["self_test"] == {}


def error_of_init() -> str:
    allow_few_descriptors()
    with pytest.raises(SyncError) as refused:
        syncengine.init(timeout=120)
    return str(refused.value)


def test_init_demands_the_descriptors_that_the_doctor_counts(pool: RankPool):
    """The ranks and their settings are those of the test above."""
    environ = {"SYNCENGINE_SOCKETS": "16"}
    with pool.spawn_ranks(error_of_init, hosts="ab", settings=None, environ=environ) as ranks:
        assert all("needs 36 file descriptors besides" in rank.result(120) for rank in ranks)


def limit_files() -> None:
    """To less than shared memory has, and more than the file through which the pool's ranks meet."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))


def test_shared_memory_that_cannot_be_made(pool: RankPool):
    """By a limit on the size of files, of which shared memory is one."""
    found = finding(examined(pool, 2, prepare=limit_files), "shared memory")
    assert found["ranks"] == [0, 1]
    assert "can't size shared memory" in found["text"]
    assert "ulimit -f" in found["remedy"]


def use_a_real_store() -> None:
    """The pool's ranks meet through a file otherwise."""
    importlib.reload(importlib.import_module("syncengine.launch.store"))


@pytest.mark.thorough
@pytest.mark.parametrize("comes", mostly_nightly([0, 1], 1))
def test_a_rank_that_does_not_come(pool: RankPool, unused_port: int, comes: int):
    """Whoever is there reports. Rank 0 serves the store, so rank 1 finds none."""
    environ = {"RANK": str(comes), "WORLD_SIZE": "2", "MASTER_PORT": str(unused_port)}
    arguments = [], use_a_real_store, "--timeout", "2"
    with pool.spawn_ranks(examine, *arguments, world=1, settings=None, environ=environ) as ranks:
        code, report = ranks[0].result(120)
    found = finding(report, "missing ranks")
    assert code == report["exit_code"] == 2
    assert found["ranks"] == [1 - comes]
    assert found["text"].startswith(f"rank {1 - comes} did not {'come' if comes == 0 else 'listen at 127.0.0.1:'}")
    assert "see whether their processes were started" in found["remedy"]
    assert report["self_test"] == {}


def stay_away() -> None:
    if os.environ["RANK"] == "2":
        sys.exit(0)


@pytest.mark.thorough
def test_two_of_three_ranks_report_once(pool: RankPool):
    """Which is missing is known when the time is over."""
    with pool.spawn_ranks(examine, [], stay_away, "--timeout", "5", world=3, settings=None) as ranks:
        (code, report), other = (rank.result(120) for rank in ranks[:2])
    found = finding(report, "missing ranks")
    assert (code, other) == (2, (0, None))
    assert found["ranks"] == [2]
    assert found["text"] == "rank 2 did not come"
    assert [facts["rank"] for facts in report["ranks"]] == [0, 1]


def test_settings_that_differ(pool: RankPool):
    found = finding(examined(pool, 2, environs=[{}, {"SYNCENGINE_NUMERICS": "ring"}]), "self-test")
    assert "rank 0 has numerics='rank_order', rank 1 has numerics='ring'" in found["text"]
    assert found["remedy"] == "give all ranks the same"


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
    if os.environ["RANK"] == "1":
        self_test._is_over = lambda *_: os._exit(3)


def test_a_rank_that_dies_in_the_self_test(pool: RankPool):
    with pool.spawn_ranks(examine, [], die_in_the_self_test, "--timeout", "4", settings=None) as ranks:
        code, report = ranks[0].result(120)
    assert code == 2
    (own, missing) = [one for one in report["findings"] if one["name"] == "self-test"]
    assert own["text"].startswith("rank 0: PeerLost: rank 1 ")
    assert missing["text"] == "rank 1 did not come back from the self-test"
    assert missing["remedy"] == "see what that rank said before it ended"


# --- Parts


def self_test_with_a_broken_rank(broken: int) -> dict[str, Any]:
    call = Case.call

    def broken_call(self: Case) -> None:
        call(self)
        if self.rank == broken and self.shape.name == "all_gather":
            self.output[:3] += 1

    with mock.patch.object(Case, "call", broken_call), mock.patch.object(self_test, "SECONDS", 0.02):
        return self_test.run_self_test(60.0)


def test_wrong_results_are_counted_and_named(pool: RankPool):
    good, bad = pool.run(self_test_with_a_broken_rank, 1, settings=None)
    assert good["wrong"] == {}
    assert bad["wrong"].keys() == {"all_gather"}
    assert bad["wrong"]["all_gather"] % 3 == 0
    (found,) = examination._failures({0: good, 1: bad}, set(), several_hosts=False)
    assert found.ranks == [1]
    assert re.match(r"rank 1 got wrong elements: \d+ of all_gather", found.text)


def self_test_without_averages() -> dict[str, int]:
    with mock.patch.multiple(self_test, Parallel=lambda module, process_group: module, SECONDS=0.02):
        return self_test.run_self_test(60.0)["wrong"]


def test_gradients_that_are_no_averages_are_wrong(pool: RankPool):
    assert pool.run(self_test_without_averages, settings=None) == [{"gradients of Parallel": 300 * 20}] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_another_number_than_the_launchers_is_refused(programs: RankPool, unused_port: int, command: str):
    """Not ignored. The same number is what `--ranks` gives to the ranks that it has started itself."""
    results = by_hand(programs, [{}, {}], unused_port, command, "--ranks", "3")
    assert max(result.returncode for result in results) == 2
    assert "--ranks 3, but torchrun has started 2 ranks" in "".join(result.stdout + result.stderr for result in results)
