"""The logging data that DDP keeps in ``model.logger``: facts about a model and times of its steps, by DDP's keys."""

import os
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from syncengine._C import trace_now
from syncengine.errors import InvalidUsage
from syncengine.parallel.summary import FIRST_VERDICT, WINDOW, numbers_of, warn_of_straggler
from syncengine.parallel.tools import ForTools

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
_DTYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}


class Logger:
    """Provides a model's logging data, and records what tools report to it."""

    def __init__(self, model: ForTools) -> None:
        self._model = weakref.ref(model)
        self._strings: dict[str, str] = {}
        self.numbers: dict[str, int] = {}  # that are no facts about the model as it is now
        self._forwards = 0  # that synchronize
        self.sample_rate = 100

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """The logging data as ``strs_map`` and ``ints_map``, like torch's."""
        model = self._model()
        if model is None:
            raise InvalidUsage("the Parallel of this logger is gone: keep the model as long as you use its logger")
        strings, numbers = _construction(model)
        if model._reduces:
            _add_runtime(model, strings, numbers)
            numbers.update(_times(numbers_of(model.reducer.step_times()).times))
            error = model.communicator.exception()
            if text := f"{type(error).__name__}: {error}" if error else model.reducer.last_error():  # of backward, too
                strings["error"], numbers["has_error"] = text, 1
                self.numbers["iteration"] = self._forwards
        return SimpleNamespace(strs_map={**strings, **self._strings}, ints_map={**numbers, **self.numbers})

    def set_error_and_log(self, text: str) -> None:
        """Notes an error in the logging data."""
        self._strings["error"] = text
        self.numbers.update(has_error=1, iteration=self._forwards)

    def note_forward(self) -> None:
        """Counts a forward that synchronizes, before it runs."""
        before = self._forwards
        self._forwards = before + 1
        since = before - FIRST_VERDICT
        if since >= 0 and since % WINDOW == 0 and (model := self._model()) is not None and model.communicator.rank == 0:
            warn_of_straggler(model.reducer, model.communicator.global_ranks, str(model._model))
        if 0 < before <= 10 or (before and before % self.sample_rate == 0):
            self.numbers["iteration"] = before  # as in DDP: those before the last one timed


def _construction(model: ForTools) -> tuple[dict[str, str], dict[str, int]]:
    parameters = [p for p in model._module_parameters if p.requires_grad]
    group = model.process_group
    strings = {
        "module_name": type(model.module).__name__,
        "backend_name": dist.get_backend(group) if isinstance(group, dist.ProcessGroup) else "syncengine",
        "dtypes": ", ".join(dict.fromkeys(_DTYPES.get(p.dtype, str(p.dtype)) for p in parameters)),
        "device_ids": ", ".join(map(str, model.device_ids or ())),
        **{variable.lower(): os.environ.get(variable, "N/A") for variable in _VARIABLES},
    }
    numbers = {
        "world_size": model.communicator.size,
        "rank": model.communicator.rank,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "bucket_cap_bytes": model.bucket_bytes_cap,
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "broadcast_buffers": int(model.forward_sync_buffers),
        "is_multi_device_module": 0,
        "output_device": -1 if model.output_device is None else model.output_device,
        "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.module.modules())),
        "iteration": 0,
    }
    if model.static_graph:
        numbers["static_graph"] = 1
    for hook, _ in model._comm_hooks:
        strings["comm_hook"] = getattr(hook, "__qualname__", str(hook))
    return strings, numbers


def _add_runtime(model: ForTools, strings: dict[str, str], numbers: dict[str, int]) -> None:
    statistics = model.reducer.statistics()
    parameters = model._module_parameters
    sizes = [sum(parameters[i].nbytes for i in bucket) for bucket in model._planning.plan or ()]
    prefix = "rebuilt_" if model._has_rebuilt_buckets else ""
    strings[f"{prefix}bucket_sizes"] = ", ".join(map(str, sizes))
    numbers["num_buckets_reduced"] = statistics["buckets"]
    numbers["has_rebuilt_buckets"] = int(model._has_rebuilt_buckets)
    numbers["unused_parameter_size"] = statistics["copied_bytes"].get("unused", 0)
    if order := model.reducer.ready_order():
        strings["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, order))
    if model._has_rebuilt_buckets:
        buckets = (" ".join(map(str, bucket)) for bucket in model._planning.plan or ())
        strings["rebuilt_per_bucket_param_indices"] = ", ".join(buckets)


def _times(steps: Any) -> dict[str, int]:
    """Times in ns of steps with a forward and a bucket: means; the last step's, with begin and end since the epoch."""
    steps = steps[(steps["forward"] != 0) & (steps["comm"] != 0)]
    if not len(steps):
        return {}
    last = steps[steps["end"].argmax()]
    offset = time.time_ns() - trace_now()
    times = {}
    for what, begin, end in (
        ("forward_compute", "forward", "backward"),
        ("backward_compute", "backward", "wait"),
        ("backward_comm", "comm", "end"),
        ("backward_compute_comm_overlap", "comm", "wait"),
    ):
        key = f"{what}_time"
        times[key] = max(0, int(last[end] - last[begin]))
        times[f"avg_{key}"] = int(np.maximum(steps[end] - steps[begin], 0).mean())
        times[f"{key}_start"], times[f"{key}_end"] = int(last[begin]) + offset, int(last[end]) + offset
    return times
