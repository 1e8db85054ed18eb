"""``torch.cuda`` over the CUDA device in software, for a torch without CUDA; and syncengine's extension over it.

``tests/cuda/torch/machine.h`` says what that is; ``make -C tests/cuda/torch`` builds it. Importing this module installs
it. That comes before torch, which looks for CUDA once: ``pytest -p software_torch`` does it, and cuda_ranks in rank
processes, if SYNCENGINE_TEST_CUDA is "software".
"""

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from repository import ROOT

if "torch" in sys.modules:
    raise RuntimeError("software_torch has to be imported before torch")
BUILT = ROOT / "build" / "software-torch"
os.environ["OMP_NUM_THREADS"] = "1"  # a stream is a thread
ctypes.CDLL(str(BUILT / "software_torch_cuda.so"))

import torch  # noqa: E402


def load(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, str(BUILT / file))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install() -> None:
    if torch.version.cuda is not None:
        raise RuntimeError("this torch has CUDA: the software device is for a torch that has none")
    device = load("software_torch_cuda", "software_torch_cuda.so")
    for name in vars(device):
        if name.startswith("_cuda_"):
            setattr(torch._C, name, getattr(device, name))
    _install_classes(device)
    _install_functions(device)
    _install_storage(device)
    _install_gloo(device)
    sys.modules["syncengine._C"] = load("syncengine._C", f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}")


def _install_classes(device: ModuleType) -> None:
    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            if "stream_id" in kwargs:
                return super().__new__(cls, **kwargs)
            index = torch.cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, torch.device("cuda", index), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return super().__new__(cls, "cuda", enable_timing=enable_timing)

    class CUDAGraph(device._CUDAGraph):
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
            super().capture_begin(pool, capture_error_mode)

    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.Event = Stream, Event
    for module in (torch.cuda, torch.cuda.graphs):
        module.CUDAGraph = CUDAGraph


def _install_functions(device: ModuleType) -> None:
    cuda = torch.cuda
    cuda._lazy_init = lambda: None
    cuda._initialized = True
    cuda._exchange_device = device._cuda_exchangeDevice
    cuda._maybe_exchange_device = device._cuda_maybeExchangeDevice
    cuda.graphs._cuda_isCurrentStreamCapturing = device._cuda_isCurrentStreamCapturing
    cuda.mem_get_info = lambda index=None: device.memory_info(cuda._utils._get_device_index(index, optional=True))
    properties = SimpleNamespace(name="software", major=9, minor=0, multi_processor_count=1)
    cuda.get_device_properties = lambda index=None: properties
    cuda.get_device_capability = lambda index=None: (9, 0)
    cuda.default_generators = tuple(torch.Generator() for _ in range(8))  # CUDA_VISIBLE_DEVICES may change
    torch._C._host_emptyCache = lambda: None
    cuda.device_count = device._cuda_getDeviceCount


def _install_storage(device: ModuleType) -> None:
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return original(storage, size)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    torch.UntypedStorage.resize_ = resize_


def _install_gloo(device: ModuleType) -> None:
    """Gloo gets a part for CUDA tensors: ``"gloo"`` is ``"cpu:gloo,cuda:gloo over the host"``."""
    from torch.distributed import distributed_c10d as c10d

    original = c10d.ProcessGroup._register_backend

    def register(group: Any, place: torch.device, kind: Any, backend: Any) -> None:
        if place.type == "cuda" and isinstance(backend, c10d.ProcessGroupGloo):
            backend = device.HostGloo(backend)
            kind = c10d.ProcessGroup.BackendType.CUSTOM
        original(group, place, kind, backend)

    c10d.ProcessGroup._register_backend = register


install()
