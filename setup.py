"""Builds the extension `syncengine._C` from every C++ file under csrc/.

The files of a folder are compiled as one, since most of a compiler's time goes into the headers that they share,
torch's above all: no two of them may use a name of internal linkage for different things. What includes them is written
to build/units/.

With a torch that has CUDA, and nvcc, it gets csrc/cuda/device/: for sm_80, sm_90 and as PTX for what comes later, or
for what TORCH_CUDA_ARCH_LIST says. Otherwise csrc/cuda/absent/ stands in, and says so to whoever asks for CUDA.

Built and tested with each change: torch 2.13, CPU build, Python 3.11. Tried, without a GPU: 2.11 with CUDA 13.0, Python
3.12; once, at an earlier commit: 2.15.0, Python 3.13. Compiled only: 2.12, and 2.15 with CUDA 13.0, Python 3.11.
README.md has the table.

SYNCENGINE_TEST_HOOKS=1 in the environment gives the flavor that the tests use: with fault-injection hooks and asserts,
and no warning tolerated, unless WERROR, "-Werror" by default, is empty.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

import torch
from setuptools import setup


def home_of_nvcc_on_path() -> str | None:
    """The folder of the CUDA toolkit, as the nvcc on the PATH names it, which may be a script elsewhere."""
    try:
        command = ["nvcc", "--dryrun", "-x", "cu", "-c", os.devnull]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    return next((line.removeprefix("#$ TOP=") for line in said.splitlines() if line.startswith("#$ TOP=")), None)


def find_cuda() -> str | None:
    """A folder with nvcc and its headers, or None. An nvcc on the PATH may be a script that calls the real one."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", home_of_nvcc_on_path()]
    for home in filter(None, candidates):
        if Path(home, "bin", "nvcc").exists() and Path(home, "include", "cuda_runtime.h").exists():
            return home
    print(
        "syncengine: torch has CUDA, but there is no nvcc in CUDA_HOME, CUDA_PATH, /usr/local/cuda or on the PATH;"
        " building without CUDA",
        file=sys.stderr,
    )
    return None


CUDA = find_cuda() if torch.version.cuda is not None else None
if CUDA is not None:
    os.environ["CUDA_HOME"] = CUDA  # torch looks there when it is imported

from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths  # noqa: E402

TEST_HOOKS = os.environ.get("SYNCENGINE_TEST_HOOKS") == "1"

# Headers that are not ours, as system headers: no warnings from them. torch's come first, since they bundle the
# pybind11 that torch itself was built with; with another one its classes can't be derived from.
SYSTEM_INCLUDES = [*include_paths(), sysconfig.get_path("include"), str(Path(sys.exec_prefix, "include"))]

FLAGS = [
    "-O3",
    "-std=c++20",
    "-ffp-contract=off",  # a fused multiply-add rounds once instead of twice: other bits
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",  # designated initializers leave the rest at its default on purpose
    "-g0",
    *(f"-isystem{path}" for path in SYSTEM_INCLUDES),
]
if TEST_HOOKS:
    FLAGS += ["-DSYNCENGINE_TEST_HOOKS", "-UNDEBUG", *os.environ.get("WERROR", "-Werror").split()]

CUDA_LINK = []
NVCC_FLAGS = [
    "-O3",
    "-std=c++20",
    "--fmad=false",  # as -ffp-contract
    "-Xcompiler=-ffp-contract=off,-fvisibility=hidden",
]
if CUDA is not None:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    FLAGS.append(f"-isystem{CUDA}/include")
    libraries = next(path for path in (Path(CUDA, name) for name in ("lib64", "lib")) if path.exists())
    # CUDA's runtime is linked statically and hidden: torch has a runtime of its own, maybe of another version.
    CUDA_LINK = [f"-L{libraries}", "-lcudart_static", "-ldl", "-lrt", "-Wl,--exclude-libs,libcudart_static.a"]


# The extension loads only with the torch that it was built with: a wheel, and the metadata that pip asks for before it
# builds one, name that version. Sources are built with whichever is there.
MAKES_WHEEL = bool({"bdist_wheel", "dist_info"} & set(sys.argv))
TORCH = f"torch=={torch.__version__.partition('+')[0]}" if MAKES_WHEEL else "torch>=2.11"

REDUCER = Path("csrc", "reducer")


def build_id() -> str:
    """A hash of the sources that define memory layouts and what goes over the wire, as tests/core/Makefile has it."""
    without = {"bindings", "kernels", "streams"}
    files = [path for path in Path("csrc").rglob("*.*") if path.suffix in (".h", ".cpp", ".cu")]
    files = sorted(path.as_posix() for path in files if path.parts[1] not in without)
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]


def unit(folder: Path, files: list[Path]) -> Path:
    """A file that includes `files`. Written only if it changes, so that ninja compiles nothing in vain."""
    path = Path("build", "units", "-".join(folder.relative_to("csrc").parts) + ".cpp")
    text = f"#define SYNCENGINE_BUILD_ID 0x{build_id()}u\n" if folder == Path("csrc", "base") else ""
    text += "".join(f'#include "{file.relative_to("csrc").as_posix()}"\n' for file in files)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def sources() -> list[str]:
    left_out = Path("csrc", "cuda", "absent" if CUDA is not None else "device")
    folders = defaultdict(list)
    for file in sorted(Path("csrc").rglob("*.cpp")):
        if left_out not in file.parents:
            # torch's headers take longer to compile than what is in a folder of the reducer.
            folders[REDUCER if REDUCER in file.parents else file.parent].append(file)
    alone = folders.pop(Path("csrc", "kernels"))  # each for an instruction set of its own
    if CUDA is not None:
        alone += Path("csrc").rglob("*.cu")
    return sorted(str(path) for path in [*alone, *(unit(*folder) for folder in folders.items())])


class Build(BuildExtension):
    """Keeps object files between builds, one folder a flavor, so that ninja compiles only what changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        flavor = "extension" + ("-cuda" if CUDA is not None else "") + ("-test-hooks" if TEST_HOOKS else "")
        self.build_temp = str(Path("build", flavor))


setup(
    install_requires=[TORCH, "numpy"],
    ext_modules=[
        CppExtension(
            "syncengine._C",
            sources=sources(),
            include_dirs=[str(Path("csrc").resolve())],
            extra_compile_args={"cxx": FLAGS, "nvcc": NVCC_FLAGS},
            extra_link_args=CUDA_LINK,
        )
    ],
    cmdclass={"build_ext": Build},
)
