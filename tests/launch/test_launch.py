"""Which launcher started us, from simulated environments; and the exchange of bytes between ranks as threads."""

import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st

from syncengine.errors import Aborted, InvalidUsage, PeerLost, Timeout
from syncengine.launch import Launch, slurm, store
from syncengine.launch.arrivals import as_error, failure_notice, wait_for_ranks
from syncengine.launch.environment import detect

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "2"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
SLURM_JOB = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NODELIST": "n[1-3]"}
SLURM = {**SLURM_JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}
LAUNCHES = {
    "torchrun": (TORCHRUN, Launch("torchrun", 3, 4)),
    "open_mpi": (OPEN_MPI, Launch("mpi", 2, 4)),
    "hydra": (HYDRA, Launch("mpi", 1, 4)),
    "slurm": (SLURM, Launch("slurm", 5, 8)),
}
IDENTITY = [
    *((TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")),
    *((OPEN_MPI, name) for name in OPEN_MPI if name != "PMIX_RANK"),
    *((HYDRA, name) for name in ("PMI_RANK", "PMI_SIZE")),
    *((SLURM, name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")),
]


def variables(*but: str) -> pytest.MarkDecorator:
    """A case for each variable, `but` some."""
    cases = [(environ, name) for environ, name in IDENTITY if name not in but]
    return pytest.mark.parametrize(("environ", "name"), cases, ids=[name for _, name in cases])


def test_no_launcher_is_one_process():
    assert detect({"HOME": "/root"}) == Launch("single", 0, 1)


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_each_launcher_is_found(launcher):
    environ, launch = LAUNCHES[launcher]
    assert detect(environ) == launch


@pytest.mark.parametrize(
    ("inner", "outer"), [("torchrun", "open_mpi"), ("torchrun", "slurm"), ("open_mpi", "slurm"), ("hydra", "slurm")]
)
def test_innermost_launcher_wins(inner, outer):
    assert detect({**LAUNCHES[outer][0], **LAUNCHES[inner][0]}) == LAUNCHES[inner][1]


def test_pmi_of_plain_srun_is_slurm():
    assert detect({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", "PMIX_RANK": "5"}) == LAUNCHES["slurm"][1]


def test_batch_script_interactive_and_batch_step_are_one_process():
    assert detect(SLURM_JOB).kind == "single"
    for step in ("4294967290", "4294967291"):
        assert detect({**SLURM_JOB, "SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1"}).kind == "single"


@variables("SLURM_STEP_NUM_TASKS")  # without it there is no step
def test_missing_variable_is_named(environ, name):
    with pytest.raises(InvalidUsage, match=rf"\b{name} is missing"):
        detect({key: value for key, value in environ.items() if key != name})


@variables()
@given(value=st.text(max_size=30))
def test_not_a_number_is_named(environ, name, value):
    assume(not (value.isascii() and value.isdigit()))
    with pytest.raises(InvalidUsage, match=rf"\b{name}"):
        detect({**environ, name: value})


OUT_OF_RANGE = [
    (environ, name, value)
    for environ, name in IDENTITY
    for value in ("99999999", "9" * 30, "1" * 10000)
    if len(value) > 20 or not name.endswith(("SIZE", "TASKS"))  # a large world is in order
]


@pytest.mark.parametrize(
    ("environ", "name", "value"), OUT_OF_RANGE, ids=[f"{name}-{len(value)}" for _, name, value in OUT_OF_RANGE]
)
def test_out_of_range_is_named(environ, name, value):
    with pytest.raises(InvalidUsage, match=rf"\b{name}={value[:30]}"):
        detect({**environ, name: value})


@given(rank=st.integers(0, 12), size=st.integers(0, 12))
def test_every_combination_is_right_or_refused(rank, size):
    environ = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}
    if rank < size:
        assert detect(environ) == Launch("mpi", rank, size)
    else:
        with pytest.raises(InvalidUsage, match="OMPI_COMM_WORLD"):
            detect(environ)


def test_master_address_is_needed_by_several_ranks_only():
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    assert detect(alone) == Launch("torchrun", 0, 1)
    with pytest.raises(InvalidUsage, match="MASTER_ADDR is missing"):
        detect({**alone, "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login1", "login1"),
        ("a,b", "a"),
        ("gpu[03-05,9],x1", "gpu03"),
        ("r1-[7,9]", "r1-7"),
        ("n[001].cluster", "n001.cluster"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
    ],
)
def test_first_host(hosts, first):
    assert slurm.first_host({"SLURM_NODELIST": hosts}) == first


@pytest.mark.parametrize("hosts", ["", "[1-3]", "a[", "a[x]", "a b"])
def test_unreadable_hosts_are_refused_by_name(hosts):
    with pytest.raises(InvalidUsage, match="SLURM_NODELIST"):
        slurm.first_host({"SLURM_NODELIST": hosts})


@given(job=st.integers(0, 2**32), step=st.integers(0, 100))
def test_slurm_port_is_derived_and_usable(job, step):
    environ = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_NODELIST": "a,b"}
    host, port = slurm.master(environ)
    assert host == "a"
    assert 10000 <= port < 30000
    assert slurm.master({**environ, "MASTER_ADDR": "m", "MASTER_PORT": "7"}) == ("m", 7)


# ---- exchange, with ranks as threads over one store ----


def exchange_all(payloads, shared, timeout=20.0, absent=()):
    """What each rank's exchange of each of its payloads gave; an exception where it raised."""
    size = len(payloads)

    def run(rank):
        exchange = store.StoreExchange(shared, rank, size, timeout, 5.0)
        try:
            return [exchange(payload) for payload in payloads[rank]] if rank not in absent else None
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@given(payloads=st.lists(st.tuples(st.binary(max_size=99), st.binary(max_size=99)), min_size=1, max_size=4))
def test_exchange_gives_every_payload_in_rank_order(payloads):
    first, second = ([pair[i] for pair in payloads] for i in (0, 1))
    assert exchange_all(payloads, dist.HashStore()) == [[first, second]] * len(payloads)


def test_exchange_over_tcp(server):
    payloads = [[b"\0\xff", bytes([rank]) * 65536] for rank in range(3)]
    assert exchange_all(payloads, server) == [[[b"\0\xff"] * 3, [pair[1] for pair in payloads]]] * 3


def test_exchange_names_the_ranks_that_did_not_come(server):
    results = exchange_all([[b"x"]] * 4, server, timeout=1.0, absent=(1, 3))
    for rank in (0, 2):
        assert isinstance(results[rank], Timeout)
        assert str(results[rank]).startswith("ranks 1, 3 did not join")
        assert "within 1 s" in str(results[rank])


@pytest.mark.parametrize("text", [b"", b"annotations of no class", b"Unheard of", b"\xff\xfe"])
def test_an_error_of_an_unknown_kind_is_raised_all_the_same(text):
    """Of another build, which is found out only later."""
    error = as_error(text)
    assert type(error) is Aborted
    assert text.decode(errors="replace").strip() in str(error)


def test_errors_keep_their_kind():
    for error in (PeerLost("rank 2 died"), Timeout("rank 1 did not join")):
        told = as_error(failure_notice(0, error))
        assert (type(told), str(told)) == (type(error), str(error))
    assert type(as_error(failure_notice(0, InvalidUsage("no such interface")))) is Aborted


def test_lost_store_is_a_lost_peer():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    exchange = store.StoreExchange(client, 1, 2, 20.0, 5.0)
    del server
    with pytest.raises(PeerLost, match=r"rank 1 waited for ranks 0, 1"):
        exchange(b"x")


def test_nobody_listening_names_rank_0_and_the_address():
    with pytest.raises(Timeout, match=r"rank 0 did not listen at 127\.0\.0\.1:1 \(Connection refused; .* within 0.2 s"):
        store.open_store("127.0.0.1", 1, 1, 2, 0.2, 5.0)


def test_an_address_that_is_none_is_told_with_why(monkeypatch, caplog):
    def connect(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", connect)
    said = r"rank 0 did not listen at nod1:1 \(Name or service not known; MASTER_ADDR"
    with caplog.at_level(logging.WARNING, "syncengine"), pytest.raises(Timeout, match=said):
        store.open_store("nod1", 1, 1, 2, 0.2, 0.0)
    assert "(Name or service not known; MASTER_ADDR" in caplog.text


def test_who_comes_behind_the_launchers_end_does_not_wait_for_it(monkeypatch):
    """Launchers serve the store before they start ranks."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(store, "_AGENT_ANSWERS", 0.2)
    with pytest.raises(Timeout, match=r"has the launcher, which listens there, ended\?"):
        store.open_store("127.0.0.1", 1, 1, 2, 1000.0, 1000.0)


def test_occupied_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidUsage, match="another program"):
        store.open_store("127.0.0.1", taken.getsockname()[1], 0, 2, 1.0, 5.0)


def test_long_wait_is_logged_once(caplog):
    looks = iter([{0, 2}, {0, 2}, {2}, {2}, {2}, set()])
    with caplog.at_level(logging.WARNING, "syncengine"):
        wait_for_ranks(lambda: next(looks), "join", 60.0, 0.0)
    assert [record.message for record in caplog.records] == ["waiting since 0 s: ranks 0, 2 did not join yet"]
