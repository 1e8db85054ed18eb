"""Builds the extension, `syncengine/_ext/torch213/_C.*.so` for torch 2.13; syncengine/_build.py says how.

The extension is built for the torch that is installed. If SYNCENGINE_TORCHES names folders with the headers and
libraries of several releases, as scripts/build_wheels.py does, there is one for each. docs/install.md says which
releases were tried.

If torch has CUDA, and nvcc of CUDA 12.5 or later is there, the extension gets csrc/cuda/device/, for the devices that
docs/cuda.md names, or those in TORCH_CUDA_ARCH_LIST. Otherwise, and with SYNCENGINE_TORCHES, csrc/cuda/absent/ takes
that folder's place, and says so to a program that asks for CUDA.

SYNCENGINE_TEST_HOOKS=1 in the environment gives the flavor that the tests use: with fault-injection hooks and asserts,
and no warning tolerated, unless WERROR, "-Werror" by default, is empty. MAX_JOBS limits how many compilers run at once.

`python setup.py core` compiles the part that needs no torch.
"""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

spec = spec_from_file_location("_build", Path("syncengine", "_build.py"))
_build = module_from_spec(spec)
sys.modules["_build"] = _build
spec.loader.exec_module(_build)


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
    why = "there is no nvcc in CUDA_HOME, CUDA_PATH, /usr/local/cuda or on the PATH"
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", home_of_nvcc_on_path()]
    for home in filter(None, candidates):
        if Path(home, "bin", "nvcc").exists() and Path(home, "include", "cuda_runtime.h").exists():
            if _build.cuda_version(Path(home)) >= 12050:  # has cudaGetDriverEntryPointByVersion
                return home
            why = f"the CUDA toolkit in {home} is older than 12.5"
    print(f"syncengine: torch has CUDA, but {why}; building without CUDA", file=sys.stderr)
    return None


def nvcc_command(home: str) -> list[str]:
    devices = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    architectures = _build.architecture_flags(devices, _build.cuda_version(Path(home)))
    flags = ["-O3", "-std=c++20", "--fmad=false"]  # the last one as -ffp-contract
    return [f"{home}/bin/nvcc", *flags, "-Xcompiler=-ffp-contract=off,-fvisibility=hidden,-fPIC", *architectures]


TEST_HOOKS = os.environ.get("SYNCENGINE_TEST_HOOKS") == "1"
ONLY_CORE = sys.argv[1:] == ["core"]
TORCHES = [
    _build.Torch.of(Path(folder)) for folder in filter(None, os.environ.get("SYNCENGINE_TORCHES", "").split(":"))
]
CUDA = None
if not TORCHES and not ONLY_CORE:
    TORCHES = [_build.Torch.installed()]
    CUDA = find_cuda() if TORCHES[0].cuda else None

FLAGS, CUDA_LINK, NVCC = [], [], []
if TEST_HOOKS:
    FLAGS += ["-DSYNCENGINE_TEST_HOOKS", "-UNDEBUG", *os.environ.get("WERROR", "-Werror").split()]
if CUDA is not None:
    NVCC = nvcc_command(CUDA)
    FLAGS.append(f"-isystem{CUDA}/include")
    libraries = next(path for path in (Path(CUDA, name) for name in ("lib64", "lib")) if path.exists())
    # CUDA's runtime is linked statically and hidden: torch has a runtime of its own, maybe of another version.
    CUDA_LINK = [f"-L{libraries}", "-lcudart_static", "-ldl", "-lrt", "-Wl,--exclude-libs,libcudart_static.a"]

# Each flavor of the extension has an output folder of its own.
OUT = Path("build", "extension" + ("-cuda" if CUDA is not None else "") + ("-test-hooks" if TEST_HOOKS else ""))
BUILDER = _build.Builder(Path("csrc"), OUT, FLAGS, NVCC)
if ONLY_CORE:
    BUILDER.build({})
    sys.exit()

from setuptools import Extension, setup  # noqa: E402 (not needed for the core)
from setuptools.command.build_ext import build_ext  # noqa: E402


class Build(build_ext):
    def build_extensions(self) -> None:
        targets = {
            torch: Path(self.get_ext_fullpath(one.name)) for torch, one in zip(TORCHES, self.extensions, strict=True)
        }
        self.core = BUILDER.build(targets, link=CUDA_LINK)

    def run(self) -> None:
        super().run()
        if not self.inplace and not NVCC and not TEST_HOOKS:
            _build.put_sources(Path("csrc"), self.core, Path(self.build_lib, "syncengine", "_ext", "source"))

    def copy_extensions_to_source(self) -> None:
        for torch in TORCHES:
            _build.packaged(torch.version).parent.mkdir(parents=True, exist_ok=True)
        super().copy_extensions_to_source()


setup(
    ext_modules=[Extension(f"syncengine._ext.{_build.tag(torch.version)}._C", []) for torch in TORCHES],
    cmdclass={"build_ext": Build},
)
