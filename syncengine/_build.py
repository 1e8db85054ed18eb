"""Compiles the extension, for setup.py and `python -m syncengine build`. Imports only Python's standard library.

Each minor release of torch needs an extension of its own, since each has another layout of c10d::Backend. The folders
of csrc/ that include no header of torch or Python are compiled once, as the archive core.a, and linked into each
extension. So a wheel has a file for each minor release, `syncengine/_ext/torch213/_C.*.so` for 2.13. The folder
`_ext/source` of a wheel has the archive, and the sources that an extension for another release is compiled from.

The files of a folder are compiled as one unit, because most of a compiler's time goes into headers that they share,
torch's above all. Therefore two files of one unit can't use one name of internal linkage for different things.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

# The folders of csrc/ that include torch's headers, the slowest to compile first, each with the unit it belongs to.
WITH_TORCH = {"bindings": "bindings", "reducer": "reducer", "c10d": "c10d", "streams": "c10d"}
BUILT = Path(__file__).resolve().parent / "_ext"
SOURCE = BUILT / "source"
NAME = f"_C{EXTENSION_SUFFIXES[0]}"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
FLAGS = [
    "-O3",
    "-std=c++20",
    "-DNDEBUG",
    "-fPIC",
    "-fwrapv",
    "-pthread",
    "-ffp-contract=off",  # a fused multiply-add rounds once instead of twice: other bits
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",  # designated initializers leave the rest at its default on purpose
    "-g0",
]


class BuildError(Exception):
    """A tool or a file is missing, or a compiler has failed and said why."""


class Torch(NamedTuple):
    """A release of torch: an installed one, or a folder with its headers and libraries alone."""

    folder: Path
    version: str
    cuda: bool

    @classmethod
    def of(cls, folder: Path) -> Torch:
        """Describes the torch package in ``folder``, whose version.py has the release and says whether it has CUDA."""
        text = (folder / "version.py").read_text()
        found = dict(re.findall(r"^(__version__|cuda)\b.*= *(\S+)$", text, re.MULTILINE))
        return cls(folder, found["__version__"].strip("'\""), found["cuda"] != "None")

    @classmethod
    def installed(cls) -> Torch:
        """Returns the torch that Python would import, without an import."""
        found = find_spec("torch")
        if found is None or not found.submodule_search_locations:
            raise BuildError("PyTorch is not installed, and the extension is made for one: pip install torch")
        return cls.of(Path(found.submodule_search_locations[0]))


def tag(version: str) -> str:
    """Returns the name of an extension's folder: "torch213" for 2.13.0 and 2.13.1+cpu. Each pre-release has its own."""
    release = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?(\+.*)?", version)
    return f"torch{release[1]}{release[2]}" if release else f"torch-{version}"


def packaged(version: str) -> Path:
    """Returns the path at which an installation has the extension for that torch, if it has one."""
    return BUILT / tag(version) / NAME


def own(version: str) -> Path | None:
    """Returns the path at which `python -m syncengine build` puts an extension, or None without sources to compile."""
    try:
        identity = (SOURCE / "id").read_text()
    except OSError:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (raises nothing)
    return Path(cache, "syncengine", f"torch-{version}-{identity}", NAME)


def check_owner(folder: Path) -> None:
    """Raises ``PermissionError`` if other users can write to a folder whose files are going to be run."""
    for path in (folder.parent, folder):
        state = path.stat()
        if state.st_uid != os.geteuid() or state.st_mode & 0o022:
            raise PermissionError(f"{path} belongs to another user, or others may write to it: remove it")


def cuda_version(home: Path) -> int:
    """Returns the version of the CUDA toolkit in that folder as its headers have it: 12050 for 12.5."""
    header = (home / "include" / "cuda_runtime_api.h").read_text(errors="replace")
    return int(re.findall(r"^#define CUDART_VERSION +(\d+)", header, re.MULTILINE)[0])


def architecture_flags(devices: str, cuda: int) -> list[str]:
    """Returns nvcc's flags for a value of TORCH_CUDA_ARCH_LIST ("": the default). Leaves out devices below 7.0."""
    flags = []
    for device in re.split(r"[;\s]+", devices.strip("; ") or "8.0;9.0+PTX" + ";10.0;12.0+PTX" * (cuda >= 12080)):
        found = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", device)
        if found is None:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST: {device} is no number of a device; write 8.0;9.0+PTX, say")
        kinds = ["sm", *["compute"] * bool(found[3])] if int(found[1]) >= 7 else []
        flags += [f"-gencode=arch=compute_{found[1]}{found[2]},code={kind}_{found[1]}{found[2]}" for kind in kinds]
    if not flags:
        raise BuildError(f"TORCH_CUDA_ARCH_LIST: {devices} has no device from 7.0 on, and others can't be used")
    return flags


def build_id(csrc: Path) -> str:
    """A hash of the sources that define memory layouts and what goes over the wire; tests/core/Makefile has it, too."""
    return _hash(csrc, without={"bindings", "kernels", "streams"})


def _hash(csrc: Path, without: set[str]) -> str:
    files = [path for path in csrc.rglob("*.*") if path.suffix in (".h", ".cpp", ".cu")]
    files = sorted((path for path in files if path.relative_to(csrc).parts[0] not in without), key=str)
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


class Builder:
    """Compiles changed files only: the object files stay in the folder `out` between builds."""

    def __init__(self, csrc: Path, out: Path, flags: Iterable[str] = (), nvcc: Sequence[str] = ()) -> None:
        """The command `nvcc` compiles csrc/cuda/device. Without it, csrc/cuda/absent is compiled in its place."""
        self._csrc, self._out, self._nvcc = csrc, out, list(nvcc)
        self._command = [*COMPILER, *FLAGS, f"-I{csrc}", *flags]

    def build(self, targets: Mapping[Torch, Path], core: Path | None = None, link: Sequence[str] = ()) -> Path:
        """Compiles an extension for each torch, and the archive unless `core` names one; returns the archive."""
        compiled = {torch: self._for_torch(torch) for torch in targets}
        of_core = [] if core is not None else [(unit, self._with(unit)) for unit in self._units(with_torch=False)]
        units = [*(unit for units in compiled.values() for unit in units), *of_core]
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(lambda unit: _run(unit[0].with_suffix(".o"), unit[1]), units))  # an error cancels the others
        if core is None:
            core = self._out / "core.a"
            objects = [unit.with_suffix(".o") for unit, _ in of_core]
            _run(core, ["ar", "rcsD", str(core), *map(str, objects)], objects)
        for torch, to in targets.items():
            objects = [unit.with_suffix(".o") for unit, _ in compiled[torch]]
            command = [*COMPILER, "-shared", "-pthread", "-o", str(to), *map(str, [*objects, core]), *link]
            to.parent.mkdir(parents=True, exist_ok=True)
            libraries = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
            _check(subprocess.run([*command, f"-L{torch.folder / 'lib'}", *libraries], check=False), to)
        return core

    def _with(self, unit: Path, *flags: str) -> list[str]:
        compiler = [*self._nvcc, f"-I{self._csrc}"] if unit.suffix == ".cu" else self._command
        made, needs = unit.with_suffix(".o"), unit.with_suffix(".d")
        return [*compiler, *flags, "-MMD", "-MF", str(needs), "-c", str(unit), "-o", str(made)]

    def _for_torch(self, torch: Torch) -> list[tuple[Path, list[str]]]:
        # These folders count as system headers, so that the compiler does not warn of them. torch's folder comes first:
        # it has the pybind11 that torch was built with, and with another one no class can derive from torch's.
        headers = torch.folder / "include"
        paths = (headers, headers / "torch/csrc/api/include", sysconfig.get_path("include"))
        flags = [*(f"-isystem{path}" for path in paths), "-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C"]
        units = self._units(True, f"{torch.version}-{sysconfig.get_config_var('SOABI')}")
        return [(unit, self._with(unit, *flags)) for unit in units]

    def _units(self, with_torch: bool, folder: str = "units") -> list[Path]:
        """Returns the files to compile. Each includes the files of a folder, and is written if its text has changed."""
        units = defaultdict(list)
        left_out = "absent" if self._nvcc else "device"
        for file in sorted((*self._csrc.rglob("*.cpp"), *self._csrc.rglob("*.cu"))):
            path = file.relative_to(self._csrc)
            if (path.parts[0] in WITH_TORCH) == with_torch and path.parts[:2] != ("cuda", left_out):
                # The folders of the reducer are one unit, as are c10d/ and streams/: torch's headers take longer to
                # compile than a folder. Each kernel is compiled alone, because it is for an instruction set of its own.
                alone = path.parts[0] == "kernels" or path.suffix == ".cu"
                of = path.with_suffix("") if alone else Path(WITH_TORCH[path.parts[0]]) if with_torch else path.parent
                units["-".join(of.parts) + path.suffix].append(path.as_posix())
        for name, files in units.items():
            text = f"#define SYNCENGINE_BUILD_ID 0x{build_id(self._csrc)}u\n" if name == "base.cpp" else ""
            _write(self._out / folder / name, text + "".join(f'#include "{file}"\n' for file in files))
        order = {f"{name}.cpp": place for place, name in enumerate(WITH_TORCH)}
        return [self._out / folder / name for name in sorted(units, key=lambda name: order.get(name, 0))]


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _run(made: Path, command: list[str], needs: Sequence[Path] = ()) -> None:
    """Runs the command, unless the same one has made the file `made`, and no file that it needs has changed since."""
    said = made.with_suffix(".cmd")
    with contextlib.suppress(OSError):
        text = made.with_suffix(".d").read_text() if not needs else ""
        needs = needs or [Path(path) for path in shlex.split(text.partition(":")[2].replace("\\\n", " "))]
        if said.read_text() == shlex.join(command) and all(
            path.stat().st_mtime_ns < made.stat().st_mtime_ns for path in needs
        ):
            return
    for path in (said, made):  # an archive that is there would keep its old members
        path.unlink(missing_ok=True)
    print(f"make {made.parent.name}/{made.name}", flush=True)
    _check(subprocess.run(command, check=False), made)
    said.write_text(shlex.join(command))


def _check(run: subprocess.CompletedProcess[bytes], made: Path) -> None:
    if run.returncode:
        raise BuildError(f"{made} could not be made: {run.args[0]} has said why")


def put_sources(csrc: Path, core: Path, to: Path) -> None:
    """Copies into a wheel the files that `python -m syncengine build` compiles and links."""
    shutil.rmtree(to, ignore_errors=True)
    for file in csrc.rglob("*.*"):
        path = file.relative_to(csrc)
        if path.suffix == ".h" or path.parts[0] in WITH_TORCH:
            (to / "csrc" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to / "csrc" / path)
    shutil.copyfile(core, to / "core.a")
    (to / "id").write_text(f"{build_id(csrc)}-{_hash(csrc, without=set())[:8]}")


# ---- python -m syncengine build ----


def add_build(commands: Any) -> None:
    """Adds the command `build` to those of argparse."""
    commands.add_parser("build", help="compile the extension for this PyTorch, if there is none").set_defaults(
        run=lambda *_: build_own()
    )


def build_own() -> int:
    """Compiles an extension for this torch and Python into a folder of the user's; returns the exit code."""
    try:
        torch = Torch.installed()
        there, to = packaged(torch.version), own(torch.version)
        if there.exists():
            print(f"{there} is there for PyTorch {torch.version}: nothing is to be compiled")
            return 0
        if to is None:
            raise BuildError(f"{SOURCE} is missing: `make build` in a checkout, else install syncengine-torch again")
        begin = time.monotonic()
        _compile_own(torch, to)
        print(f"{to}: made in {time.monotonic() - begin:.0f} s; `import syncengine` takes it from now on")
        return 0
    except (BuildError, OSError) as error:
        print(f"syncengine build: {error}", file=sys.stderr, flush=True)
        return 2


def _compile_own(torch: Torch, to: Path) -> None:
    if shutil.which(COMPILER[0]) is None:
        raise BuildError(f"{COMPILER[0]} is not on the PATH: install g++ 12 or later, or name another by CXX")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise BuildError(f"{header} is missing: install Python's headers (Debian: python3-dev, Fedora: python3-devel)")
    to.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    to.parent.mkdir(mode=0o700, exist_ok=True)
    check_owner(to.parent)
    print(f"for PyTorch {torch.version}, with {header}; each compiler takes 2.2 GB, MAX_JOBS=1 lets one run at a time")
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        made = Path(folder, NAME)
        Builder(SOURCE / "csrc", Path(folder)).build({torch: made}, SOURCE / "core.a", ["-s"])
        made.rename(to)
