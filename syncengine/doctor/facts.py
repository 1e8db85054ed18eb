"""The facts of this rank. If a part of them can't be found, its error is a fact. Works without the extension."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from syncengine.config import Config

if TYPE_CHECKING:
    from syncengine.launch import Launch  # imports torch, which may be what is broken

Facts = dict[str, Any]

PROBE_BYTES = 1 << 20
OTHER_PROJECT = "the distribution syncengine"
_SHOWN = ("TORCH_DEVICE_BACKEND_", "OMP_", "MKL_NUM_", "GLOO_SOCKET_", "NCCL_SOCKET_", "MASTER_")
# Variables that something other than Config reads: the report must not call them unknown.
_OTHER_VARIABLES = ("SYNCENGINE_ISA", "SYNCENGINE_HOST_ID", "SYNCENGINE_PATCH")


def collect_facts(launch: Launch, import_error: str) -> Facts:
    """The facts of this process, for JSON. `import_error`: why syncengine could not be imported, or ""."""
    parts: dict[str, Callable[[], Any]] = {
        "extension": lambda: _extension(import_error),
        "versions": _versions,
        "cpus": _cpus,
        "memory": _memory,
        "descriptors": _descriptors,
        "settings": _settings,
        "cuda": _cuda,
        "entry_point": _entry_point,
    }
    facts: Facts = {
        "rank": launch.rank,
        "world_size": launch.world_size,
        "launcher": launch.kind,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "variables": _variables(),
        "unknown_variables": _unknown_variables(),
    }
    for name, part in parts.items():
        try:
            facts[name] = part()
        except Exception as error:  # whatever is broken here is what this is for
            facts[name] = {"error": f"{type(error).__name__}: {error}"}
    return facts


def _extension(import_error: str) -> dict[str, Any]:
    if import_error:
        return {"error": import_error}
    from syncengine import _C

    found = {
        "file": _C.__file__,
        "build": _C.build_id,
        "has_cuda": _C.has_cuda,
        "has_test_hooks": _C.has_test_hooks,
        "interfaces": _C.network_interfaces(),
    }
    for name, call in (
        ("instruction_set", _C.instruction_set),
        ("host_key", lambda: _C.host_key(os.environ.get("SYNCENGINE_HOST_ID", ""))),
        ("shared_memory", lambda: _C.probe_shared_memory(PROBE_BYTES)),
        ("death_notices", _C.death_notices),
    ):
        try:
            found[name] = call()
        except Exception as error:
            found[f"{name}_error"] = str(error)
    return found


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("syncengine-torch", "torch", "numpy", "mpi4py", "syncengine"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    # The package index's `syncengine` is another project that installs the same folder: its version has its own key.
    names = {"syncengine-torch": "syncengine", "syncengine": OTHER_PROJECT}
    return {names.get(package, package): version for package, version in found.items()}


def _cpus() -> dict[str, Any]:
    import torch

    affinity = sorted(os.sched_getaffinity(0))
    found = {"affinity": affinity, "of_machine": os.cpu_count(), "threads": torch.get_num_threads()}
    try:
        from syncengine._C import machine

        return {**found, "available": machine()["available_cores"]}
    except ImportError:
        return {**found, "available": len(affinity)}


def _memory() -> dict[str, Any]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    found: dict[str, Any] = {"address_space": None if limit == resource.RLIM_INFINITY else limit}
    try:
        from syncengine._C import machine
    except ImportError:
        return found
    return {**found, "available": machine()["available_memory"], "total": machine()["total_memory"]}


def _descriptors() -> dict[str, int]:
    try:
        from syncengine._C import machine
    except ImportError:
        return {"limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    return {"limit": machine()["most_descriptors"], "open": machine()["open_descriptors"]}


def _settings() -> dict[str, Any]:
    config = Config.read(os.environ)
    has_secret = bool(config.secret or config.secret_file)
    return {**config.shared(), "interface": config.interface, "has_secret": has_secret}


def _cuda() -> dict[str, Any]:
    import torch

    devices = torch.cuda.device_count() if torch.version.cuda else 0
    names = [torch.cuda.get_device_name(i) for i in range(devices)]
    return {"version": torch.version.cuda, "devices": names}


def _entry_point() -> dict[str, bool]:
    """Whether torch finds the entry point, by which the backend and SYNCENGINE_PATCH work without an import."""
    installed = [point.name for point in importlib.metadata.entry_points(group="torch.backends")]
    switch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")  # as torch reads it
    return {"installed": "syncengine" in installed, "switched_off": switch != "1"}


def _variables() -> dict[str, str]:
    """The variables that matter to syncengine; of secrets only that they are set."""
    return {
        name: "(set)" if name == "SYNCENGINE_SECRET" else value
        for name, value in sorted(os.environ.items())
        if name.startswith(("SYNCENGINE_", *_SHOWN))
    }


def _unknown_variables() -> dict[str, str]:
    """The variables SYNCENGINE_* that nothing reads, each with the name that was probably meant, or ""."""
    known = [f"SYNCENGINE_{setting.name.upper()}" for setting in fields(Config)] + [*_OTHER_VARIABLES]
    return {
        name: next(iter(difflib.get_close_matches(name, known, 1, 0.8)), "")
        for name in sorted(os.environ)
        if name.startswith("SYNCENGINE_") and not name.startswith("SYNCENGINE_TEST_") and name not in known
    }
