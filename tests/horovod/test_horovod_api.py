"""docs/horovod.md says what is there and what is refused; and the queries answer truthfully."""

import importlib
import inspect
import re
import sys

import pytest
import torch
from horovod_ranks import run_with_hvd
from repository import ROOT, TESTS

import syncengine.horovod as hvd
from syncengine._C import has_cuda
from syncengine.errors import InvalidUsage
from syncengine.horovod import _REFUSED as REFUSED
from syncengine.horovod.optimizer import Distributed

PAGE = (ROOT / "docs" / "horovod.md").read_text()


def rows(table: str) -> list[tuple[list[str], str, str]]:
    """Names, what becomes of them, and the test, of each row of a table."""
    found = []
    for line in re.findall(r"^\| `.*", table, re.MULTILINE):
        names, here, test = (cell.strip() for cell in line.strip("|").split("|"))
        found.append((re.findall(r"`(\w+)`", names), here, test))
    return found


CALLS, OPTIMIZER = (rows(table) for table in PAGE.partition("## Call by call")[2].split("`DistributedOptimizer`:\n"))
MODULES = ("mpi_ops", "functions", "elastic")


@pytest.mark.parametrize(("names", "here", "test"), CALLS, ids=[names[0] for names, _, _ in CALLS])
def test_table(names: list[str], here: str, test: str):
    for name in names:
        if here.startswith("refused"):
            assert name in REFUSED
            with pytest.raises(InvalidUsage, match=f"no {name}: "):
                getattr(hvd, name)
        else:
            assert name in hvd.__all__ or name in MODULES
            assert getattr(hvd, name) is not None
    check_test(test)


@pytest.mark.parametrize(("names", "here", "test"), OPTIMIZER, ids=[names[0] for names, _, _ in OPTIMIZER])
def test_table_of_the_optimizer(names: list[str], here: str, test: str):
    parameters = inspect.signature(hvd.DistributedOptimizer).parameters
    for name in names:
        assert name in parameters or callable(getattr(Distributed, name)), name
    check_test(test)


def check_test(test: str) -> None:
    file, name = test.split("::")
    assert f"def {name}(" in next(TESTS.rglob(file)).read_text()


def test_table_is_complete():
    named = {name for names, _, _ in CALLS for name in names}
    assert named == {*hvd.__all__, *REFUSED, *MODULES}
    of_optimizer = {name for names, _, _ in OPTIMIZER for name in names}
    assert of_optimizer >= {*inspect.signature(hvd.DistributedOptimizer).parameters} - {"optimizer"}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str):
    """By import, and as an attribute of hvd."""
    module = importlib.import_module(f"syncengine.horovod.{name}")
    assert getattr(hvd, name) is module
    shared = hvd.__all__ if name != "elastic" else ["HorovodInternalError", "HostsUpdatedInterrupt", "init", "shutdown"]
    assert [each for each in shared if getattr(module, each) is not getattr(hvd, each)] == []


@run_with_hvd()
def test_queries():
    assert hvd.mpi_built() == ("mpi4py" in sys.modules or hvd.process.importlib.util.find_spec("mpi4py") is not None)
    assert not hvd.mpi_enabled()
    assert hvd.cuda_built() == (has_cuda and torch.version.cuda is not None)
    for query in ("nccl_built", "gloo_built", "gloo_enabled", "ccl_built", "ddl_built", "rocm_built"):
        assert not getattr(hvd, query)()


@run_with_hvd()
def test_sync_batch_norm():
    """With the arguments that Horovod has, and made of a model's own layers."""
    torch.manual_seed(0)
    x = torch.randn(6, 3)
    for ours in (
        hvd.SyncBatchNorm(3),
        hvd.SyncBatchNorm(3, 1e-5, 0.1, True, True, hvd.global_process_set),
        hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))[0],
        hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.SyncBatchNorm(3)),
    ):
        theirs = torch.nn.BatchNorm1d(3)
        whole, mine = theirs(x), slice(3 * hvd.rank(), 3 * hvd.rank() + 3)
        torch.testing.assert_close(ours(x[mine]), whole[mine])
        torch.testing.assert_close(ours.running_var, theirs.running_var)
    with pytest.raises(InvalidUsage, match="is no hvd.ProcessSet"):
        hvd.SyncBatchNorm(3, process_set=[0])
