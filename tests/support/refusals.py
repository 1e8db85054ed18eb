"""System calls that the kernel refuses to this process, as it does in sandboxes."""

from __future__ import annotations

import ctypes
import errno

import pytest


def refuse(*calls: str, code: int = errno.ENOSYS) -> None:
    """From now on: by a filter as container runtimes set."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    seccomp.seccomp_init.argtypes = [ctypes.c_uint32]
    seccomp.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
    seccomp.seccomp_load.argtypes = [ctypes.c_void_p]
    context = seccomp.seccomp_init(0x7FFF0000)
    for call in calls:
        number = seccomp.seccomp_syscall_resolve_name(call.encode())
        assert seccomp.seccomp_rule_add(context, 0x00050000 | code, number, 0) == 0
    assert seccomp.seccomp_load(context) == 0


def has_seccomp() -> bool:
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return False
    return True


needs_seccomp = pytest.mark.skipif(not has_seccomp(), reason="no libseccomp.so.2 (Debian: libseccomp2)")
