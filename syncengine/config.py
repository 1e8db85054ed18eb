"""The settings of a communicator: one frozen object, read in one place from arguments and SYNCENGINE_* variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from syncengine.errors import InvalidUsage

if TYPE_CHECKING:
    from syncengine._C import JobOptions, NetworkOptions

Op = Literal["sum", "avg", "product", "min", "max"]
Numerics = Literal["rank_order", "ring", "fast"]
NUMERICS = get_args(Numerics)
MOST_SOCKETS = 16
MOST_RANKS = 64  # that can be connected
LEAST_SILENCE = 1.0  # seconds: four heartbeats

DEFAULT_TIMEOUT = 1800.0  # seconds: rank 0 may be evaluating or saving meanwhile
DEFAULT_LOG_AFTER = 5.0
_MAX_SECONDS = 1e9  # 30 years; the engine counts nanoseconds in 64 bits


@dataclass(frozen=True)
class Config:
    """Settings of a communicator. The ones from `interhost` to `secret_file` matter only with several hosts."""

    numerics: str = "rank_order"  # order of summation: rank_order, ring, fast
    timeout: float | None = None  # seconds a collective may wait; None: the process group's, else DEFAULT_TIMEOUT
    arena_bytes: int = 0  # limit of the memory for `empty` and staging on this rank; 0: as much as the machine has
    log_after: float = DEFAULT_LOG_AFTER  # seconds of waiting after which one line says for whom
    gradient_memory: str = "arena"  # where large gradients lie: arena (reduced in place), torch (staged)
    host_id: str = ""  # ranks with different ones are on different hosts, though they share a machine
    interhost: str = "tcp"  # what connects hosts: tcp, mpi, torch
    interface: str = ""  # where to listen: a name, a prefix, an address; "": see connect.py
    sockets: int = 4  # connections a peer
    checksum: bool = False  # of all data between hosts, beside the transport's own
    silence: float = 30.0  # seconds without a heartbeat after which a rank of another host is lost
    secret: str = field(default="", repr=False)  # by which ranks of different hosts authenticate each other
    secret_file: str = ""  # a file that contains the secret
    trace: str = ""  # a directory: what happens on this rank is recorded there from the start
    summary: bool = True  # whether rank 0 says on stderr, at the end of a run, how its steps went

    @classmethod
    def read(cls, environ: Mapping[str, str], **given: Any) -> Config:
        """Takes each setting from `given` unless None, else from SYNCENGINE_<NAME> in `environ`, else the default.

        Raises InvalidUsage naming the argument or variable, its value, and what is allowed.
        """
        values = cls.parsed(given)
        for setting in fields(cls):
            name, variable = setting.name, f"SYNCENGINE_{setting.name.upper()}"
            if name not in values and variable in environ:
                values[name] = _PARSE[name](environ[variable], variable)
        return cls(**values)

    @staticmethod
    def parsed(given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in `given` that are not None, parsed and checked."""
        return {name: _PARSE[name](value, name) for name, value in given.items() if value is not None}

    def options(self, timeout: float) -> JobOptions:
        """Makes the extension's JobOptions. `timeout`, in seconds, is used if this object's timeout is None."""
        from syncengine._C import JobOptions, has_test_hooks  # the doctor reads settings where it can't be loaded

        options = JobOptions()
        for name in ("numerics", "arena_bytes", "gradient_memory", "log_after", "host_id"):
            setattr(options, name, getattr(self, name))
        options.timeout = timeout if self.timeout is None else self.timeout
        if has_test_hooks:  # tests force each way of the bytes, on all ranks alike
            options.algorithm = os.environ.get("SYNCENGINE_TEST_ALGORITHM", "auto")
            options.host_algorithm = os.environ.get("SYNCENGINE_TEST_HOST_ALGORITHM", "auto")
        return options

    def shared(self) -> dict[str, Any]:
        """The settings that must be the same on all ranks."""
        return {name: getattr(self, name) for name in ("numerics", "interhost", "sockets", "checksum")}

    def network(self, interface: str) -> NetworkOptions:
        """Makes the extension's NetworkOptions, for TCP. `interface` is used if this object's interface is ""."""
        from syncengine._C import NetworkOptions

        options = NetworkOptions()
        options.interface = self.interface or interface
        for name in ("sockets", "checksum", "log_after", "silence", "secret", "secret_file"):
            setattr(options, name, getattr(self, name))
        return options


def _invalid(name: str, value: Any, allowed: str) -> InvalidUsage:
    return InvalidUsage(f"{name}={value!r} is not allowed: give {allowed}")


def _choice(choices: tuple[str, ...], value: Any, name: str) -> str:
    for choice in choices:
        if value == choice:
            return choice
    raise _invalid(name, value, f"one of {', '.join(choices)}")


def _seconds(value: Any, name: str, least: float | None = None) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        parsed = -1.0
    if not 0 < parsed <= _MAX_SECONDS or (least is not None and parsed < least):  # also for NaN
        lower = "more than 0" if least is None else f"at least {least:g}"
        raise _invalid(name, value, f"seconds, {lower} and at most {_MAX_SECONDS:.0f}")
    return parsed


def _whole(most: int, allowed: str, value: Any, name: str) -> int:
    try:
        parsed = int(value)
    except (TypeError, ValueError, OverflowError):
        parsed = 0
    if not 0 < parsed <= most or isinstance(value, float):
        raise _invalid(name, value, f"a whole number {allowed}")
    return parsed


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidUsage(f"{name} must be a str, not {type(value).__name__}")
    return value


def _secret(value: Any, name: str) -> str:
    if value == "":  # what a shell makes of a file that is missing: nobody means "without"
        raise InvalidUsage(f"{name} is set, but empty: give the secret, or unset it to connect without one")
    return _text(value, name)


def _flag(value: Any, name: str) -> bool:
    parsed = {"0": False, "1": True}.get(value, value) if isinstance(value, str) else value
    if not isinstance(parsed, bool):
        raise _invalid(name, value, "True or False (1 or 0 in a variable)")
    return parsed


_PARSE: dict[str, Callable[[Any, str], Any]] = {
    "numerics": partial(_choice, NUMERICS),
    "timeout": _seconds,
    "arena_bytes": partial(_whole, 2**47 - 1, "of bytes, more than 0 and less than 2**47 (the address space)"),
    "gradient_memory": partial(_choice, ("arena", "torch")),
    "log_after": _seconds,
    "host_id": _text,
    "interhost": partial(_choice, ("tcp", "mpi", "torch")),
    "interface": _text,
    "sockets": partial(_whole, MOST_SOCKETS, f"from 1 to {MOST_SOCKETS}"),
    "checksum": _flag,
    "silence": partial(_seconds, least=LEAST_SILENCE),
    "secret": _secret,
    "secret_file": _secret,
    "trace": _text,
    "summary": _flag,
}
