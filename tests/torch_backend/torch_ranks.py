"""torch's own distributed tests, between ranks that are forked: test_torch_suite.py runs this file in a process of its
own, as their module takes the backend from the environment when it is imported."""

import gc
import os
import re
import time
from typing import Any
from unittest import mock, skipIf

import torch
from torch.testing._internal import common_distributed

torch.set_num_threads(1)
features = common_distributed.DistTestCases.backend_feature
for backends in features.values():
    if "gloo" in backends:
        backends.add("syncengine")
features["plugin"].add("syncengine")


def needs_gpus(count: int, *, allow_cpu: bool = False) -> Any:
    return skipIf(not allow_cpu and torch.cuda.device_count() < count, f"fewer than {count} GPUs")


# torch's own decorators look for GPUs in the ranks, which take longer to start than most tests, and want 8 ranks where
# 4 are enough.
common_distributed.skip_if_lt_x_gpu = needs_gpus
common_distributed.skip_if_no_gpu = needs_gpus(int(os.environ["WORLD_SIZE"]))
common_distributed.skip_if_small_worldsize = skipIf(int(os.environ["WORLD_SIZE"]) <= 2, "two ranks are too few")

from torch.testing._internal.distributed import distributed_test as theirs  # noqa: E402


class QuickTime:
    """The module `time` for torch's loops, which look every 100 ms whether all ranks have come or have ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(0.005 if seconds == 0.1 else seconds)


common_distributed.time = theirs.time = QuickTime()

# Tests for CPUs that torch runs only over a backend named "gloo" or "mpi". Left out are all-reduce of sparse tensors,
# which this backend refuses, torch's function monitored_barrier, which works with Gloo alone, and barriers that time
# out, whose tests measure seconds.
BY_NAME = re.compile(
    "test_(accumulate_gradients|all_reduce_coalesced|all_to_all|batch_isend_irecv_gloo|get_future|grads_same"
    "|scatter_object_list)(?!.*cuda)"
)


class TestTorch(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def _test_accumulate_gradients_no_sync(self, *args: Any, **options: Any) -> None:
        with mock.patch.object(theirs, "BACKEND", "gloo"):  # by which they choose a model for CPUs
            super()._test_accumulate_gradients_no_sync(*args, **options)


for name in filter(BY_NAME.match, dir(TestTorch)):
    getattr(TestTorch, name).__unittest_skip__ = False

gc.collect()
gc.freeze()  # a rank that collects what it shares with this process would copy it, page by page
