"""torch's own distributed tests, between ranks that are forked: test_torch_suite.py runs this file in a process of its
own, as their module takes the backend from the environment when it is imported."""

import torch
from torch.testing._internal import common_distributed

torch.set_num_threads(1)
for backends in common_distributed.DistTestCases.backend_feature.values():
    if "gloo" in backends:
        backends.add("syncengine")

from torch.testing._internal.distributed import distributed_test as theirs  # noqa: E402


class TestTorch(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
