"""What ranks on machines where all is well, or nearly, would say of themselves to `syncengine doctor`."""

from typing import Any

from syncengine.doctor.checks import Finding

MIB = 2**20


def facts(rank: int, **changes: Any) -> dict[str, Any]:
    """Of a rank on a machine where all is well."""
    well = {
        "rank": rank,
        "world_size": 1,
        "host": "a",
        "extension": {
            "build": "1",
            "has_cuda": True,
            "has_test_hooks": False,
            "instruction_set": "avx2",
            "host_key": "kernel",
            "interfaces": [["lo", "127.0.0.1"]],
        },
        "versions": {"syncengine": "1", "torch": "2", "python": "3"},
        "cpus": {"affinity": [0, 1, 2, 3], "of_machine": 4, "threads": 1, "available": 4},
        "memory": {"available": 8192 * MIB, "total": 16384 * MIB},
        "descriptors": {"limit": 1024, "open": 10},
        "settings": {"numerics": "rank_order", "interhost": "tcp", "sockets": 4, "checksum": False, "has_secret": True},
        "cuda": {"version": None, "devices": []},
        "entry_point": {"installed": True, "switched_off": False},
        "variables": {},
        "unknown_variables": {},
    }
    return {
        name: value | changes.get(name, {}) if isinstance(value, dict) else changes.get(name, value)
        for name, value in well.items()
    }


def together(*everyone: dict[str, Any], missing: int = 0) -> list[dict[str, Any]]:
    """Ranks of one job, of which `missing` more did not come."""
    return [one | {"world_size": len(everyone) + missing} for one in everyone]


def broken(rank: int, name: str, error: str, host: str = "a") -> dict[str, Any]:
    """A part of whose facts could not be had."""
    return facts(rank, host=host) | {name: {"error": error}}


def on(host: str, rank: int, **changes: Any) -> dict[str, Any]:
    return facts(rank, host=host, **changes)


def said(found: Finding) -> str:
    return f"{found.severity}, {found.name} of {found.ranks}: {found.text} -> {found.remedy}"
