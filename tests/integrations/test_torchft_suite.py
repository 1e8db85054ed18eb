"""torchft's own tests of process groups, which its package has, with our process group in the place of Gloo's.

Also those of its collectives that it skips for Gloo. Where its tests know an error by Gloo's and NCCL's words for it,
ours has to be a SyncError.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
import torchft.process_group_test as theirs
from parameterized import parameterized

from syncengine.errors import SyncError
from syncengine.torchft import ProcessGroup

COLLECTIVES = sorted(set(theirs._ALL_COLLECTIVES) - {"reduce_scatter"})  # of CPU tensors its test tries nothing


class TestCollectives(theirs.MultiPgBaseTest):
    WORLD_SIZE = 3

    @classmethod
    def _create_pg(cls, _: str) -> ProcessGroup:
        return ProcessGroup(timedelta(seconds=30))

    def assertRaisesRegex(self, *_: object) -> Any:
        return pytest.raises(SyncError)

    @parameterized.expand(COLLECTIVES)
    def test_collective(self, collective: str) -> None:
        self._run_parallel(collective)

    @parameterized.expand(sorted({*COLLECTIVES} - {"send/recv"}))  # between two that go on: no error, as there
    def test_collective_with_resiliency(self, collective: str) -> None:
        self._run_with_resiliency(collective)


class Apis(theirs.ProcessGroupTest):
    __test__ = False

    def assertRaisesRegex(self, *_: object) -> Any:
        return pytest.raises(SyncError)


@pytest.fixture
def ours_for_gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(theirs, "ProcessGroupGloo", ProcessGroup)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("ours_for_gloo")
@pytest.mark.parametrize("name", ["test_gloo_apis_0_cpu", "test_gloo_timeout", "test_functional_collectives"])
def test_apis(name: str):
    getattr(Apis(name), name)()
