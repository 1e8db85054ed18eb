# What a developer runs. Needs python3 (3.10 or later), g++ (12 or later) and make; the rest is installed into .venv.
#
#   make train       train a small GPT on 2 ranks with syncengine, with DDP and sharded, compare
#   make test        the C++ core's tests, then those of Python that take less than a second or two
#   make test-thorough  the tests of Python that are marked thorough: longer ones, which CI runs, too
#   make nightly     all tests that there are, in parts; PART=chaos for one of them
#   make test-integrations  the tests with Lightning, Accelerate, Transformers, Ray, torchft, Flower: installs them
#   make sanitize    the C++ core's tests under ThreadSanitizer, for any processor, and AddressSanitizer + UBSan
#   make build       the extension, in place, as users get it
#   make wheel       a wheel for the Python and torch of .venv
#   make wheels      wheels for CPython 3.10 to 3.13 and torch 2.11 to 2.15; fetches packages of torch, of 500 MB each
#   make core-test   only the C++ core's tests
#   make pages       tests of shared memory under pages of 16 and 64 KiB, as kernels for ARM have
#   make arm-check   compiles the C++ core for ARM, if aarch64-linux-gnu-g++ is installed
#   make arm         and runs tests of the core, and trains on two ranks, for ARM under QEMU; build/arm gets 5 GB
#   make cuda-check  compiles and links the CUDA side, and runs it on a device in software, if nvcc is installed
#   make cuda-torch-check  the GPU tests of Python on that device, by a torch without CUDA, if nvcc is installed
#                    (neither needs a GPU)
#   make gpu         runs the GPU tests and benchmarks with the present Python and torch in 9 minutes; downloads nothing
#   make gpu-prebuild  builds for that on a machine without a GPU: for Python 3.12, torch 2.11 and sm_90; needs nvcc
#   make docs        the site of the documentation, in build/site, strictly: no warning, no dead link
#   make figures     measures the tables of README.md and docs/ anew, on a quiet machine: 69 minutes
#   make lint        formatters, linters and the type checker, changing nothing
#   make format      formatters and linters, changing what they can
#   make clean       removes what was built; `rm -r .venv*` removes the environments too

PYTHON ?= python3
SHELL := /bin/bash
.DEFAULT_GOAL := build
.DELETE_ON_ERROR:

PY := .venv/bin/python
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu') setup.py syncengine/_build.py pyproject.toml
CPP_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'tests/cuda/*.h' 'tests/cuda/*.cpp' 'tests/core/*.h' 'tests/core/*.cpp' 'benchmarks/*.cpp')

# ---- environments ----

# Python compiles what is imported, a small part of torch, and keeps that: else each of some hundred starts costs twice
# the time.
unexport PYTHONDONTWRITEBYTECODE

.venv/ready: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -qq --no-compile --requirement requirements-dev.txt
	touch $@

# Open MPI's and MPICH's packages install the same files: one small environment each, with .venv's packages behind it.
.venv-%/ready: requirements-%.txt .venv/ready
	$(PY) -m venv --without-pip .venv-$*
	$(PY) -m pip --python .venv-$*/bin/python install -qq --no-deps --requirement $<
	site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "import site; site.addsitedir('$$site')" > $${site/.venv/.venv-$*}/main_environment.pth
	touch $@

# Frameworks, which bring packages of their own: those of .venv are there first, so that torch and NumPy stay what they
# are. But for mpi4py: without an MPI it raises what Lightning, which looks for one, does not expect.
.venv-integrations/ready: requirements-integrations.txt .venv/ready
	$(PY) -m venv --without-pip .venv-integrations
	site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  there=$${site/.venv/.venv-integrations} && \
	  echo "import site; site.addsitedir('$$site')" > $$there/main_environment.pth && \
	  echo 'raise ImportError("there is no MPI in this environment")' > $$there/mpi4py.py
	$(PY) -m pip --python .venv-integrations/bin/python install -qq --no-compile --constraint requirements.txt --requirement $<
	touch $@

# Without torch and the extension: what the site says of functions comes from the sources and the stub.
.venv-site/ready: requirements-site.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install -qq --no-compile --requirement $<
	touch $@

# ---- the extension ----

# Both flavors keep their object files; the one built last is the one in place, and build/*.built says which.
extension = $(2) $(PY) -m pip install -qq --no-build-isolation --no-deps --editable . && \
  mkdir -p build && rm -f build/*.built && touch build/$(1).built

# Two jobs compile the part that needs no torch while pip installs torch.
TWO = $(if $(findstring --jobserver,$(MAKEFLAGS)),,-j2)

.PHONY: build build-for-tests
build:
	@$(MAKE) --no-print-directory $(TWO) build/plain.built
build-for-tests:
	@$(MAKE) --no-print-directory $(TWO) build/test-hooks.built

build/plain.built: .venv/ready build/extension/core.a $(SOURCES)
	$(call extension,plain,SYNCENGINE_TEST_HOOKS=0)

build/test-hooks.built: .venv/ready build/extension-test-hooks/core.a $(SOURCES)
	$(call extension,test-hooks,SYNCENGINE_TEST_HOOKS=1)

build/extension/core.a: $(SOURCES)
	SYNCENGINE_TEST_HOOKS=0 $(PYTHON) setup.py core && touch $@

build/extension-test-hooks/core.a: $(SOURCES)
	SYNCENGINE_TEST_HOOKS=1 $(PYTHON) setup.py core && touch $@

# ---- wheels, in dist/ ----

PYTHONS ?= python3.10 python3.11 python3.12 python3.13
TORCHES ?= 2.11 2.12 2.13 2.14 2.15

.venv-wheel/ready: requirements-wheel.txt
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install -qq --requirement $<
	touch $@

.PHONY: wheel wheels
wheel: .venv/ready .venv-wheel/ready
	.venv-wheel/bin/python scripts/build_wheels.py --torches $(wildcard .venv/lib/python*/site-packages/torch) -- $(PY)

wheels: .venv-wheel/ready
	.venv-wheel/bin/python scripts/build_wheels.py --torches $(TORCHES) -- $(PYTHONS)

# ---- what it is for ----

.PHONY: train test test-python test-thorough test-integrations nightly core-build-tsan core-test sanitize pages arm-check arm cuda-check cuda-torch-check gpu gpu-prebuild docs figures lint format clean
train: build
	$(PY) -m examples.same_bits
	$(PY) -m examples.train_gpt compare

# The core's tests get the extension's object files: what users run is tested, and nothing is compiled twice.
test: build-for-tests
	$(MAKE) --no-print-directory -C tests/core FLAVORS=extension
	$(MAKE) --no-print-directory test-python

# Three files run at a time, as much of it is waiting; tests that keep to a clock run alone, without an import of all
# other files, which takes longer than they do. CI takes both kinds in one run.
MARKED = not thorough and not nightly
ALONE = $(shell grep -rl 'mark\.alone' tests --include='test_*.py')
test-thorough: MARKED = thorough and not nightly
test-python test-thorough: build-for-tests .venv-openmpi/ready .venv-mpich/ready
	$(PY) -m pytest -q -m "$(MARKED) and not alone" --numprocesses 3 --dist loadfile --no-loadscope-reorder
	$(PY) -m pytest -q -m "$(MARKED) and alone and not gpu" $(ALONE)

nightly: .venv/ready
	$(PY) scripts/nightly.py $(PART)

test-integrations: build-for-tests .venv-integrations/ready
	.venv-integrations/bin/python -m pytest -q --numprocesses 2 --dist loadfile tests/integrations

core-build-tsan:
	$(MAKE) --no-print-directory -C tests/core FLAVORS=tsan build

core-test:
	$(MAKE) --no-print-directory -C tests/core FLAVORS=plain

sanitize:
	$(MAKE) --no-print-directory -C tests/core FLAVORS="tsan asan"

# Tests that allocate, detach or fork shared memory, as on a kernel with pages of 64 KiB. A fourth rank would add no
# layout of memory.
PAGES_TESTS := tests/parallel/test_gradient_memory.py tests/communicator/test_zero_copy.py::test_what_is_copied \
  tests/faults/test_faults_fork.py tests/faults/test_shrink.py::test_memory_of_the_dead_is_given_back \
  'tests/faults/test_faults_stop.py::test_woken_rank_changes_nobodys_memory[2-points0]' tests/sharded/test_sharded_memory.py
pages: build-for-tests
	$(MAKE) --no-print-directory -C tests/core pages
	LD_PRELOAD=$(abspath build/page_size.so) PAGE_SIZE=65536 $(PY) -m pytest -q -p no:cacheprovider $(PAGES_TESTS) --deselect 'tests/parallel/test_gradient_memory.py::test_bits_are_those_of_the_staged_way[4]'

arm-check:
	$(MAKE) --no-print-directory -C tests/core -j$(shell nproc) arm-check

arm: arm-check .venv/ready $(if $(shell command -v qemu-aarch64-static),build-for-tests)
	$(PY) scripts/arm.py

cuda-check:
	$(MAKE) --no-print-directory -C tests/core -j$(shell nproc) cuda-check

cuda-torch-check: $(if $(shell command -v nvcc),build-for-tests)
	$(if $<,,@echo "cuda-torch-check: skipped; install nvcc (CUDA 12.8 or later)")
	$(if $<,$(MAKE) --no-print-directory -C tests/cuda/torch -j$(shell nproc) PYTHON=$(abspath $(PY)))
	$(if $<,SYNCENGINE_TEST_CUDA=software PYTHONPATH=tests/support $(PY) -m pytest -q -m gpu --noconftest -p no:cacheprovider \
	  -p software_torch --numprocesses 2 --dist loadfile tests/cuda)

# With whatever python3 and torch are there, in place: a GPU machine often reaches no package index. It may be there
# for minutes, so the steps come in order of worth, each with a limit; STEPS names some of them.
gpu:
	$(PYTHON) scripts/gpu_run.py $(STEPS)

# On a machine without a GPU: what `make gpu` would build first, for the Python, torch and GPU of the other machine.
# PyTorch's CUDA build and what it needs to be loaded take 5 GB in .venv-gpu.
GPU_PYTHON ?= python3.12
GPU_ARCH ?= 9.0

.venv-gpu/ready: requirements-gpu.txt
	@$(GPU_PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(s.get_python_version() != "3.12" or not os.path.exists(s.get_path("include") + "/Python.h"))' || \
	  { echo 'gpu-prebuild needs CPython 3.12 with its headers: make gpu-prebuild GPU_PYTHON=/path/to/python3.12' >&2; exit 1; }
	$(GPU_PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install -qq --no-compile --requirement $<
	touch $@

gpu-prebuild: export PATH := $(CURDIR)/.venv-gpu/bin:$(PATH)
gpu-prebuild: export WERROR :=
gpu-prebuild: .venv-gpu/ready
	SYNCENGINE_TEST_HOOKS=1 TORCH_CUDA_ARCH_LIST=$(GPU_ARCH) python setup.py -q build_ext --inplace
	$(MAKE) --no-print-directory -C tests/core -j$(shell nproc) CUDA_ARCHS=-arch=sm_$(subst .,,$(GPU_ARCH)) CUDA_OUT=../../build/core-gpu cuda-tests
	python -c 'import torch; from syncengine import _C; assert _C.has_cuda and _C.has_test_hooks'
	build/core-gpu/cuda_tests gpu_driver
	python scripts/gpu_run.py --sources > build/gpu-prebuilt
	@echo; echo 'to take along, beside the repository'"'"'s files, for `make gpu`:'; \
	  du --total --apparent-size --block-size=100K syncengine/_ext/torch211/_C.cpython-312-*.so build/core-gpu/cuda_tests build/gpu-prebuilt | \
	  awk '{ printf "%6.1f MB  %s\n", $$1 * 0.1024, $$2; if ($$1 * 0.1024 > 45) exit 1 }'

figures: build .venv-openmpi/ready .venv-mpich/ready
	$(PY) -m benchmarks.figures

docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv-site/ready
	.venv-site/bin/mkdocs build --strict

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	@.venv/bin/clang-format --dry-run --Werror $(CPP_FILES)

format: .venv/ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	@.venv/bin/clang-format -i $(CPP_FILES)

clean:
	rm -rf build dist *.egg-info syncengine/_ext syncengine/_C*.so
