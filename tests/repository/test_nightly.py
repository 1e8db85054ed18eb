"""CONTRIBUTING.md has the parts of `make nightly`, and their minutes; and what of the tests runs at night alone."""

import ast
import functools
import re
import sys
from pathlib import Path

from repository import ROOT, TESTS

sys.path.insert(0, str(ROOT / "scripts"))
from nightly import PARTS

# The functions of which no case stays in CI. Each has the test in CI that finds the same bugs, or, behind "alone:",
# what the night alone tries.
AT_NIGHT = {
    "commands/test_bench.py::test_columns": "commands/test_bench.py::test_the_table_compares",
    "commands/test_doctor.py::test_alone_it_says_how_to_start": (
        "commands/test_doctor.py::test_it_starts_ranks_itself_and_prints_one_report"
    ),
    "commands/test_doctor_hosts.py::test_a_host_that_nothing_reaches": (
        "commands/test_doctor_ranks.py::test_a_rank_that_does_not_come"
    ),
    "commands/test_doctor_hosts.py::test_hosts_that_meet_and_cannot_connect": (
        "commands/test_doctor_ranks.py::test_hosts_that_cannot_connect"
    ),
    "commands/test_doctor_hosts.py::test_hosts_that_reach_each_other": (
        "commands/test_doctor_ranks.py::test_hosts_that_connect"
    ),
    "commands/test_doctor_ranks.py::test_another_number_than_the_launchers_is_refused": (
        "alone: --ranks beside a launcher"
    ),
    "commands/test_local_ranks.py::test_a_bench_that_cannot_run_is_not_one_with_wrong_results": (
        "alone: a benchmark without memory"
    ),
    "commands/test_local_ranks.py::test_descriptors_that_just_suffice": "alone: 24 descriptors are enough",
    "commands/test_report.py::test_the_command_writes_pages": "commands/test_report.py::test_the_page_is_whole",
    "commands/test_run.py::test_a_late_reader_misses_no_line": "alone: ranks that end before their lines are read",
    "commands/test_run.py::test_another_process_joins_in_the_place_of_the_dead": (
        "commands/test_run.py::test_a_process_is_started_in_the_place_of_the_dead"
    ),
    "commands/test_run.py::test_ranks_end_when_nobody_reads_their_lines_any_more": (
        "alone: ranks whose lines nobody reads"
    ),
    "communicator/test_zero_copy.py::test_memory_does_not_grow_with_changing_batch_sizes": (
        "alone: memory over a thousand steps"
    ),
    "faults/test_elastic.py::test_killed_in_a_step_of_other_optimizers": "faults/test_chaos.py::test_stories",
    "faults/test_elastic.py::test_nobody_dies": "faults/test_elastic.py::test_killed_in_a_step",
    "faults/test_elastic_joining.py::test_one_dies_while_another_one_joins": (
        "faults/test_elastic_joining.py::test_several_join"
    ),
    "faults/test_ends.py::test_launchers_show_the_rank_that_failed": "alone: torchrun, Open MPI, MPICH and Slurm",
    "horovod/test_horovod_elastic.py::test_ranks_are_killed_and_come_back": (
        "alone: deaths and restarts under Horovod's run"
    ),
    "interhost/test_hosts_split.py::test_one_part_goes_on_where_connections_are_reset_in_a_shrink": (
        "interhost/test_hosts_split.py::test_one_part_goes_on_where_connections_are_reset"
    ),
    "interhost/test_interhost_mpi.py::test_a_packet_that_fails_has_not_arrived": (
        "alone: how MPI tells that a packet failed"
    ),
    "interhost/test_interhost_mpi.py::test_a_thread_level_that_is_too_low_is_refused": "alone: another start of MPI",
    "interhost/test_interhost_mpi.py::test_exit_without_shutdown": "alone: how MPI ends",
    "interhost/test_interhost_mpi.py::test_killed": "alone: how MPI ends",
    "interhost/test_interhost_mpi.py::test_mpi_that_was_finalized_is_named": "alone: how MPI ends",
    "launch/test_autoload.py::test_spawned_children_have_the_name_and_the_patch": (
        "alone: spawned children, with the patch"
    ),
    "launch/test_failed_start.py::test_a_child_of_a_rank_is_no_rank": (
        "alone: children of a rank that has not met the others"
    ),
    "launch/test_failed_start.py::test_launchers": "launch/test_failed_start.py::test_a_bad_setting",
    "launch/test_import.py::test_an_installation_for_another_python_is_named_as_such": (
        "alone: an extension for another Python"
    ),
    "launch/test_import.py::test_build_names_what_it_lacks": "alone: a machine without a compiler or headers",
    "launch/test_launchers_real.py::test_mpi4py_of_another_mpi_is_refused": "alone: one MPI under the other's mpirun",
    "launch/test_patch.py::test_odd_arguments_end_as_ddps": "alone: each of DDP's arguments with odd values",
    "launch/test_rendezvous.py::test_attempts_that_fail_in_turn": (
        "launch/test_rendezvous.py::test_the_living_meet_and_nobody_else"
    ),
    "launch/test_slurm_real.py::test_srun": "alone: Slurm's own srun",
    "launch/test_slurm_real.py::test_the_batch_script": "alone: the script of examples/clusters",
    "parallel/test_compile.py::test_a_compiled_training_step": (
        "parallel/test_compile.py::test_compiled_training_has_the_bits_and_graphs_of_ddp"
    ),
    "parallel/test_gradient_memory.py::test_bits_are_those_of_the_staged_way": (
        "alone: pages of 4 KiB; `make pages` has the others in CI"
    ),
    "parallel/test_micro_batches.py::test_drawn_jobs_train_the_same": (
        "parallel/test_micro_batches.py::test_any_number_of_ranks_trains_what_a_plain_loop_does"
    ),
    "parallel/test_micro_batches.py::test_inductor_trains_the_same_at_any_number_of_ranks": "alone: code of inductor",
    "parallel/test_micro_batches.py::test_real_hosts_train_what_the_plain_example_does": (
        "parallel/test_micro_batches.py::test_hosts_train_the_same"
    ),
    "parallel/test_stragglers.py::test_balanced_runs_name_nobody": "alone: the rate of false alarms",
    "repository/test_examples.py::test_all_reduce_benchmark": "alone: the benchmark's program",
    "repository/test_examples.py::test_hosts_benchmark": "alone: the benchmark's program",
    "repository/test_examples.py::test_memory_benchmark": "alone: the benchmark's program",
    "repository/test_examples.py::test_the_elastic_example_gives_the_same_weights": "alone: the example's program",
    "repository/test_examples.py::test_train_step_benchmark": "alone: the benchmark's program",
    "repository/test_packaging.py::test_a_wheel_compiles_what_it_lacks": "alone: a wheel that is built and used",
    "repository/test_site.py::test_every_public_name_is_on_the_site": "alone: the site as it is built",
    "repository/test_tutorial.py::test_a_rank_is_killed": "alone: the tutorial's program",
    "repository/test_tutorial.py::test_a_wrong_number_of_ranks_is_one_line": "alone: an example's own message",
    "repository/test_tutorial.py::test_several_machines": "alone: the tutorial's program",
    "repository/test_tutorial.py::test_where_the_time_goes": "alone: the tutorial's program",
    "repository/test_tutorial.py::test_who_is_late": "alone: the tutorial's program",
    "sharded/test_sharded_equality.py::test_each_of_torchs_optimizers_has_its_own_bits_in_rank_order": (
        "alone: rank order between hosts, beside each optimizer of torch"
    ),
    "sharded/test_sharded_kills.py::test_killed_at_random_instants": (
        "sharded/test_sharded_kills.py::test_killed_at_each_state"
    ),
    "torch_backend/test_torch_backend_futures.py::test_a_chain_of_callbacks_that_each_wait": (
        "torch_backend/test_torch_backend_futures.py::test_a_callback_may_wait_for_what_began_before_it"
    ),
}


def is_nightly(decorator: ast.expr) -> bool:
    """Whether it marks all cases of the function: by itself, or as a parameter none of whose values stays in CI."""
    if ast.unparse(decorator) == "pytest.mark.nightly":
        return True
    values = [*decorator.args, *(each.value for each in decorator.keywords)] if isinstance(decorator, ast.Call) else []
    return any(
        isinstance(value, ast.Call) and ast.unparse(value.func) == "mostly_nightly" and len(value.args) == 1
        for value in values
    )


def functions(file: str, text: str) -> dict[str, bool]:
    """The tests of a file, and whether all of their cases run at night alone."""
    tree = ast.parse(text)
    marks = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    whole = any("pytest.mark.nightly" in ast.unparse(node) for node in marks)
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {f"{file}::{test.name}": whole or any(map(is_nightly, test.decorator_list)) for test in tests}


@functools.cache
def all_functions() -> dict[str, bool]:
    """Those of each folder that a run of `tests` takes."""
    files = [path.relative_to(TESTS) for path in sorted(TESTS.glob("*/test_*.py"))]
    return {
        name: nightly
        for file in files
        if file.parts[0] != "integrations"
        for name, nightly in functions(file.as_posix(), Path(TESTS, file).read_text()).items()
    }


def test_the_table_of_parts_is_the_scripts():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("### Each night")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", table, re.MULTILINE)
    assert rows == [(name, str(part.minutes)) for name, part in PARTS.items()]
    assert sum(part.minutes for part in PARTS.values()) <= 150


def test_what_runs_at_night_alone_is_known():
    found = all_functions()
    assert {name for name, nightly in found.items() if nightly} == AT_NIGHT.keys()


def test_what_fails_instead_runs_in_ci():
    found = all_functions()
    instead = {name for name in AT_NIGHT.values() if not name.startswith("alone: ")}
    assert [name for name in instead if found.get(name) is not False] == []


def test_functions_without_a_case_in_ci_are_found():
    text = """
@pytest.mark.nightly
def test_a(): ...
@pytest.mark.parametrize("n", mostly_nightly([1, 2], 0))
def test_b(): ...
@run_on_ranks(hosts=mostly_nightly(HOSTS))
def test_c(): ...
@pytest.mark.parametrize("n", [0, *mostly_nightly([1, 2])])
def test_d(): ...
"""
    found = functions("f.py", text)
    assert [name for name, nightly in found.items() if nightly] == ["f.py::test_a", "f.py::test_c"]
    assert all(functions("f.py", f"pytestmark = [pytest.mark.nightly]\n{text}").values())
