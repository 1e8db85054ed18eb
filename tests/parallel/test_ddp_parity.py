"""docs/ddp_parity.md is held against torch's DDP and against what Parallel does."""

import ast
import inspect
import operator
import re
from dataclasses import dataclass

import pytest
from pool import run_on_ranks
from repository import ROOT, TESTS
from test_parallel_construction import REFUSED_ARGUMENTS
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_versions import since_2_13

import syncengine
from syncengine.errors import InvalidUsage

PAGE = ROOT / "docs" / "ddp_parity.md"
HEADS = ("| ---", "| argument |", "| name |", "| what |", "| asked")

# Private names of DDP that torch, Lightning, Accelerate and torchft use.
PRIVATE = """_get_ddp_logging_data _set_ddp_runtime_logging_sample_rate _set_static_graph
    _set_params_and_buffers_to_ignore_for_model _register_builtin_comm_hook _register_buffer_comm_hook
    _register_fused_optim _set_sparse_metadata _check_reducer_finalized _remove_autograd_hooks _update_process_group
    _set_ddp_sink_clone _get_active_ddp_module _delay_all_reduce_params __getstate__ __setstate__
    reducer._rebuild_buckets reducer.prepare_for_backward"""


@dataclass(frozen=True)
class Row:
    section: str
    names: tuple[str, ...]  # those in backticks in the first column
    status: str
    tests: tuple[str, ...]


def rows_of(text: str) -> list[Row]:
    rows, section = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith(HEADS):
            first, status, _, tests = (cell.strip() for cell in line.strip("|").split("|"))
            quoted, named = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in (first, tests))
            rows.append(Row(section, quoted, status, named))
    return rows


ROWS = rows_of(PAGE.read_text())


def names(section: str, status: str | None = None) -> list[str]:
    chosen = [row for row in ROWS if row.section == section and status in (None, row.status)]
    return [name for row in chosen for name in row.names]


def test_each_row_is_well_formed():
    assert len({row.section for row in ROWS}) == 6
    for row in ROWS:
        assert row.status in ("works", "better", "refused"), row
        assert row.tests, row


@pytest.mark.thorough
def test_each_named_test_exists():
    functions = {
        f"{path.stem}::{node.name}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert {test for row in ROWS for test in row.tests} <= functions


@since_2_13
def test_each_argument_of_ddp_has_a_row():
    theirs = list(inspect.signature(DistributedDataParallel.__init__).parameters)[1:]
    assert names("Constructor arguments") == theirs


@since_2_13
def test_each_public_method_of_ddp_has_a_row():
    public = {name for name in vars(DistributedDataParallel) if not name.startswith("_")}
    assert set(names("Methods and properties")) == public


def test_each_private_name_has_a_row():
    assert set(names("Private names that tools use")) >= set(PRIVATE.split())


@since_2_13
@run_on_ranks(gloo=True)
def test_each_attribute_of_ddp_has_a_row_and_is_there():
    theirs = {name for name in vars(DistributedDataParallel(nn.Linear(1, 1))) if not name.startswith("_")}
    assert theirs <= {*names("Attributes"), "training"}
    model = syncengine.Parallel(nn.Linear(1, 1))
    there = {*names("Attributes"), *names("Methods and properties"), *names("Private names that tools use")}
    for name in there - {"device_mesh"}:
        operator.attrgetter(name)(model)


@run_on_ranks()
def test_what_the_page_calls_refused_is_refused():
    arguments = names("Constructor arguments", "refused")
    delaying = {"delay_all_reduce_named_params", "param_to_hook_all_reduce"}
    assert set(arguments) == {"device_ids", "output_device", *delaying}
    for name in arguments:
        with pytest.raises(InvalidUsage, match=name):
            syncengine.Parallel(nn.Linear(1, 1), **{name: REFUSED_ARGUMENTS[name]})
    methods = names("Methods and properties", "refused") + names("Private names that tools use", "refused")
    assert methods == ["_set_sparse_metadata"]  # test_parallel_construction.py calls it


def test_rows_are_read_as_they_are_meant():
    text = "## Things\n| name | | what | test |\n| --- | --- | --- | --- |\n| `a`, `b` and c | works | `d` | `f::g` |\n"
    assert rows_of(text) == [Row("Things", ("a", "b"), "works", ("f::g",))]
