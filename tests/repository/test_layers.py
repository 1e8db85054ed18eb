"""Includes and imports point only downwards: each folder is a layer. One file asks which processor this is."""

import ast
import re
from pathlib import Path

import pytest
from repository import ROOT, cpp_sources

# Bottom first. A file may include its own layer and those before it.
LAYERS = (
    "base",
    "kernels",
    "transport",
    "bootstrap",
    "collectives",
    "steps",
    "engine",
    "cuda",
    "streams",
    "reducer",
    "c10d",
    "bindings",
)
# The same among the folders of a layer; "" are the files beside them.
SUBLAYERS = {
    "transport": ["", "shm", "matching", "packets", "tcp"],
    "engine": ["progress", "lanes", "messages", "hosts", "communicator", "job"],
    "cuda": ["", "absent", "device"],
    "reducer": ["torch", "gradients", "buckets", "parameters", "backward", "routes", ""],
}
WITH_TORCH = {"streams", "reducer", "c10d", "bindings"}
# What torch may change at any time, and where it is used alone.
PRIVATE = {
    "torch/csrc/autograd": "reducer/torch/",
    "torch/csrc/distributed": ("reducer/backward/route.h", "c10d/", "bindings/"),
    "torch/csrc/jit": "bindings/",
    "torch/csrc/utils/pybind.h": ("reducer/routes/", "streams/", "c10d/", "bindings/"),
    "torch/csrc/Exceptions.h": ("reducer/torch/", "reducer/routes/", "bindings/"),
    "c10/core/impl": ("reducer/buckets/", "streams/", "bindings/"),
}
# Headers that a layer, or a part of one, does without, though they lie below it.
HIDDEN = {
    "reducer/routes/": ("reducer/backward/model.h", "reducer/backward/backward.h"),
    "bindings/": ("reducer/backward/", "reducer/routes/"),
}
TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11|Python\.h)\b")

# Modules of the packages, bottom first; a folder counts as one.
MODULES = {
    "syncengine": (
        "_build _extension errors _C lines config launch interhost process_end stragglers tracing connect groups "
        "torch_group communicator collectives torch_backend hooks _sending parallel sharded _joining _keeping "
        "_elastic bench report doctor patch __init__ __main__ prometheus horovod accelerate _lightning lightning "
        "pytorch_lightning torchft"
    ),
    "syncengine.launch": "variables slurm arrivals store mpi environment local __init__",
    "syncengine.parallel": (
        "refusal compiled outputs devices groups buckets replication broadcast model audit buffers kept_buffers "
        "open_step rounds watchers newcomers past_wrapper planning reducer summary optimizers sync_batch_norm uneven "
        "steps join mixed_precision tools micro_batches logging wrapper __init__"
    ),
    "syncengine.horovod": (
        "reductions requests streams calls process_sets collective process allreduce gather sync_batch_norm "
        "gradient_stream gradients optimizer objects join elastic __init__"
    ),
    "syncengine.sharded": (
        "agreement kinds memory weights movable shard state claims block update sharing joining optimizer __init__"
    ),
}

SOURCES = cpp_sources("csrc")


def height(path: str) -> tuple[int, int]:
    """Of the folder of a file at `path`, relative to csrc/: which layer, and which part of the layer."""
    layer, part = path.split("/")[:2]
    return LAYERS.index(layer), SUBLAYERS[layer].index("" if "." in part else part) if layer in SUBLAYERS else 0


def violations(path: str, text: str) -> list[str]:
    """What is wrong with the includes of the file at `path`, relative to csrc/."""
    layer = path.split("/")[0]
    wrong = []
    for kind, include in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', text, re.MULTILINE):
        if TORCH.match(include):
            if layer not in WITH_TORCH:
                wrong.append(f"{path} includes {include}: only {', '.join(WITH_TORCH)} may know torch")
            wrong += [
                f"{path} includes {include}: only {places} may"
                for private, places in PRIVATE.items()
                if include.startswith(private) and not path.startswith(places)
            ]
            if include.startswith("torch/csrc") and not include.startswith(tuple(PRIVATE)):
                wrong.append(f"{path} includes {include}, which is private to torch: PRIVATE has no place for it")
        elif kind == '"':
            target = include.split("/")[0]
            if target not in LAYERS:
                wrong.append(f"{path} includes {include}: give the path from csrc/")
            elif height(include) > height(path):
                wrong.append(f"{path} includes {include}, which lies above it")
            wrong += [
                f"{path} includes {include}, which is not for {places}"
                for places, headers in HIDDEN.items()
                if path.startswith(places) and include.startswith(headers)
            ]
    return wrong


def test_every_folder_is_a_layer():
    assert {path.relative_to(ROOT / "csrc").parts[0] for path in SOURCES} <= set(LAYERS)
    assert len(SOURCES) > 10


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "csrc")))
def test_includes_point_downwards(path):
    assert violations(path.relative_to(ROOT / "csrc").as_posix(), path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("engine/progress/work.cpp", '"reducer/buckets/bucket.h"'),
        ("base/error.cpp", "<torch/extension.h>"),
        ("engine/progress/work.cpp", "<ATen/ATen.h>"),
        ("collectives/plan.cpp", '  # include "engine/progress/work.h"'),
        ("engine/progress/work.cpp", '"work.h"'),
        ("engine/progress/work.cpp", '"engine/lanes/lane.h"'),
        ("steps/lifecycle.h", "<ATen/ATen.h>"),
        ("steps/lifecycle.h", '"engine/progress/work.h"'),
        ("transport/matching/frame.h", '"transport/tcp/peer.h"'),
        ("cuda/pieces.cpp", '"cuda/device/group.h"'),
        ("reducer/gradients/gradient.cpp", '"reducer/buckets/bucket.h"'),
        ("reducer/backward/model.cpp", '"reducer/reducer.h"'),
        ("reducer/torch/hooks.cpp", '"reducer/reducer.h"'),
        ("reducer/reducer_events.cpp", "<torch/csrc/autograd/engine.h>"),
        ("reducer/backward/model.cpp", "<torch/csrc/utils/pybind.h>"),
        ("c10d/backend.cpp", "<torch/csrc/Exceptions.h>"),
        ("c10d/backend.cpp", "<c10/core/impl/VirtualGuardImpl.h>"),
        ("bindings/module.cpp", "<torch/csrc/utils/python_numbers.h>"),
        ("reducer/routes/flat_route.cpp", '"reducer/backward/backward.h"'),
        ("bindings/reducer.cpp", '"reducer/backward/model.h"'),
    ],
)
def test_violations_are_found(path, include):
    text = include if "#" in include else f"#include {include}"
    assert len(violations(path, f"#include <vector>\n{text}\n")) == 1


def test_cudas_headers_stay_in_one_folder():
    """All else is compiled where there is no CUDA. kernels/element.h is for both."""
    knows = [
        path.relative_to(ROOT / "csrc").as_posix()
        for path in SOURCES
        if re.search(r"^\s*#\s*include\s*<cuda\w*\.h>", path.read_text(), re.MULTILINE)
    ]
    assert {path for path in knows if not path.startswith("cuda/device/")} == {"kernels/element.h"}


def test_one_file_asks_which_processor_this_is():
    """The core's flavor tsan relies on it, where this is any processor."""
    asks = re.compile(r"\b(__x86_64__|__amd64__|__i386__|__aarch64__|__arm__|__ARM_\w+|__SSE\w+|__AVX\w+)\b")
    assert [path for path in SOURCES if asks.search(path.read_text())] == [ROOT / "csrc" / "base" / "processor.h"]


def imports(path: Path) -> set[str]:
    """The modules that a file imports, at top level or in a function, as dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("package", MODULES)
def test_imports_point_downwards(package):
    """Those inside a package: to an earlier module."""
    folder, order, wrong = ROOT.joinpath(*package.split(".")), MODULES[package].split(), []
    for path in sorted(folder.rglob("*.py")):
        module = path.relative_to(folder).with_suffix("").parts[0]
        assert module in order, f"{path}: give this module its place in the order above"
        for name in imports(path):
            target = name.removeprefix(f"{package}.").split(".")[0]
            if name.startswith(f"{package}.") and target in order and order.index(target) > order.index(module):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []
