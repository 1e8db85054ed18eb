"""System calls that the kernel refuses to this process, as it does in sandboxes."""

import ctypes
import errno
import shutil
import subprocess
from ctypes import c_int, c_uint, c_uint32, c_uint64, c_void_p

import pytest

_COMPARISONS = {"==": 4, ">": 6}  # SCMP_CMP_EQ, SCMP_CMP_GT


class _Argument(ctypes.Structure):
    """libseccomp's scmp_arg_cmp: a comparison of one of a call's arguments."""

    _fields_ = (("place", c_uint), ("op", c_int), ("with_", c_uint64), ("_", c_uint64))


def refuse(*calls: str, code: int = errno.ENOSYS, where: tuple[int, str, int] | None = None) -> None:
    """From now on: by a filter as container runtimes set. `where`: (2, ">", 28) is only if argument 2 exceeds 28."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = c_void_p
    seccomp.seccomp_init.argtypes = [c_uint32]
    seccomp.seccomp_rule_add_array.argtypes = [c_void_p, c_uint32, c_int, c_uint, c_void_p]
    seccomp.seccomp_load.argtypes = [c_void_p]
    context = seccomp.seccomp_init(0x7FFF0000)
    for call in calls:
        number = seccomp.seccomp_syscall_resolve_name(call.encode())
        place, how, value = where or (0, "==", 0)
        compared = (_Argument * 1)((place, _COMPARISONS[how], value, 0))
        count = 0 if where is None else 1
        assert seccomp.seccomp_rule_add_array(context, 0x00050000 | code, number, count, compared) == 0
    assert seccomp.seccomp_load(context) == 0


def has_seccomp() -> bool:
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return False
    return True


def may_unshare(*namespaces: str) -> bool:
    """Whether this process may make such namespaces, by options of unshare(1)."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", *namespaces, "true"], check=False, capture_output=True).returncode == 0


needs_seccomp = pytest.mark.skipif(not has_seccomp(), reason="no libseccomp.so.2 (Debian: libseccomp2)")
