"""System calls that the kernel refuses to this process, as it does in sandboxes."""

from __future__ import annotations

import ctypes
import errno

import pytest


class _Longer(ctypes.Structure):
    """libseccomp's scmp_arg_cmp: a call whose third argument is greater than `most`."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("most", ctypes.c_uint64), ("_", ctypes.c_uint64))


def refuse(*calls: str, code: int = errno.ENOSYS, longer: int | None = None) -> None:
    """From now on: by a filter as container runtimes set. `longer`: only where the third argument is greater."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    seccomp.seccomp_init.argtypes = [ctypes.c_uint32]
    seccomp.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
    ]
    seccomp.seccomp_load.argtypes = [ctypes.c_void_p]
    context = seccomp.seccomp_init(0x7FFF0000)
    for call in calls:
        number = seccomp.seccomp_syscall_resolve_name(call.encode())
        third = (_Longer * 1)((2, 6, longer or 0, 0))  # SCMP_CMP_GT
        count = 0 if longer is None else 1
        assert seccomp.seccomp_rule_add_array(context, 0x00050000 | code, number, count, third) == 0
    assert seccomp.seccomp_load(context) == 0


def has_seccomp() -> bool:
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return False
    return True


needs_seccomp = pytest.mark.skipif(not has_seccomp(), reason="no libseccomp.so.2 (Debian: libseccomp2)")
