"""Builds the extension `syncengine._C` from every C++ file under csrc/.

SYNCENGINE_TEST_HOOKS=1 in the environment gives the flavor that the tests use: with fault-injection hooks and asserts,
and no warning tolerated.
"""

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

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
    FLAGS += ["-DSYNCENGINE_TEST_HOOKS", "-UNDEBUG", "-Werror"]


class Build(BuildExtension):
    """Keeps object files between builds, one folder a flavor, so that ninja compiles only what changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(Path("build", "extension-test-hooks" if TEST_HOOKS else "extension"))


setup(
    ext_modules=[
        CppExtension(
            "syncengine._C",
            sources=sorted(str(path) for path in Path("csrc").rglob("*.cpp")),
            include_dirs=[str(Path("csrc").resolve())],
            extra_compile_args=FLAGS,
        )
    ],
    cmdclass={"build_ext": Build},
)
