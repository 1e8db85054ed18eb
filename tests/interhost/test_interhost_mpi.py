"""interhost="mpi": virtual hosts that MPI connects, really under mpirun. Bits, training, faults."""

import time
from pathlib import Path

import pytest
from faults import WITHIN
from marks import mostly_nightly
from shared_files import is_mapped, shared_files
from test_launchers_real import mpi, run, start

pytestmark = pytest.mark.thorough

SCRIPT = str(Path(__file__).with_name("interhost_script.py"))

each_mpi = pytest.mark.parametrize("name", mostly_nightly(["openmpi", "mpich"], 0))


def command(name, *cases):
    mpirun, python = mpi(name)
    assert mpirun[-2:] == ["-n", "2"]
    ranks = len(cases[0].partition(":")[2])
    return [*mpirun[:-1], str(ranks), python, SCRIPT, *cases]


def answers(name, *cases, **environ):
    """What each rank says to each case. All ranks and mpirun end well."""
    return [answer["answers"] for answer in run(command(name, *cases), SYNCENGINE_INTERHOST="mpi", **environ)]


@each_mpi
def test_bits_training_and_errors(name):
    """In one job, since each takes seconds to start. After the last case transfers are under way when MPI ends."""
    cases = ["use_everything:aaab", "use_everything:abab", "train:abac", "beside_own_messages:abab"]
    cases += ["train_over_two_groups:abaa"]
    errors = ["raise_on_last:aabb", "name_tcp_on_rank_1:aabb", "leave_while_one_is_stopped:aabb"]
    for rank, own in enumerate(answers(name, *cases, *errors)):
        assert own[:5] == [None] * 5
        assert own[5] == ["Aborted", "rank 3: ValueError: the data set is empty"]
        error, text = own[6]
        assert error == "Mismatch"
        assert "rank 0 has interhost='mpi', rank 1 has interhost='tcp'" in text
        outcome, left_within = own[7]
        assert outcome
        assert left_within < WITHIN
        if rank == 0:
            assert "Timeout" in outcome
            assert "waits for rank" in outcome


@pytest.mark.nightly
@each_mpi
def test_a_packet_that_fails_has_not_arrived(name):
    ((sent,),), ((received,),) = answers(name, "a_packet_that_fails:ab")
    assert sent == [7, ""]
    assert received[0] == 7 and "trunc" in received[1].lower()


@pytest.mark.nightly
@each_mpi
def test_exit_without_shutdown(name):
    assert answers(name, "leave_in_the_middle:ab") == [[None]] * 2


@pytest.mark.nightly
@each_mpi
def test_mpi_that_was_finalized_is_named(name):
    for ((error, text),) in answers(name, "finalize_first:ab"):
        assert error == "PeerLost"
        assert "MPI was finalized" in text


@pytest.mark.nightly
@each_mpi
def test_killed(name):
    """mpirun ends the others: MPI has no way to go on without one."""
    begun = time.monotonic()
    before = shared_files("mpich_shm_*")
    result = start(command(name, "kill_last:ab"), SYNCENGINE_INTERHOST="mpi")
    assert result.returncode != 0
    assert time.monotonic() - begun < 60
    # MPICH's own, which it leaves when it is killed; that another job maps is not one of them.
    deadline = time.monotonic() + 5
    while (left := shared_files("mpich_shm_*") - before) and time.monotonic() < deadline:
        for file in left:
            if not is_mapped(file):
                file.unlink(missing_ok=True)
        time.sleep(0.1)


@pytest.mark.nightly
def test_a_thread_level_that_is_too_low_is_refused():
    for ((error, text),) in answers("openmpi", "init_only:ab", MPI4PY_RC_THREAD_LEVEL="serialized"):
        assert error == "InvalidUsage", text
        assert "needs the thread level MULTIPLE" in text
        assert "MPI4PY_RC_THREAD_LEVEL=multiple" in text
