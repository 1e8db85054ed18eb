"""Flower: three hosts of two ranks train on data of their own; FedAvg or FedBuff puts their weights together.

python examples/with_flower.py  # FedAvg; the ranks of host 1 are killed after the first round
python examples/with_flower.py --strategy fedbuff  # host 1 vanishes, host 2 is slow: nobody waits for these

This file starts Flower's processes and the hosts' ranks; Flower runs flower/app.py, and a rank runs flower/host.py.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from flower import host

HOSTS, KILLED, SLOW = 3, 1, 2
VERSIONS = 2
UNTIL = 1  # the slow host's first message takes until the others have made this version


def listens(port: int) -> bool:
    """Whether a process of this machine listens at the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def unused_ports(count: int) -> list[int]:
    """Unused ports of this machine, below those that the kernel may give to others while Flower starts."""
    return [port for port in random.sample(range(20_000, 32_000), 10 * count) if not listens(port)][:count]


def wait_for(condition, processes: list[subprocess.Popen], what: str) -> None:
    """Raises RuntimeError if one of the processes ends meanwhile, or after ten minutes."""
    end = time.monotonic() + 600
    while not condition():
        if time.monotonic() > end or any(process.poll() is not None for process in processes):
            raise RuntimeError(f"{what} did not come: see flower.txt")
        time.sleep(0.05)


def run(strategy: str, out: Path) -> None:
    """Starts Flower's SuperLink, a SuperNode for each host, and the host's ranks, which serve all messages."""
    ports = unused_ports(1 + 2 * HOSTS)
    link = f"127.0.0.1:{ports[0]}"
    settings = {"FLWR_HOME": str(out / "flwr"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    settings |= {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3", "OMP_NUM_THREADS": "1", "SYNCENGINE_SUMMARY": "0"}
    settings |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # Flower starts its commands by name
    settings |= {"PYTHONDONTWRITEBYTECODE": ""}  # else each of a dozen processes compiles a thousand modules of Flower
    settings |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(host.RANKS)}
    log, processes, killed = (out / "flower.txt").open("w"), [], []

    def start(*command: object, **place: object) -> subprocess.Popen:
        environment = os.environ | settings | {name: str(value) for name, value in place.items()}
        files = {"stdout": log, "stderr": log}
        processes.append(subprocess.Popen([*map(str, command)], env=environment, start_new_session=True, **files))
        return processes[-1]

    (out / "flwr").mkdir()
    (out / "flwr" / "config.toml").write_text(f'[superlink.here]\naddress = "{link}"\ninsecure = true\n')
    try:
        start("flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", ports[0])
        for number in range(HOSTS):
            address, port, master = out / f"host{number}", ports[1 + number], ports[1 + HOSTS + number]
            command = [sys.executable, host.__file__, "--host", number, "--address", address]
            if strategy == "fedbuff" and number == SLOW:
                command += ["--wait-for", out / f"version{UNTIL}.npz"]
            ranks = start(*command, MASTER_PORT=master)
            node = ["flower-supernode", "--insecure", "--superlink", link, "--port", port]
            wait_for(lambda: listens(ports[0]), processes, "the SuperLink")
            node = start(*node, "--node-config", f'socket="{address}"')
            if number == KILLED:
                killed = [ranks, node] if strategy == "fedbuff" else [ranks]
        shutil.copytree(Path(host.__file__).parent, out / "app")
        config = f'strategy="{strategy}" hosts={HOSTS} versions={VERSIONS} out="{out}"'
        start("flwr", "run", out / "app", "here", "--run-config", config).wait()
        del processes[-1]
        wait_for((out / "version1.npz").exists, processes, "the first version")
        for process in killed:
            os.killpg(process.pid, signal.SIGKILL)
        wait_for((out / "log.json").exists, [each for each in processes if each not in killed], "the last version")
    finally:
        for process in processes:
            # SIGTERM may have come in the middle of an earlier wait, which then has no end.
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                process.wait(10)


def loss_of(weights: Path) -> float:
    """The loss of a version of the weights, on the examples of all hosts."""
    with np.load(weights) as arrays, torch.no_grad():
        module = host.load(host.make(), [arrays[name] for name in arrays.files])
        pairs = [host.examples_of(number) for number in range(HOSTS)]
        return sum(torch.nn.functional.mse_loss(module(x), y).item() for x, y in pairs) / HOSTS


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("fedavg", "fedbuff"), default="fedavg")
    parser.add_argument("--out", type=Path, default=Path("outputs/with_flower"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends what this has started
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    np.savez(out / "version0.npz", *(parameter.detach().numpy() for parameter in host.make().parameters()))
    run(options.strategy, out)
    print(f"version 0: loss {loss_of(out / 'version0.npz'):.4f}")
    for version, made in enumerate(json.loads((out / "log.json").read_text()), 1):
        loss = loss_of(out / f"version{version}.npz")
        print(f"version {version}: hosts {made['host']}, from versions {made['began']}; loss {loss:.4f}")
