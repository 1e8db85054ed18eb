"""What DDP logs: the data that tools read, times, errors and warnings."""

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from parallel_models import Branches, Conv, Mlp, backwards, data, of_both, outcome
from pool import RankPool, run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_versions import since_2_13

import syncengine
from syncengine.errors import InvalidUsage
from syncengine.parallel.logging import _times
from syncengine.parallel.summary import _TIMES, numbers_of


@run_on_ranks(gloo=True, settings={"numerics": "ring"})
def test_logging_data():
    def step(model: nn.Module) -> list[dict[str, Any]]:
        seen = [model._get_ddp_logging_data()]
        backwards(model, 4)
        model._set_ddp_runtime_logging_sample_rate(7)
        return [*seen, model._get_ddp_logging_data()]

    (ours_at_first, ours), (theirs_at_first, theirs) = of_both(step, Conv)
    not_ours = {"gloo_device_transport", "gloo_num_threads", "bucket_sizes"}  # before the first plan; threads
    assert set(theirs_at_first) - not_ours <= set(ours_at_first)
    assert set(theirs) - not_ours <= set(ours)
    times = {key for key in theirs if "time" in key}
    own = {"bucket_cap_bytes", "bucket_sizes"}
    for key in set(theirs) - not_ours - times - own - {"rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"}:
        assert ours[key] == theirs[key], key
    assert ours["iteration"] == 3  # there were before the last
    for phase in ("forward_compute", "backward_compute", "backward_comm"):
        assert 0 < ours[f"{phase}_time"] < 60e9
        assert 0 < ours[f"avg_{phase}_time"] < 60e9
    assert ours["backward_comm_time_end"] >= ours["backward_compute_time_end"] > ours["forward_compute_time_start"]
    model = syncengine.Parallel(Mlp())
    with pytest.raises(InvalidUsage, match="equal or greater than 1"):
        model._set_ddp_runtime_logging_sample_rate(0)
    assert model._get_ddp_logging_data()["has_error"] == 1
    with model.join():
        assert model._get_ddp_logging_data()["join_uneven_inputs"] == 1
    model.logger.set_error_and_log("ValueError: no such token")
    assert model._get_ddp_logging_data()["error"] == "ValueError: no such token"
    logger, reducer = model.logger, model.reducer
    del model
    gc.collect()
    for use in (logger._get_ddp_logging_data, reducer._rebuild_buckets, reducer._get_local_used_map):
        with pytest.raises(InvalidUsage, match="is gone: keep the model"):
            use()


@since_2_13
@run_on_ranks(gloo=True, settings={"numerics": "ring"})
def test_logging_data_with_options():
    def step(model: nn.Module) -> dict[str, Any]:
        for i in range(3):
            model.zero_grad()
            model(data(i), i > 0 or model.static_graph).square().mean().backward()
        return model._get_ddp_logging_data()

    keys = """find_unused_parameters gradient_as_bucket_view broadcast_buffers bucket_cap_bytes static_graph
        unused_parameter_size num_buckets_reduced"""
    view = {"gradient_as_bucket_view": True, "forward_sync_buffers": False, "bucket_cap_mb": 3}
    for options in ({"find_unused_parameters": True, **view}, {"find_unused_parameters": True, "static_graph": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            ours, theirs = of_both(step, Branches, **options)
        for key in keys.split():
            assert ours.get(key) == theirs.get(key), (key, ours.get(key), theirs.get(key), options)
    assert syncengine.Parallel(nn.SyncBatchNorm(3))._get_ddp_logging_data()["has_sync_bn"] == 1


def test_times_are_those_of_the_last_step_and_the_mean():
    """In whatever order they are kept; without those that had no forward, or no bucket."""
    last, first = (50, 60, 61, 62, 65, 69), (0, 10, 13, 17, 16, 20)
    steps = np.array([last, first, (20, 0, 31, 32, 33, 39), (20, 30, 31, 0, 33, 50)]).view(_TIMES)[:, 0]
    times = _times(steps)
    assert (times["forward_compute_time"], times["avg_forward_compute_time"]) == (1, 2)
    assert (times["backward_compute_time"], times["avg_backward_compute_time"]) == (4, 3)
    assert (times["backward_comm_time"], times["avg_backward_comm_time"]) == (7, 5)
    assert times["backward_compute_comm_overlap_time"] == 3
    assert times["avg_backward_compute_comm_overlap_time"] == 1  # in the first one there was none
    assert times["backward_comm_time_end"] - times["forward_compute_time_start"] == 9
    assert _times(steps[2:]) == {}


@run_on_ranks()
def test_all_steps_are_timed():
    model = syncengine.Parallel(nn.Linear(24, 2))
    model._set_ddp_runtime_logging_sample_rate(5)
    backwards(model, 22)
    assert len(numbers_of(model.reducer.step_times()).times) == 22


@pytest.mark.parametrize("rate", [1, 2, 3, 100])
@run_on_ranks(gloo=True)
def test_the_iteration_is_the_last_that_was_timed(rate: int):
    """Asked for after each step: some of them under no_sync, or for evaluation."""

    def step(model: nn.Module) -> list[Any]:
        model._set_ddp_runtime_logging_sample_rate(rate)
        seen = []
        for i in range(18):
            if i % 5 == 2:
                with model.no_sync():
                    model(data(i)).sum().backward()
            elif i % 5 == 4:
                with torch.no_grad():
                    model(data(i))
            else:
                model(data(i)).sum().backward()
            seen.append(model._get_ddp_logging_data().get("iteration", 0))
        return seen

    ours, theirs = of_both(step)
    assert ours == theirs


@run_on_ranks(gloo=True)
def test_what_comes_too_late_is_logged():
    def after_training(model: nn.Module) -> None:
        model(data(0)).sum().backward()
        model._set_static_graph()

    def twice(model: nn.Module) -> None:
        for _ in range(2):
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)

    def refused(call: Callable[[nn.Module], None], model: nn.Module) -> list[Any]:
        with pytest.raises(RuntimeError, match="should be called before training|can only be called once") as raised:
            call(model)
        logged = model._get_ddp_logging_data()
        return [logged["error"] in str(raised.value), logged["has_error"], logged["iteration"]]

    for call, forwards in ((after_training, 1), (twice, 0)):
        ours, theirs = of_both(partial(refused, call))
        assert ours == theirs == [True, 1, forwards]


def errors_in_training(static: bool, steps: int) -> list[tuple[str, str, Any, Any]]:
    """What is logged of an error in forward, or, of a static graph, in backward."""

    def step(model: nn.Module) -> tuple[str, str, Any, Any]:
        def train() -> None:
            for i in range(steps):
                model(data(i), i < steps - 1 - (not static)).sum().backward()

        dist.barrier()  # both are made when one fails
        kind, text = outcome(train)
        logged = model._get_ddp_logging_data()
        return kind, text, logged.get("error"), (logged.get("has_error"), logged.get("iteration"))

    return of_both(step, Branches if static else Both, static_graph=static)


class Both(Branches):
    """Uses all, or all but the last."""

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = super().forward(x, True) + (super().forward(x, False) if both else 0)
        return y + self.never(x)


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("static", [False, True])
def test_errors_in_training_are_logged(pool: RankPool, static: bool, steps: int):
    results = pool.run(errors_in_training, static, steps, gloo=True)
    for ours, theirs in results:
        for _, text, logged, (has_error, _) in (ours, theirs):
            assert text
            assert text.split(" (")[0][:40] in logged
            assert has_error == 1
        if ours[0] != "Aborted":  # by the other's error, perhaps one step before
            assert ours[3] == theirs[3]
    assert any(ours[0] != "Aborted" for ours, _ in results)


@run_on_ranks(gloo=True)
def test_errors_are_logged_and_what_has_no_effect_is_said():
    def step(model: nn.Module) -> list[Any]:
        seen: list[Any] = []
        for hook in (1, wrong_bucket, wrong_return):
            seen.append(outcome(lambda hook=hook: model.register_comm_hook(None, hook)))
            logged = model._get_ddp_logging_data()
            seen.append((logged["error"], logged["has_error"]))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model._set_static_graph()
            model._set_static_graph()
        return seen + [str(w.message)[:57] for w in warned]

    def wrong_bucket(state: Any, bucket: int):
        pass

    def wrong_return(state: Any, bucket) -> int:
        pass

    ours, theirs = of_both(step, find_unused_parameters=True)
    assert ours == theirs
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        with pytest.warns(UserWarning, match="You passed find_unused_parameters=true"):
            wrap(Mlp(), find_unused_parameters=True, static_graph=True)
