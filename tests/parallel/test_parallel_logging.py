"""What DDP logs: the data that tools read, times, errors and warnings."""

import contextlib
import gc
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from parallel_models import AllBranches, Branches, Conv, Mlp, backwards, data, of_both, outcome, warned_of
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
    own = {"bucket_cap_bytes", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"}
    for key in {key for key in theirs if "time" not in key} - not_ours - own:
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


@pytest.mark.parametrize("rate", [1, 2, 3, 100])
@run_on_ranks(gloo=True)
def test_the_iteration_is_the_last_that_was_timed(rate: int):
    def step(model: nn.Module) -> list[Any]:
        model._set_ddp_runtime_logging_sample_rate(rate)
        seen = []
        for i in range(30):
            with {2: model.no_sync, 4: torch.no_grad}.get(i % 5, contextlib.nullcontext)():
                loss = model(data(i)).sum()
                if loss.requires_grad:
                    loss.backward()
            seen.append(model._get_ddp_logging_data().get("iteration", 0))
        if isinstance(model, syncengine.Parallel):
            assert len(numbers_of(model.reducer.step_times()).times) == 18  # all steps are timed
        return seen

    ours, theirs = of_both(step)
    assert ours == theirs


@run_on_ranks(gloo=True)
def test_what_comes_too_late_is_logged():
    def refused(model: nn.Module, after_training: bool) -> list[Any]:
        text = "should be called before training loop starts" if after_training else "can only be called once"
        with pytest.raises(RuntimeError, match=text) as raised:
            if after_training:
                model(data(0)).sum().backward()
                model._set_static_graph()
            else:
                for _ in range(2):
                    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        logged = model._get_ddp_logging_data()
        return [logged["error"] in str(raised.value), logged["has_error"], logged["iteration"]]

    for after_training in (True, False):
        ours, theirs = of_both(partial(refused, after_training=after_training))
        assert ours == theirs == [True, 1, int(after_training)]


def errors_in_training(static: bool, steps: int) -> list[tuple[str, str, Any, Any]]:
    def step(model: nn.Module) -> tuple[str, str, Any, Any]:
        def train() -> None:
            for i in range(steps):
                model(data(i), i < steps - 1 - (not static)).sum().backward()

        dist.barrier()  # both are made when one fails
        kind, text = outcome(train)
        logged = model._get_ddp_logging_data()
        return kind, text, logged.get("error"), (logged.get("has_error"), logged.get("iteration"))

    return of_both(step, Branches if static else AllBranches, static_graph=static)  # static: an error in backward


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
        warned = warned_of("", lambda: (model._set_static_graph(), model._set_static_graph()))
        return seen + [text[:57] for text in warned]

    def wrong_bucket(state: Any, bucket: int):
        pass

    def wrong_return(state: Any, bucket) -> int:
        pass

    ours, theirs = of_both(step, find_unused_parameters=True)
    assert ours == theirs
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        with pytest.warns(UserWarning, match="You passed find_unused_parameters=true"):
            model = wrap(Mlp(), find_unused_parameters=True, static_graph=True)
        with pytest.warns(UserWarning, match="no need to set it again"):
            model._set_static_graph()
