"""Hosts that are real to the kernel: network namespaces on one switch, each with a link that tests can slow or cut.

Needs the right to make namespaces (root, or unprivileged user namespaces), `ip` and `tc`. They live as long as the
processes that hold them, which end with the test run however that ends.
"""

import contextlib
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

INTERFACE = "eth0"  # each host's


def why_not() -> str | None:
    """Why no hosts can be made here, or None."""
    for tool in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"needs the program {tool}"
    try:
        namespace = _Namespace()
    except RuntimeError as error:
        return f"no network namespaces: {error}"
    namespace.end()
    return None


def _enter(namespaces: Sequence[int], rank: int) -> None:
    """Moves this process, of one thread, to where the process namespaces[rank] is."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net",) if os.geteuid() == 0 else ("user", "net"):
        with Path(f"/proc/{namespaces[rank]}/ns/{kind}").open() as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns failed for a namespace of kind {kind}")


class _Namespace:
    """A network namespace, held by a process that ends when this one does."""

    def __init__(self, within: "_Namespace | None" = None) -> None:
        make = ["unshare", "--net"]
        if within is None and os.geteuid() != 0:
            make = ["unshare", "--user", "--map-root-user", "--net"]
        command = [*(within.enter if within else []), *make, "sh", "-c", "echo here; exec cat"]
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if self._holder.stdout.readline() != "here\n":
            text = self._holder.stderr.read().strip()
            self.end()
            raise RuntimeError(text or "unshare failed")
        self.pid = self._holder.pid
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self.enter = ["nsenter", f"--target={self.pid}", *user, "--net"]

    def do(self, line: str) -> str:
        return subprocess.run(
            [*self.enter, *line.split()], check=True, capture_output=True, text=True, timeout=120
        ).stdout

    def end(self) -> None:
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            pipe.close()
        self._holder.wait(120)


class Hosts:
    """`count` hosts on one switch: host i is 10.77.0.<i + 1> and fd77::<i + 1>, on an interface named eth0.

    `rate` limits what each host sends and what each receives, as `tc` spells it ("1gbit").
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self._namespaces: list[_Namespace] = []
        try:
            self._switch = self._new()
            self._switch.do("ip link add name switch type bridge")
            self._switch.do("ip link set switch up")
            self._hosts = [self._add(i, rate) for i in range(count)]
        except BaseException:
            self.end()
            raise

    def _new(self) -> _Namespace:
        self._namespaces.append(_Namespace(self._namespaces[0] if self._namespaces else None))
        return self._namespaces[-1]

    def _add(self, i: int, rate: str | None) -> _Namespace:
        host, switch = self._new(), self._switch
        switch.do(f"ip link add port{i} type veth peer name {INTERFACE} netns {host.pid}")
        switch.do(f"ip link set port{i} master switch up")
        host.do("ip link set lo up")
        host.do(f"ip address add 10.77.0.{i + 1}/24 dev {INTERFACE}")
        host.do(f"ip address add fd77::{i + 1:x}/64 dev {INTERFACE} nodad")
        host.do(f"ip link set {INTERFACE} up")
        if rate:
            shape = f"root tbf rate {rate} burst 128kb latency 50ms"
            host.do(f"tc qdisc add dev {INTERFACE} {shape}")
            switch.do(f"tc qdisc add dev port{i} {shape}")
        return host

    def entering(self, places: Sequence[int]) -> Callable[[int], None]:
        """Moves the process that calls it with its rank to the host places[rank]."""
        return functools.partial(_enter, [self._hosts[host].pid for host in places])

    def entering_switch(self) -> Callable[[int], None]:
        """Moves the process that calls it with 0 to the switch, whose loopback interface is down."""
        return functools.partial(_enter, [self._switch.pid])

    def start(self, host: int, command: list[str], **options: Any) -> subprocess.Popen:
        """Runs a program on that host."""
        return subprocess.Popen([*self._hosts[host].enter, *command], **options)

    def blackhole(self, host: int) -> None:
        """What it sends and what is sent to it disappears, without any error."""
        self._switch.do(f"ip link set port{host} nomaster")

    def heal(self, host: int) -> None:
        """Ends a blackhole."""
        self._switch.do(f"ip link set port{host} master switch")

    def cut(self, host: int) -> None:
        """Its cable is pulled: the interface loses its carrier."""
        self._switch.do(f"ip link set port{host} down")

    @contextlib.contextmanager
    def resetting(self, host: int, towards: str) -> Iterator[None]:
        """All connections of `host` are reset by a box on the way: towards "near" (that host), "far", or "both"."""
        middlebox = [sys.executable, str(Path(__file__).with_name("middlebox.py"))]
        command = [*self._switch.enter, *middlebox, f"port{host}", "switch", towards]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as box:
            try:
                assert box.stdout.readline() == "it has begun\n"
                yield
            finally:
                box.kill()

    def bytes_sent(self, host: int) -> int:
        """By its interface, since it is up."""
        (link,) = json.loads(self._hosts[host].do(f"ip -json -statistics link show {INTERFACE}"))
        return link["stats64"]["tx"]["bytes"]

    def end(self) -> None:
        """All hosts go. Programs that still run there keep theirs."""
        for namespace in reversed(self._namespaces):
            namespace.end()
        self._namespaces.clear()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.end()
