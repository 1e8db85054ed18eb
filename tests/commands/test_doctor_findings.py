"""What `syncengine doctor` finds in the ranks' facts: each finding with its ranks, its text and its one remedy."""

from typing import Any

import pytest
from doctor_facts import MIB, broken, facts, on, said, together

from syncengine.doctor.checks import FATAL, NOTE, WARNING, find_all, missing_ranks, needed_descriptors

NO_SECRET = {"has_secret": False}

# Facts of the ranks, and the findings as `said` has them.
CASES: dict[str, tuple[Any, ...]] = {
    "no entry points are loaded": (
        [
            facts(0, entry_point={"switched_off": True}),
            facts(1, entry_point={"switched_off": True}, variables={"SYNCENGINE_PATCH": "1"}),
        ],
        "warning, entry point of [1]: rank 1: TORCH_DEVICE_BACKEND_AUTOLOAD switches entry points off: "
        "SYNCENGINE_PATCH=1 has no effect -> unset it",
        "note, entry point of [0]: rank 0: TORCH_DEVICE_BACKEND_AUTOLOAD switches entry points off: the backend is "
        "not known without an import -> unset it",
    ),
    "an installation without the entry point": (
        [facts(0, entry_point={"installed": False})],
        "warning, entry point of [0]: rank 0: this installation lacks its entry point: the backend is not known "
        "without an import -> install syncengine-torch again, by pip",
    ),
    "all is well": ([facts(0), facts(1), on("b", 2)],),
    "extension": (
        [facts(0), broken(1, "extension", "x can't be loaded: no torch: install it", "b"), broken(2, "extension", "x")],
        "fatal, extension of [1]: rank 1 on b: x can't be loaded: no torch -> on b: install it",
        "fatal, extension of [2]: rank 2 on a: x -> on a: see docs/errors.md",
    ),
    "the same extension on two hosts": (
        [broken(0, "extension", "x: y"), broken(1, "extension", "x: y", "b")],
        "fatal, extension of [0, 1]: ranks 0, 1 on a, b: x -> on a, b: y",
    ),
    "shared memory": (
        [facts(0), facts(1, extension={"shared_memory_error": "can't map it: No such device"})],
        "fatal, shared memory of [1]: rank 1: can't map it: No such device -> see docs/errors.md",
    ),
    "the host": (
        [facts(0, extension={"host_key_error": "no boot id: mount /proc"})],
        "fatal, the host of [0]: rank 0: no boot id -> mount /proc",
    ),
    "deaths": (
        [facts(0, extension={"death_notices": ["process handles"]}), facts(1, extension={"death_notices": []})],
        "warning, deaths of [1]: rank 1: the kernel or a sandbox refuses both ways to notice a death on the same "
        "machine before the deadline -> allow set_robust_list or pidfd_open (seccomp), and use no emulator that lacks "
        "both",
    ),
    "parts of which nothing is known": (
        [broken(0, "cuda", "RuntimeError: 802"), facts(1, extension={"death_notices_error": "no memory"})],
        "warning, GPUs of [0]: rank 0: GPUs could not be examined: RuntimeError: 802 -> see that error: it may stop "
        "training, too",
        "warning, deaths of [1]: rank 1: deaths could not be examined: no memory -> see that error: it may stop "
        "training, too",
    ),
    "kernels": (
        [facts(rank, extension={"instruction_set_error": "SYNCENGINE_ISA=mmx is none; unset it"}) for rank in (0, 1)],
        "fatal, kernels of [0, 1]: ranks 0, 1: SYNCENGINE_ISA=mmx is none -> unset it",
    ),
    "versions": (
        [facts(0), facts(1, versions={"syncengine": "0", "torch": "2.1", "python": "4"}), facts(2, versions={})],
        "warning, versions of syncengine of [1]: ranks differ in their version of syncengine: ranks 0, 2: 1; rank 1: "
        "0 -> install the same syncengine-torch on all hosts",
        "warning, versions of torch of [1]: ranks differ in their version of torch: ranks 0, 2: 2; rank 1: 2.1 -> "
        "install the same torch on all hosts",
        "warning, versions of python of [1]: ranks differ in their version of python: ranks 0, 2: 3; rank 1: 4 -> "
        "install the same python on all hosts",
    ),
    "settings": (
        [facts(0), broken(1, "settings", "InvalidUsage: SYNCENGINE_TIMEOUT='soon' is not allowed: give seconds")],
        "fatal, settings of [1]: rank 1: SYNCENGINE_TIMEOUT='soon' is not allowed -> give seconds",
    ),
    "unknown variable": (
        [
            facts(0, unknown_variables={"SYNCENGINE_TIMOUT": "SYNCENGINE_TIMEOUT", "SYNCENGINE_COLOUR": ""}),
            facts(1, unknown_variables={"SYNCENGINE_TIMOUT": "SYNCENGINE_TIMEOUT"}),
        ],
        "warning, unknown variable of [0]: rank 0: SYNCENGINE_COLOUR is set, and nothing reads it -> unset "
        "SYNCENGINE_COLOUR, or see docs/configuration.md for the right name",
        "warning, unknown variable of [0, 1]: ranks 0, 1: SYNCENGINE_TIMOUT is set, and nothing reads it -> set "
        "SYNCENGINE_TIMEOUT instead",
    ),
    "too many threads": (
        [facts(rank, cpus={"threads": 16}) for rank in range(4)],
        "warning, too many threads of [0, 1, 2, 3]: 4 ranks with 16 threads each on 4 CPUs of a -> set "
        "OMP_NUM_THREADS=1",
    ),
    "too many threads of one rank": (
        [facts(0, cpus={"threads": 5}), broken(1, "cpus", "x")],
        "warning, too many threads of [0]: 1 rank with 5 threads on 4 CPUs of a -> set OMP_NUM_THREADS=4",
        "warning, CPUs of [1]: rank 1: CPUs could not be examined: x -> see that error: it may stop training, too",
    ),
    "as many threads as there are CPUs": ([facts(rank, cpus={"threads": 2}) for rank in (0, 1)],),
    "ranks that are bound to one CPU": (
        [facts(rank, cpus={"affinity": [2], "available": 1}) for rank in range(2)],
        "warning, too many ranks of [0, 1]: 2 ranks on 1 CPU of a -> start at most 1 there, or let them have more "
        "CPUs (mpirun --bind-to none, a larger quota)",
    ),
    "ranks that are bound to a CPU each": (
        [facts(rank, cpus={"affinity": [rank], "available": 1}) for rank in range(4)],
    ),
    "a quota that is less than the CPUs": (
        [facts(rank, cpus={"available": 1}) for rank in range(2)],
        "warning, too many ranks of [0, 1]: 2 ranks on 1 CPU of a -> start at most 1 there, or let them have more "
        "CPUs (mpirun --bind-to none, a larger quota)",
    ),
    "more ranks than the machine has CPUs": (
        [facts(rank) for rank in range(5)],
        "warning, too many ranks of [0, 1, 2, 3, 4]: 5 ranks on 4 CPUs of a -> start at most 4 there",
    ),
    "each host has CPUs of its own": ([on("ab"[rank // 4], rank) for rank in range(8)],),
    "little memory": (
        [facts(rank, memory={"available": 511 * MIB}) for rank in range(2)],
        "warning, little memory of [0, 1]: 511 MiB of memory are left to 2 ranks on a -> end what else runs there, "
        "raise the limit of the cgroup (of the container), or start fewer ranks",
    ),
    "enough memory": ([facts(rank, memory={"available": 512 * MIB}) for rank in range(2)],),
    "few file descriptors": (
        [facts(0, descriptors={"limit": 76}), facts(1)],  # 10 open, 3 to connect, 64 for the rest: one more is enough
        "warning, file descriptors of [0]: rank 0 on a: ulimit -n is 76; 10 are open, and connecting takes 3 -> "
        "raise ulimit -n to 1024",
    ),
    "just enough file descriptors": ([facts(0, descriptors={"limit": 77}), facts(1)],),
    "file descriptors of which twice as many are 1024": (
        [facts(0, descriptors={"limit": 500, "open": 445}), facts(1)],
        "warning, file descriptors of [0]: rank 0 on a: ulimit -n is 500; 445 are open, and connecting takes 3 -> "
        "raise ulimit -n to 1024",
    ),
    "too few file descriptors": (
        [facts(0, descriptors={"limit": 812, "open": 810}), facts(1)],
        "fatal, file descriptors of [0]: rank 0 on a: ulimit -n is 812; 810 are open, and connecting takes 3 -> "
        "raise ulimit -n to 2048",
    ),
    "file descriptors that connecting uses up": (
        [facts(0, descriptors={"limit": 13}), facts(1)],
        "warning, file descriptors of [0]: rank 0 on a: ulimit -n is 13; 10 are open, and connecting takes 3 -> "
        "raise ulimit -n to 1024",
    ),
    "separate hosts": (
        [facts(0), facts(1, extension={"host_key": "another namespace"})],
        "warning, separate hosts of [0, 1]: rank 0 and rank 1 run on a, but can't share memory (other containers or "
        "network namespaces): TCP connects them -> run all ranks of a machine in one container, or give the "
        "containers --network=host",
    ),
    "hosts that are wanted on one machine": (
        [facts(rank, variables={"SYNCENGINE_HOST_ID": "x"}, extension={"host_key": f"x{rank}"}) for rank in (0, 1)],
    ),
    "a host of which less is known": ([facts(0), facts(1, extension={"host_key": ""})],),
    "no secret": (
        [facts(0), on("b", 1, settings=NO_SECRET), on("b", 2, settings=NO_SECRET)],
        "note, no secret of [1, 2]: ranks 1, 2: 2 hosts, and no secret by which ranks know each other -> set "
        "SYNCENGINE_SECRET on all ranks, if others can reach this network",
    ),
    "one host needs no secret": ([facts(0, settings=NO_SECRET), facts(1, settings=NO_SECRET)],),
    "no CUDA": (
        [facts(0, cuda={"devices": ["H100"]}), facts(1, cuda={"devices": ["H100"]}, extension={"has_cuda": False})],
        "warning, no CUDA of [1]: rank 1: torch sees GPUs, but this syncengine was built without CUDA: it trains on "
        "CPUs only -> build it in a checkout, where nvcc is: pip install --no-build-isolation --force-reinstall "
        "--no-deps .",
    ),
    "no CUDA, and no GPU": ([facts(0, extension={"has_cuda": False})],),
    "test build": (
        [facts(0), facts(1, extension={"has_test_hooks": True})],
        "note, test build of [1]: rank 1: this build is for syncengine's own tests, with fault injection, and slower "
        "-> build without SYNCENGINE_TEST_HOOKS",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_findings_from_facts(case: str):
    everyone, *expected = CASES[case]
    assert [said(finding) for finding in find_all(together(*everyone))] == expected


def test_the_worst_comes_first():
    assert (FATAL, WARNING, NOTE) == ("fatal", "warning", "note")  # as --json has them
    everyone = together(facts(0, cpus={"threads": 16}), facts(1, extension={"error": "x", "has_test_hooks": True}))
    assert [found.severity for found in find_all(everyone)] == [FATAL, WARNING, NOTE]


def test_descriptors_that_connecting_takes():
    """As csrc/ counts them."""
    two_hosts = [on("ab"[rank // 2], rank) for rank in range(4)]
    for count, needed in ((2, 3), (4, 3 + 5 * 2 + 3 + 16), (3, 3 + 5 + 3 + 16)):
        everyone = together(*two_hosts[:count])
        assert needed_descriptors(everyone[0], everyone) == needed
    by_mpi = together(*(on("ab"[rank // 2], rank, settings={"interhost": "mpi"}) for rank in range(4)))
    assert needed_descriptors(by_mpi[0], by_mpi) == 3


def test_descriptors_of_ranks_that_did_not_come():
    """As those of other hosts; too few may be why."""
    (alone,) = together(facts(0), missing=3)
    assert needed_descriptors(alone, [alone]) == 5 * 3 + 3 + 16
    (few,) = together(facts(0, descriptors={"limit": 20, "open": 3}), missing=1)
    found = find_all([few], [missing_ranks({1}, "rank 1 did not come")])
    assert [(one.name, one.severity) for one in found] == [("file descriptors", FATAL), ("missing ranks", FATAL)]
    assert found[0].text == "rank 0 on a: ulimit -n is 20; 3 are open, and connecting takes 24"


def test_missing_ranks():
    found = missing_ranks({5, 3}, "ranks 3, 5 did not come")
    assert said(found).startswith(
        "fatal, missing ranks of [3, 5]: ranks 3, 5 did not come -> see whether their processes were started"
    )
    assert found.remedy.endswith("check that every host reaches MASTER_ADDR:MASTER_PORT")
