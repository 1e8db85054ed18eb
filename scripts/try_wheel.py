#!/usr/bin/env python3
"""Installs a wheel without an index and without a compiler, and trains with it beside DistributedDataParallel.

    python3 scripts/try_wheel.py dist/syncengine_torch-*-cp312-*.whl --torch 2.15

makes an environment in build/wheels/tried with that release of torch and the Python of the wheel's tag (python3.12, or
--python), installs the wheel by `pip install --no-index`, and runs README.md's quick start on two ranks, with Parallel
and with DDP over Gloo: the trained weights must have the same digest. The environment, of 5 GB with a CUDA build of
torch, is deleted unless --keep is given; with --environment one that is there is used.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRIED = ROOT / "build" / "wheels" / "tried"
DIGEST = """
import hashlib
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(f"digest {hashlib.sha256(weights).hexdigest()}\\n", end="", flush=True)  # in one piece: both ranks write there
"""
DDP = [
    ("import syncengine", "import torch.distributed as dist"),
    ("syncengine.init()", "dist.init_process_group('gloo')"),
    ("syncengine.Parallel", "torch.nn.parallel.DistributedDataParallel"),
    ("syncengine.rank()", "dist.get_rank()"),
    ("syncengine.world_size()", "dist.get_world_size()"),
]


def programs(folder: Path) -> list[Path]:
    """Writes the quick start, and its translation to DDP."""
    ours = re.search(r"^# train\.py$.*?(?=^```$)", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    ddp = ours
    for mine, theirs in DDP:
        assert mine in ddp, mine
        ddp = ddp.replace(mine, theirs)
    assert "syncengine." not in ddp
    for name, text in (("ours.py", ours), ("ddp.py", ddp)):
        (folder / name).write_text(text + DIGEST)
    return [folder / "ours.py", folder / "ddp.py"]


def run(command: list[object], folder: Path, path: str) -> str:
    """Returns the command's stdout; `path` is the whole PATH, without a compiler."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CXX", "SYNCENGINE_"))}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env={**environ, "PATH": path}, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    """Tries one wheel with one torch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="2.13", help="a release, or a wheel of torch")
    parser.add_argument("--python", help="an interpreter")
    parser.add_argument("--environment", type=Path, help="one that has torch and NumPy")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    tag = re.search(r"-cp(\d)(\d+)-", options.wheel.name)
    home = (options.environment or TRIED).absolute()
    python = home / "bin" / "python"
    if options.environment is None:
        shutil.rmtree(home, ignore_errors=True)
        torch = options.torch if options.torch.endswith(".whl") else f"torch=={options.torch}.*"
        pip = ["-m", "pip", "install", "-q", "--no-compile", torch, "numpy"]
        subprocess.run([options.python or f"python{tag[1]}.{tag[2]}", "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), *pip], check=True)
    path = str(home / "bin")
    try:
        wheel = options.wheel.resolve()
        run([python, "-m", "pip", "uninstall", "-q", "-y", "syncengine-torch"], home, path)
        run([python, "-m", "pip", "install", "-q", "--no-index", wheel], home, path)
        print(run([home / "bin" / "syncengine", "--version"], home, path).strip())
        digests = []
        for program in programs(home):
            torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
            said = run(torchrun, home, path)
            digests += re.findall(r"digest (\w+)", said)
            print(*sorted(line for line in said.splitlines() if "loss" in line), sep="\n")
        if len(digests) != 4 or len(set(digests)) != 1:
            sys.exit(f"the digests differ: {digests}")
        print(f"{options.wheel.name}: the digest of all four ranks is {digests[0][:16]}")
    finally:
        if options.environment is None and not options.keep:
            shutil.rmtree(home)


if __name__ == "__main__":
    main()
