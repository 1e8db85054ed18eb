#!/usr/bin/env python3
"""Runs tests and benchmarks on a machine with a GPU: steps in order of worth, each with a limit and a log of its own.

    make gpu                           all steps, in at most 540 seconds
    make gpu STEPS="build faults"      some steps
    GPU_SECONDS=3000 python3 scripts/gpu_run.py     without make; the limits grow alike

A GPU may be lent for minutes: a step that hangs costs its limit and no more, a run that is cut short loses nothing, and
what `make gpu-prebuild` has built elsewhere is used. The folder $OUT (default: build/gpu-run) gets summary.txt and
run.tar.gz, with all logs and the benchmarks' results, anew after each step. COMMIT names the commit where there is no
.git. The exit status is 1 if a step failed or was left out. Needs the standard library alone; pytest-xdist and
pytest-timeout are used if they are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SECONDS = float(os.environ.get("GPU_SECONDS", "540"))
SCALE = max(1.0, SECONDS / 540)
LEAST = 15.0  # seconds; a step that would get fewer is left out
ON_ABORT = 3.0  # seconds to print stacks in, before SIGKILL
DEFAULTS = {
    # Ranks load kernels when they need them, as users' do.
    "CUDA_MODULE_LOADING": "LAZY",
    # Several ranks of several tests share the cores.
    "OMP_NUM_THREADS": "2",
    # There may be neither a name server nor a name for this machine.
    "GLOO_SOCKET_IFNAME": "lo",
    "RES_OPTIONS": "timeout:1 attempts:1",
    # cuBLAS gives the same bits on all streams.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Python prints the stacks of all threads on SIGABRT.
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    # Another compiler may give warnings that the one of `make test` does not: no reason to end here.
    "WERROR": "",
    "SYNCENGINE_TEST_CASES": "25",
    "SYNCENGINE_TEST_TURNS": "120",
}


class Step(NamedTuple):
    """A step of the run: a command with a limit and a log."""

    name: str
    seconds: float  # at most
    command: Sequence[str]
    needs: Sequence[str] = ()  # steps that must have passed


# ---- the steps ----

PROBE = r"""
import os, shutil, sys, time
print({name: shutil.which(name) for name in "make git g++ nvcc lscpu compute-sanitizer".split()}, flush=True)
os.system("nvidia-smi; nvidia-smi -q -d COMPUTE; g++ --version; lscpu; df -h /dev/shm; ulimit -l")
begin = time.time()
import torch, torch._dynamo
print("import torch:", time.time() - begin, "s,", torch.__version__, "NCCL", torch.cuda.nccl.version(), flush=True)
failed = 0
for mode in "LAZY", "EAGER":  # in forks, as the tests' ranks are: importing torch must not have begun with CUDA
    if os.fork() == 0:
        os.environ["CUDA_MODULE_LOADING"] = mode
        begin = time.time()
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        print(mode, "context:", time.time() - begin, "s, bytes free:", torch.cuda.mem_get_info()[0], flush=True)
        os._exit(0)
    failed |= os.wait()[1]
sys.exit(bool(failed))
"""
# Two builds run side by side, unless the extension that is there loads and was made of these sources.
BUILD = """
usable() {
  "$PYTHON" -c 'import torch; from syncengine import _C; assert _C.has_cuda and _C.has_test_hooks' &&
    build/core-gpu/cuda_tests gpu_driver
}
[ "$(cat build/gpu-prebuilt)" = "$SOURCES" ] && usable && exit
arch=$("$PYTHON" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
(SYNCENGINE_TEST_HOOKS=1 TORCH_CUDA_ARCH_LIST=$arch "$PYTHON" setup.py -q build_ext --inplace; echo "extension: $?") &
(make -C tests/core -j"$(nproc)" CUDA_OUT=../../build/core-gpu CUDA_ARCHS="-arch=sm_${arch/./}" cuda-tests
  echo "core: $?") &
wait
usable && echo "$SOURCES" > build/gpu-prebuilt
"""
# The driver may start a GPU anew for each first process on it, so one stays until the end.
HOLD = "import torch, time; torch.zeros(1, device='cuda'); time.sleep(86400)"


def sources() -> str:
    """A hash of all compiled sources, by which a build made before is known to be up to date."""
    files = [path for folder in ("csrc", "tests/cuda", "tests/core") for path in (ROOT / folder).rglob("*")]
    files = [path for path in files if path.suffix in (".h", ".cpp", ".cu") or path.name == "Makefile"]
    text = b"".join(path.read_bytes() for path in [*sorted(files), ROOT / "setup.py", ROOT / "syncengine/_build.py"])
    return hashlib.sha256(text).hexdigest()


def core(tests: str) -> list[str]:
    """The command for tests of the core. Ranks that are threads must not wait for each other's kernels to be loaded."""
    return ["env", "CUDA_DEVICE_MAX_CONNECTIONS=32", "CUDA_MODULE_LOADING=EAGER", "build/core-gpu/cuda_tests", tests]


def pytest(*tests: str, seconds: float = 50, workers: int = 1) -> list[str]:
    """The command for Python's tests, each of which gets `seconds`. A test's ranks end before the test."""
    limit = round(seconds * SCALE)
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--durations", "15"]
    if importlib.util.find_spec("pytest_timeout"):  # the method of threads ends what hangs in CUDA, too
        options += ["--timeout", str(limit), "--timeout-method", "thread"]
    if workers > 1 and importlib.util.find_spec("xdist"):
        options += ["--numprocesses", str(workers)]
    paths = [f"tests/cuda/test_cuda{test}" for test in tests]
    return ["env", f"SYNCENGINE_TEST_PATIENCE={limit - 10}", sys.executable, "-m", "pytest", *options, *paths]


def benchmark(name: str, options: str, out: Path) -> list[str]:
    """The command for a benchmark whose results go to `out`."""
    return [sys.executable, "-m", f"benchmarks.{name}", *shlex.split(options), "--out", str(out)]


def all_steps(results: Path) -> list[Step]:
    """All steps in order of worth: whether it works, its bits, faults, speed, the rest."""
    first = "_parallel.py::test_gradients_are_the_average_in_rank_order[2]"
    others = ("_parallel.py", "_lost_steps.py", "_models.py", "_hooks.py", "_backend.py", "_devices.py", ".py")
    sizes = "8 16Ki 128Ki 1Mi 16Mi 64Mi 256Mi"
    bits = ("_equality.py", "_conformance.py::test_processes[2]")
    trace = f"--turns 9 --trace {results}/trace.json"
    speed = benchmark("cuda_all_reduce", f"--turns 5 --sizes {sizes}", results / "cuda_all_reduce.json")
    on_cpus = "--models mlp gpt --pairs 15 --engines plain syncengine ddp"

    def all_reduce(ranks: int) -> list[str]:
        options = f"--ranks {ranks} --seconds 2 --sizes 8 64Ki 1Mi 25Mi"
        return benchmark("all_reduce", options, results / f"all_reduce-{ranks}ranks.json")

    def train_step(ranks: int) -> list[str]:
        return benchmark("train_step", f"--ranks {ranks} {on_cpus}", results / f"train_step-{ranks}ranks.json")

    return [
        Step("probe", 60, [sys.executable, "-c", PROBE]),
        Step("build", 170, ["bash", "-c", BUILD]),
        Step("core-reduce", 30, core("gpu_processes_reduce"), ["build"]),
        Step("py-two", 45, pytest(first), ["build"]),
        Step("equality", 85, pytest(*bits, seconds=75, workers=3), ["py-two"]),
        Step("core-faults", 60, core("processes_test.cpp"), ["core-reduce"]),
        Step("faults", 75, pytest("_parallel_faults.py", "_faults_in_graphs.py", workers=2), ["py-two"]),
        Step("all-reduce", 75, speed, ["build"]),
        Step("train-step", 60, benchmark("cuda_train_step", trace, results / "cuda_train_step.json"), ["py-two"]),
        Step("rest", 90, pytest(*others, workers=3), ["py-two"]),
        Step("memory", 40, pytest("_memory.py"), ["py-two"]),  # others would take some meanwhile
        Step("cpu-all-reduce-8", 35, all_reduce(8), ["build"]),
        Step("cpu-train-step-8", 60, train_step(8), ["build"]),
        Step("cpu-all-reduce-16", 35, all_reduce(16), ["build"]),
        Step("core-threads", 60, core("queues_test.cpp"), ["core-reduce"]),
        Step("conformance", 90, pytest("_conformance.py", workers=2), ["py-two"]),
        Step("hosts", 60, pytest("_hosts.py", workers=3), ["py-two"]),
        Step("memcheck", 90, pytest("_memcheck.py", seconds=85), ["core-reduce"]),
    ]  # fmt: skip


# ---- running ----


def adopt_orphans() -> None:
    """Makes processes that a step leaves behind children of this one, in whichever session they are."""
    set_child_subreaper = 36
    if ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would map the device's memory, too


def descendants(without: int) -> list[int]:
    """All processes below this one but `without`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process and child != without]
    return found[1:]


def signal_all(number: int, spared: int) -> bool:
    """Signals all descendants but `spared`. Returns whether there were any."""
    processes = descendants(spared)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
    return bool(processes)


def end_all(spared: int) -> None:
    """Kills descendants until none is left, since processes may be starting others."""
    deadline = time.monotonic() + 10  # what hangs in a driver can't be ended
    while signal_all(signal.SIGKILL, spared) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.02)


def run(step: Step, seconds: float, log: Path, spared: int) -> str:
    """Runs a step. Returns its outcome: "passed", or a text. No process of the step lives on, but for `spared`."""
    with log.open("w") as file:
        print("$", shlex.join(step.command)[:2000], file=file, flush=True)
        try:
            process = subprocess.Popen(step.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        except OSError as error:
            return f"not started: {error}"
        try:
            status = process.wait(seconds)
            outcome = "passed" if status == 0 else f"failed: exit status {status}"
        except subprocess.TimeoutExpired:
            outcome = f"hung: ended after {seconds:.0f} s"
            signal_all(signal.SIGABRT, spared)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ON_ABORT)
        process.poll()
        end_all(spared)
        return outcome


def keep(out: Path, folder: Path, rows: Sequence[str]) -> None:
    """Writes the summary and the archive into `out`, which holds whole files at any time."""
    (out / "summary.new").write_text("\n".join([f"commit {os.environ.get('COMMIT', 'unknown')}", *rows, ""]))
    with tarfile.open(out / "run.new", "w:gz") as tar:
        tar.add(folder, "run")
    (out / "run.new").rename(out / "run.tar.gz")
    (out / "summary.new").rename(out / "summary.txt")


def run_all(
    steps: Sequence[Step], out: Path, folder: Path, seconds: float, spared: int = 0, passed: Iterable[str] = ()
) -> bool:
    """Runs all steps. Returns whether all passed. Logs go to `folder`; the steps in `passed` need not run."""
    end = time.monotonic() + seconds
    good, rows = set(passed), []
    for step in steps:
        begin = time.monotonic()
        room = end - begin - ON_ABORT
        log = folder / f"{step.name}.log"
        if missing := [name for name in step.needs if name not in good]:
            outcome = f"left out: needs {', '.join(missing)}"
        elif room < min(LEAST, step.seconds):
            outcome = "left out: no time"
        else:
            outcome = run(step, min(step.seconds, room), log, spared)
        good |= {step.name} if outcome == "passed" else set()
        rows.append(f"{step.name:18}{time.monotonic() - begin:7.1f} s  {outcome}")
        if outcome != "passed" and log.exists():
            print(log.read_text(errors="replace")[-1500:])
        print(rows[-1], flush=True)
        keep(out, folder, rows)
    return all(step.name in good for step in steps)


def main() -> int:
    """Runs the steps that the command line names, or all steps."""
    if sys.argv[1:] == ["--sources"]:
        print(sources())
        return 0
    chosen = sys.argv[1:]
    folder = ROOT / "build" / "gpu-logs"
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-run").resolve()
    steps = [step for step in all_steps(folder) if not chosen or step.name in chosen]
    if unknown := set(chosen) - {step.name for step in steps}:
        sys.exit(f"no such step: {', '.join(sorted(unknown))}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out.mkdir(parents=True, exist_ok=True)
    for name, value in {**DEFAULTS, "PYTHON": sys.executable, "SOURCES": sources()}.items():
        os.environ.setdefault(name, value)
    os.environ["PATH"] = f"/usr/local/cuda/bin:{os.environ['PATH']}"
    adopt_orphans()
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = SECONDS - 10  # to begin and to end
    try:
        steps = [step._replace(seconds=step.seconds * SCALE) for step in steps]
        assumed = {"build", "core-reduce", "py-two"}.difference(chosen) if chosen else ()
        return 0 if run_all(steps, out, folder, seconds, holder.pid, assumed) else 1
    finally:
        holder.kill()
        end_all(0)


if __name__ == "__main__":
    sys.exit(main())
