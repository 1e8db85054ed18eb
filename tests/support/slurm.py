"""Slurm of one node in a folder, without systemd, cgroups or a database, as root: for `srun` itself."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ports import unused_ports

_DAEMONS = ("munged", "slurmctld", "slurmd")
_PATH = f"{os.environ['PATH']}:/usr/sbin"

is_there = os.geteuid() == 0 and all(shutil.which(name, path=_PATH) for name in (*_DAEMONS, "srun"))


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The variables by which `srun` finds it."""
    host, (control, node) = socket.gethostname().partition(".")[0], unused_ports(2)
    (folder / "key").touch(0o600)
    (folder / "key").write_bytes(os.urandom(64))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    lines = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": control,
        "SlurmdPort": node,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge.socket",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SlurmUser": "root",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        **{f"{part}PidFile": folder / f"{part}.pid" for part in ("Slurmctld", "Slurmd")},
        **{f"{part}LogFile": folder / f"{part}.log" for part in ("Slurmctld", "Slurmd")},
        "NodeName": f"{host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN",
        "PartitionName": "test Nodes=ALL Default=YES State=UP",
    }
    (folder / "slurm.conf").write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
    environ = {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": _PATH}
    everything = {**os.environ, **environ}
    munge = {"socket": "munge.socket", "key-file": "key", "pid-file": "munged.pid", "log-file": "munged.log"}
    munge["seed-file"] = "seed"
    daemons = []
    deadline = time.monotonic() + 120
    try:
        commands = [
            ["munged", "--force", "--foreground", *(f"--{name}={folder / file}" for name, file in munge.items())],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ]
        for command in commands:
            with (folder / f"{command[0]}.out").open("w") as said:
                daemons.append(subprocess.Popen(command, env=everything, stdout=said, stderr=subprocess.STDOUT))
            while command[0] == "munged" and not (folder / "munge.socket").exists():
                assert time.monotonic() < deadline, "munged made no socket"
                time.sleep(0.05)
        states = ["sinfo", "-h", "-o", "%T"]
        while b"idle" not in subprocess.run(states, env=everything, capture_output=True, check=False).stdout:
            assert all(daemon.poll() is None for daemon in daemons)
            assert time.monotonic() < deadline, "no node became idle"
            time.sleep(0.2)
        yield environ
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()
