#!/usr/bin/env python3
"""Runs the core's tests and a training on two ranks for 64-bit ARM, which QEMU emulates on another processor.

    make arm                        compiles the core for ARM, and calls this with all stages
    python3 scripts/arm.py ranks    one stage, or several

user: the core's tests by qemu-user, whose kernel is this machine's.
kernels: tests of shared memory under Debian's kernels for ARM, with pages of 4 and of 16 KiB, which qemu-system boots.
ranks: compiles the extension with the headers of torch's wheel for ARM, and trains a small model on two ranks by
qemu-user. This machine's ranks then average the same gradients, which must give the same bits.

Debian's and pip's packages for ARM are unpacked in build/arm, 5 GB with the CUDA libraries that torch's wheel asks for;
nothing is installed. A stage is skipped if its tools are missing, or if apt has no source of Debian, as on Ubuntu: run
it in a container of debian:bookworm there.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARM = ROOT / "build" / "arm"
TESTS = ROOT / "build" / "core-arm" / "core_tests"
LIBRARIES = Path("/usr/aarch64-linux-gnu")
USER = "qemu-aarch64-static"
SYSTEM = "qemu-system-aarch64"
BY_USER, BY_SYSTEM = {USER: "qemu-user-static"}, {SYSTEM: "qemu-system-arm"}
TOOLS = {"user": BY_USER, "kernels": BY_SYSTEM, "ranks": BY_USER}
COMPILER = "aarch64-linux-gnu-g++"

# Parts of the names, or files, of tests that do not run by qemu-user, and why. Those of memory and threads run by
# kernels.
_WALK = "walks over orders of events in minutes on any processor, and computes the same on each"
_FREED = "needs MADV_REMOVE to free memory; QEMU says that it did, and the memory keeps its content"
NOT_BY_USER = {
    "engine/hosts/hosts_bits_test.cpp": "takes minutes a test",
    "engine/hosts/hosts_test.cpp": "takes minutes a test",
    "engine/hosts/messages_fuzz_test.cpp": _FREED,
    "succession_agrees": _WALK,
    "engine/lanes/schedule_test.cpp": _WALK,
    "engine/messages/messenger_test.cpp": _FREED,
    "engine/progress/engine_test.cpp": "takes minutes a test",
    "steps/lifecycle_test.cpp": _WALK,
    "transport/shm/": _FREED,
    "handshake_fuzz": "takes minutes",
    "trace_lets_go_later": "limits its address space, which QEMU does not do",
    "tcp_leaves_no_descriptor_and_starts_no_thread": "counts threads of the process, among which are QEMU's",
}
# Files of the core's tests for real kernels.
BY_KERNELS = (
    "base/ bootstrap/ engine/communicator/ends engine/hosts/messages_fuzz engine/messages/ transport/shm/"
    " transport/tcp/tcp_fault"
)
# By the size of pages in KiB: the release of Debian whose kernel it is, and the names of its packages.
KERNELS = {4: ("bookworm", r"linux-image-6[\d.-]+-arm64"), 16: ("trixie", r"linux-image-6[\d.]+\+deb13-arm64-16k")}
INIT = """#!/bin/sh
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm; mount -t tmpfs tmp /dev/shm; mount -t tmpfs tmp /tmp
ip link set lo up
export PATH=/bin TMPDIR=/tmp HOME=/tmp TEST_DEADLINE=600 SYNCENGINE_TEST_MESSAGES=10000
echo "Linux $(uname -r), of $(uname -m)"
/bin/core_tests {tests} && echo ALL-PASSED
poweroff -f
"""

PYTHON = "3.11"  # bookworm's
PYTHON_PACKAGES = (
    f"python{PYTHON}-minimal libpython{PYTHON}-minimal libpython{PYTHON}-stdlib libpython{PYTHON}-dev"
    " libc6 libgcc-s1 libstdc[+][+]6 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libuuid1"
).split()
# In these files torch looks for the kind of processor; qemu-user would show it this machine's.
CPU_FILES = {
    "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd crc32 atomics fphp asimdhp asimdrdm asimddp\n"
    "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n",
    "sys/devices/system/cpu/possible": "0\n",
    "sys/devices/system/cpu/present": "0\n",
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000413fd0c1\n",
}
PROGRAM = """
import hashlib, sys, torch, syncengine

folder, replayed = sys.argv[1], sys.argv[2] == "replay"
torch.set_num_threads(1)
syncengine.init()
rank = syncengine.rank()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7)).to(dtype)
    model = syncengine.Parallel(net)
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)
    own, losses = [], []
    if not replayed:
        for i, parameter in enumerate(parameters):
            parameter.register_hook(lambda gradient, i=i: own[-1].update({i: gradient.clone()}))
    path = f"{folder}/{dtype}-{rank}.pt"
    seen = torch.load(path) if replayed else []
    inputs = torch.randn(32, 40, generator=torch.Generator().manual_seed(rank)).to(dtype)
    targets = inputs[:, :7].tanh()
    averages = hashlib.sha256()
    for step in range(8):
        own.append({})
        outputs = model(inputs)
        if replayed:  # a loss that has the gradients which ARM's rank had
            loss = sum((parameter * seen[step][i]).sum() for i, parameter in enumerate(parameters))
        else:
            loss = torch.nn.functional.mse_loss(outputs, targets)
            losses.append(loss.item())
        loss.backward()
        for parameter in parameters:
            averages.update(parameter.grad.view(torch.uint8).numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    if not replayed:
        assert losses[-1] < losses[0], losses
        torch.save(own, path)
    weights = hashlib.sha256(b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in parameters))
    print(f"{dtype} averages {averages.hexdigest()[:24]} weights {weights.hexdigest()[:24]}", flush=True)
syncengine.shutdown()
"""


def mirror() -> str | None:
    """The address from which this machine has Debian's packages, if it is one of Debian."""
    query = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian", "Component: main"]
    found = subprocess.run(query, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return found[0] if found else None


def apt(release: str, *command: str) -> str:
    """Calls apt-get or apt-cache for ARM's packages of a release of Debian, from this machine's mirror."""
    state = ARM / release
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (state / "sources.list").write_text(f"deb [signed-by={key}] {mirror()} {release} main\n")
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
    }
    words = [command[0], "-q", *(f"-o{name}={value}" for name, value in options.items()), *command[1:]]
    return subprocess.run(words, cwd=state, check=True, stdout=subprocess.PIPE, text=True).stdout


def unpack(release: str, names: list[str], to: Path) -> Path:
    """Unpacks packages that a pattern each names, in their newest versions, unless that was done."""
    if (to / "ready").exists():
        return to
    apt(release, "apt-get", "update")
    there = apt(release, "apt-cache", "pkgnames").split()
    for pattern in names:
        found = [name for name in there if re.fullmatch(pattern, name)]
        name = max(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
        apt(release, "apt-get", "download", name)
    for archive in (ARM / release).glob("*.deb"):
        subprocess.run(["dpkg", "-x", archive, to], check=True)
        archive.unlink()
    (to / "ready").touch()
    return to


def by_user() -> bool:
    """Runs most of the core's tests by qemu-user, in two parts side by side; returns whether all passed."""
    tests = "".join(f"{path}\n{path.read_text()}" for path in ROOT.glob("tests/core/**/*_test.cpp"))
    if unknown := [name for name in NOT_BY_USER if name not in tests]:
        raise SystemExit(f"arm: no such tests: {', '.join(unknown)}")
    command = [USER, "-L", LIBRARIES, TESTS, *(f"-{name}" for name in NOT_BY_USER)]
    environ = {**os.environ, "TEST_DEADLINE": "600"}
    parts = [subprocess.Popen(command, env={**environ, "TEST_PART": part}) for part in ("1/2", "2/2")]
    passed = [part.wait() == 0 for part in parts]
    print("not by qemu-user:", *(f"    {name}: {why}" for name, why in NOT_BY_USER.items()), sep="\n", flush=True)
    return all(passed)


def initramfs(busybox: Path) -> Path:
    """Writes an archive, of cpio's kind newc, of the files that a kernel starts with."""
    files = {"init": INIT.format(tests=BY_KERNELS).encode(), "bin/busybox": busybox.read_bytes()}
    files["bin/core_tests"] = TESTS.read_bytes()
    for library in ("ld-linux-aarch64.so.1", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6"):
        files[f"lib/{library}"] = (LIBRARIES / "lib" / library).read_bytes()
    entries = dict.fromkeys(("bin", "lib", "dev", "proc", "sys", "tmp", "etc"), (stat.S_IFDIR | 0o755, b""))
    entries |= {name: (stat.S_IFREG | 0o755, data) for name, data in files.items()}
    entries["bin/sh"] = (stat.S_IFLNK | 0o777, b"/bin/busybox")
    path = ARM / "initramfs.gz"
    with gzip.open(path, "wb", 1) as archive:
        for i, (name, (mode, data)) in enumerate([*sorted(entries.items()), ("TRAILER!!!", (0, b""))], 1):
            end = name.encode() + b"\0"
            fields = (i, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(end), 0)
            head = b"070701" + b"".join(b"%08X" % field for field in fields) + end
            archive.write(head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4))
    return path


def by_kernels() -> bool:
    """Boots each kernel, which runs tests and turns itself off; returns whether all passed."""
    passed = True
    for pages, (release, pattern) in KERNELS.items():
        busybox = unpack("bookworm", ["busybox-static"], ARM / "busybox") / "bin" / "busybox"
        (kernel,) = unpack(release, [pattern], ARM / f"linux-{pages}").glob("boot/vmlinuz-*")
        print(f"core tests by {kernel.name}, pages of {pages} KiB:", flush=True)
        machine = ["-M", "virt", "-cpu", "neoverse-n1", "-smp", "2", "-m", "3G", "-accel", "tcg,thread=multi"]
        files = ["-kernel", kernel, "-initrd", initramfs(busybox), "-nographic", "-no-reboot", "-nic", "none"]
        command = [SYSTEM, *machine, *files, "-append", "console=ttyAMA0 panic=-1 quiet loglevel=3"]
        log = ARM / f"pages-{pages}.log"
        with log.open("w") as out:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=1200, check=False)
        print(said := log.read_text(errors="replace"), flush=True)
        passed &= "ALL-PASSED" in said
    return passed


def packages_of_pip() -> Path:
    """Unpacks torch for ARM and what it needs to be imported, unless that was done."""
    site, needs = ARM / "site", ROOT / "requirements.txt"
    if not (site / "ready").exists() or (site / "ready").read_text() != needs.read_text():
        shutil.rmtree(site, ignore_errors=True)
        of = [f"--platform=manylinux_2_{i}_aarch64" for i in range(17, 29)] + ["--platform=manylinux2014_aarch64"]
        options = ["--only-binary=:all:", "--no-compile", "--no-cache-dir", f"--python-version={PYTHON}", *of]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", site, *options, "--requirement", needs]
        subprocess.run(pip, check=True)
        (site / "ready").write_text(needs.read_text())
    return site


def extension(root: Path, site: Path) -> Path:
    """Compiles the extension for ARM; returns a folder with a copy of the package that has it."""
    os.environ["CXX"] = COMPILER
    sys.path.insert(0, str(ROOT / "syncengine"))
    import _build  # behind the variable, which it reads

    package = ARM / "package"
    shutil.rmtree(package, ignore_errors=True)
    for name in ("syncengine", "syncengine_autoload"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("_ext", "__pycache__"))
    torch = _build.Torch.of(site / "torch")
    suffix = f"cpython-{PYTHON.replace('.', '')}-aarch64-linux-gnu.so"
    to = package / "syncengine" / "_ext" / _build.tag(torch.version) / f"_C.{suffix}"
    headers = [f"-isystem{root / 'usr/include' / folder}" for folder in (f"python{PYTHON}", "")]
    _build.Builder(ROOT / "csrc", ARM / "extension", ["-Werror", *headers]).build({torch: to})
    return package


def train(mode: str, command: list[object], variables: dict[str, object]) -> list[str]:
    """Runs the program on two ranks; returns what both print of averages, and what they print of weights."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
    ranks = []
    for rank in range(2):
        given = {name: str(value) for name, value in {**environ, **variables, "RANK": rank, "LOCAL_RANK": rank}.items()}
        words = [*command, "-c", PROGRAM, ARM, mode]
        ranks.append(subprocess.Popen(words, cwd=ARM, env=given, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate()[0] for rank in ranks]
    print(f"{mode}:\n{outputs[0]}", flush=True)
    if any(rank.returncode for rank in ranks) or outputs[0] != outputs[1]:
        raise SystemExit(f"arm: {mode}: the ranks failed, or differ:\n{outputs[1]}")
    return outputs[0].split()


def on_ranks() -> bool:
    """Trains on two ranks for ARM; returns whether this machine's ranks average the same gradients to the same bits."""
    root, site = unpack("bookworm", PYTHON_PACKAGES, ARM / "root"), packages_of_pip()
    for path, text in CPU_FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    package = extension(root, site)
    variables = {
        "QEMU_CPU": "neoverse-n1",
        "QEMU_LD_PREFIX": root,
        "PYTHONHOME": root / "usr",
        "PYTHONPATH": f"{package}:{site}",
        "PYTHONNOUSERSITE": 1,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",  # torch says at length that the processor has no bfloat16
        "ATEN_CPU_CAPABILITY": "default",  # by others qemu 7.2 dies of SIGSEGV
    }
    theirs = train("train", [USER, root / f"usr/bin/python{PYTHON}"], variables)
    ours = train("replay", [sys.executable], {"PYTHONPATH": ROOT})
    return theirs[2::5] == ours[2::5]


def main() -> int:
    """Runs the stages that the command line names, or all; the exit status is 1 if one failed."""
    stages = {"user": by_user, "kernels": by_kernels, "ranks": on_ranks}
    if unknown := set(sys.argv[1:]) - set(stages):
        raise SystemExit(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(stages)}")
    failed = []
    for name in sys.argv[1:] or stages:
        tools = {COMPILER: "g++-aarch64-linux-gnu", "apt-get": "apt", "dpkg": "dpkg", **TOOLS[name]}
        if missing := [package for tool, package in tools.items() if shutil.which(tool) is None]:
            print(f"arm {name}: skipped; install {' '.join(missing)} (packages of Debian)", flush=True)
        elif name != "user" and mirror() is None:
            print(f"arm {name}: skipped; apt has no source of Debian: use a container of debian:bookworm", flush=True)
        else:
            passed = stages[name]()
            print(f"arm {name}: {'passed' if passed else 'FAILED'}", flush=True)
            failed += [] if passed else [name]
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
