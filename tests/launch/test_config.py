"""Settings: where they come from, and that a bad one is refused by name."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncengine.config import DEFAULT_TIMEOUT, NUMERICS, Config
from syncengine.connect import _listen
from syncengine.errors import InvalidUsage, SyncError, Timeout


def test_defaults():
    config = Config.read({})
    assert config == Config("rank_order", None, 0, 5.0)
    options = config.options(DEFAULT_TIMEOUT)
    assert options.timeout == DEFAULT_TIMEOUT
    assert options.arena_bytes == 0


def test_argument_wins_over_variable_wins_over_default():
    environ = {"SYNCENGINE_NUMERICS": "ring", "SYNCENGINE_TIMEOUT": "7.5", "SYNCENGINE_ARENA_BYTES": "4096"}
    config = Config.read(environ, timeout=3, numerics=None)
    assert config == Config("ring", 3.0, 4096, 5.0)
    assert config.options(DEFAULT_TIMEOUT).timeout == 3.0


def test_settings_between_hosts():
    environ = {"SYNCENGINE_CHECKSUM": "1", "SYNCENGINE_SOCKETS": "2", "SYNCENGINE_SECRET": "a secret of 16 bytes"}
    config = Config.read(environ, interface="eth0")
    assert (config.checksum, config.sockets, config.interface) == (True, 2, "eth0")
    assert config.network("lo").interface == "eth0"
    assert Config.read(environ).network("lo").interface == "lo"
    assert config.network("").secret == "a secret of 16 bytes"
    assert "a secret" not in repr(config)
    assert not Config.read({"SYNCENGINE_CHECKSUM": "0"}).checksum


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^lo"}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, "^lo,docker"),
        ({"SYNCENGINE_INTERFACE": "=ib0", "GLOO_SOCKET_IFNAME": "eth0"}, "=ib0"),
    ],
)
def test_the_interface_may_be_that_of_gloo_or_nccl(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: str
):
    for name in ("SYNCENGINE_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    bootstrap = SimpleNamespace(listen=lambda network: network.interface.encode())
    assert _listen(lambda payload: [payload], Config.read(os.environ), bootstrap, []) == [expected.encode()]


def test_timedelta_is_a_timeout():
    assert Config.read({}, timeout=timedelta(minutes=2)).timeout == 120.0


@given(numerics=st.sampled_from(NUMERICS), seconds=st.floats(1e-3, 1e9))
def test_variable_means_the_same_as_argument(numerics, seconds):
    environ = {"SYNCENGINE_NUMERICS": numerics, "SYNCENGINE_TIMEOUT": repr(seconds)}
    assert Config.read(environ) == Config.read({}, numerics=numerics, timeout=seconds)


@pytest.mark.parametrize("variable", ["SYNCENGINE_SECRET", "SYNCENGINE_SECRET_FILE"])
def test_an_empty_secret_is_not_the_same_as_none(variable):
    with pytest.raises(InvalidUsage, match=f"{variable} is set, but empty"):
        Config.read({variable: ""})


BAD_VALUES = {
    ("numerics", "rank_order"): ["RING", ""],
    ("timeout", "seconds"): ["0", "-1", "nan", "inf", "soon"],
    ("arena_bytes", "bytes"): ["1.5", "1GiB", "0", str(2**47)],
    ("log_after", "seconds"): [""],
    ("interhost", "tcp, mpi, torch"): ["udp"],
    ("sockets", "from 1 to 16"): ["0", "17", "two"],
    ("checksum", "1 or 0"): ["yes"],
    ("silence", "at least 1"): ["0", "0.5"],
    ("silence", "seconds"): ["nan", "long"],
}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [(name, value, allowed) for (name, allowed), values in BAD_VALUES.items() for value in values],
)
def test_bad_value_is_refused_by_name(name, value, allowed):
    for read, source in (
        (lambda: Config.read({}, **{name: value}), name),
        (lambda: Config.read({f"SYNCENGINE_{name.upper()}": value}), f"SYNCENGINE_{name.upper()}"),
    ):
        with pytest.raises(InvalidUsage) as caught:
            read()
        text = str(caught.value)
        assert text.startswith(f"{source}={value!r}")
        assert allowed in text


@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf"), [], 0])
def test_arena_bytes_is_a_whole_number(value):
    with pytest.raises(InvalidUsage, match="arena_bytes"):
        Config.read({}, arena_bytes=value)


def test_errors_are_what_users_catch():
    assert issubclass(Timeout, TimeoutError)
    assert issubclass(InvalidUsage, ValueError)
    assert issubclass(SyncError, RuntimeError)
    assert str(Timeout("rank 1 did not come")) == "rank 1 did not come"
