"""What torch and other tools ask of a DDP model: attributes, private names, logging data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import Branches, Conv, Mlp, different_bits
from pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_versions import since_2_13

import syncengine
from syncengine.errors import InvalidUsage
from syncengine.parallel.logging import _times

CAP = {"bucket_cap_mb": 0.1}


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + syncengine.rank()))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def of_both(step: Callable[[nn.Module], Any], make: Callable[[], nn.Module] = Mlp, **options: Any) -> list[Any]:
    """What `step` gives for Parallel and for DDP."""
    results = []
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        torch.manual_seed(0)
        results.append(step(wrap(make(), **options)))
    return results


def logging() -> None:
    def step(model: nn.Module) -> list[dict[str, Any]]:
        seen = [model._get_ddp_logging_data()]
        for i in range(4):
            model(data(i)).square().mean().backward()
        model._set_ddp_runtime_logging_sample_rate(7)
        return [*seen, model._get_ddp_logging_data()]

    (ours_at_first, ours), (theirs_at_first, theirs) = of_both(step, Conv)
    not_ours = {"gloo_device_transport", "gloo_num_threads", "bucket_sizes"}  # before the first plan; threads
    assert set(theirs_at_first) - not_ours <= set(ours_at_first)
    assert set(theirs) - not_ours <= set(ours)
    times = {key for key in theirs if "time" in key}
    own = {"bucket_cap_bytes", "bucket_sizes", "iteration"}  # DDP has counted the next one when it is asked
    for key in set(theirs) - not_ours - times - own - {"rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"}:
        assert ours[key] == theirs[key], key
    assert ours["iteration"] == 4
    assert times <= set(ours)
    for phase in ("forward_compute", "backward_compute", "backward_comm"):
        assert 0 < ours[f"{phase}_time"] < 60e9
        assert 0 < ours[f"avg_{phase}_time"] < 60e9
    assert ours["backward_comm_time_end"] >= ours["backward_compute_time_end"] > ours["forward_compute_time_start"]
    model = syncengine.Parallel(Mlp())
    with pytest.raises(InvalidUsage, match="equal or greater than 1"):
        model._set_ddp_runtime_logging_sample_rate(0)
    with model.join():
        assert model._get_ddp_logging_data()["join_uneven_inputs"] == 1
    model.logger.set_error_and_log("ValueError: no such token")
    assert model._get_ddp_logging_data()["error"] == "ValueError: no such token"


def test_logging_data(pool: RankPool):
    pool.run(logging, gloo=True, settings={"numerics": "ring"})


def logging_with_options() -> None:
    def step(model: nn.Module) -> dict[str, Any]:
        for i in range(3):
            model.zero_grad()
            model(data(i), i > 0).square().mean().backward()
        return model._get_ddp_logging_data()

    view = {"gradient_as_bucket_view": True, "forward_sync_buffers": False, "bucket_cap_mb": 3}
    for options in ({"find_unused_parameters": True, **view}, {"find_unused_parameters": True, "static_graph": True}):
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            ours, theirs = of_both(step, Used if "static_graph" in options else Branches, **options)
        for key in (
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "broadcast_buffers",
            "bucket_cap_bytes",
            "static_graph",
            "unused_parameter_size",
            "num_buckets_reduced",
        ):
            assert ours.get(key) == theirs.get(key), (key, ours.get(key), theirs.get(key), options)
    assert syncengine.Parallel(nn.SyncBatchNorm(3))._get_ddp_logging_data()["has_sync_bn"] == 1


class Used(Branches):
    """The same parameters at each step, as a static graph wants."""

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return super().forward(x, True)


@since_2_13
def test_logging_data_with_options(pool: RankPool):
    pool.run(logging_with_options, gloo=True, settings={"numerics": "ring"})


def test_times_are_those_of_the_last_step_and_the_mean():
    phases = {"forward": (1, 5), "backward": (2, 6), "comm": (3, 7), "overlap": (4, 8)}
    times = _times({"steps": 3, "forward_start": 10, "backward_start": 20, **phases})
    assert times["forward_compute_time"] == 1
    assert times["avg_backward_compute_time"] == 6
    assert (times["backward_comm_time"], times["avg_backward_comm_time"]) == (3, 7)
    assert (times["backward_compute_comm_overlap_time"], times["backward_compute_time_start"]) == (4, 20)
    assert _times({"steps": 0}) == {}


def steps_are_sampled() -> None:
    model = syncengine.Parallel(nn.Linear(24, 2))
    model._set_ddp_runtime_logging_sample_rate(5)
    for i in range(22):
        model(data(i)).sum().backward()
    assert model.reducer.timeline()["steps"] == 10 + 3  # 10, 15, 20


def test_times_are_sampled(pool: RankPool):
    pool.run(steps_are_sampled)


def arm() -> None:
    """As Lightning does under manual optimization: forward is told not to synchronize, the reducer later to do so."""

    def step(model: nn.Module) -> list[torch.Tensor]:
        for i in range(3):
            model.zero_grad()
            model.require_backward_grad_sync = False
            loss = model(data(i)).square().mean()
            model.require_backward_grad_sync = True
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([])
            loss.backward()
        return gradients(model)

    assert not different_bits(*of_both(step, **CAP))
    model = syncengine.Parallel(Mlp(), **CAP)
    assert model.reducer._rebuild_buckets()
    assert not model.reducer._rebuild_buckets()


def test_reducer_is_armed_by_hand(pool: RankPool):
    pool.run(arm, gloo=True)


def errors_and_warnings() -> None:
    def step(model: nn.Module) -> list[Any]:
        seen: list[Any] = []
        calls = (
            lambda: model.register_comm_hook(None, 1),
            lambda: model.register_comm_hook(None, wrong_bucket),
            lambda: model.register_comm_hook(None, wrong_return),
        )
        for call in calls:
            seen.append(outcome(call))
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

    wrong_bucket.__annotations__["bucket"] = int  # not as text
    wrong_return.__annotations__["return"] = int
    ours, theirs = of_both(step, find_unused_parameters=True)
    assert ours == theirs
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        with pytest.warns(UserWarning, match="You passed find_unused_parameters=true"):
            wrap(Mlp(), find_unused_parameters=True, static_graph=True)
    model = syncengine.Parallel(Mlp())
    with pytest.raises(InvalidUsage):
        model._set_ddp_runtime_logging_sample_rate(0)
    assert model._get_ddp_logging_data()["has_error"] == 1


def test_errors_are_logged_and_what_has_no_effect_is_said(pool: RankPool):
    pool.run(errors_and_warnings, gloo=True)


def profiled() -> None:
    def step(model: nn.Module) -> list[str]:
        with torch.profiler.profile() as profiler:
            model(data()).sum().backward()
        return [event.name for event in profiler.events() if event.name.startswith("DistributedDataParallel.")]

    assert of_both(step) == [["DistributedDataParallel.forward"]] * 2


def test_the_profiler_names_the_forward(pool: RankPool):
    pool.run(profiled, gloo=True)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.never = nn.Linear(24, 2), nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x)


def unfinished() -> None:
    model = syncengine.Parallel(Sometimes())
    model._check_reducer_finalized()
    model(data()).sum().backward()
    for check in (model._check_reducer_finalized, model.reducer._check_reducer_finalized):
        with pytest.raises(
            InvalidUsage, match=r"Expected to have finished reduction.*\n.*\n.*never.weight, never.bias"
        ):
            check()


def test_check_reducer_finalized(pool: RankPool):
    pool.run(unfinished)


def update_group() -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
        model(data(0)).square().mean().backward()
        model.zero_grad()
        model._update_process_group(first if dist.get_rank() < 2 else second)
        for i in range(3):
            model(data(i)).square().mean().backward()
        if dist.get_rank() > 1:
            model._update_process_group(first)  # not for these ranks
        assert dist.get_world_size(model.process_group) == 2
        return gradients(model)

    assert not different_bits(*of_both(step))


def test_update_process_group(pool: RankPool):
    pool.run(update_group, world=4, gloo=True)


def sink_clone() -> None:
    for clone in (True, False):
        model = syncengine.Parallel(nn.Sequential(nn.Linear(24, 2)), find_unused_parameters=True)
        model._set_ddp_sink_clone(clone)
        seen = []
        model.module.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        out = model(data())
        assert (out.data_ptr() == seen[0].data_ptr()) != clone
        out.sum().backward()


def test_sink_clone(pool: RankPool):
    pool.run(sink_clone)


class Asks(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(DistributedDataParallel._get_active_ddp_module())
        x = self.inner(x)
        self.seen.append(DistributedDataParallel._active_ddp_module)
        return x


def active_module() -> None:
    inner = Asks(nn.Linear(24, 2))
    outer = syncengine.Parallel(Asks(syncengine.Parallel(inner)))
    for grad in (True, False):
        inner.seen.clear()
        outer.module.seen.clear()
        with torch.set_grad_enabled(grad):
            outer(data())
        assert outer.module.seen == [outer, outer]
        assert inner.seen == [outer.module.inner] * 2
        assert DistributedDataParallel._active_ddp_module is None


def test_active_ddp_module(pool: RankPool):
    pool.run(active_module)


def privates() -> None:
    module = Mlp()
    module.head.requires_grad_(False)
    syncengine.Parallel._set_params_and_buffers_to_ignore_for_model(module, ["head.bias"])
    assert module.head.bias._ddp_ignored
    model = syncengine.Parallel(module)
    assert model._delay_all_reduce_params == []
    assert model._comm_hooks == []
    assert [id(p) for p in model._module_parameters] == [
        id(p) for n, p in module.named_parameters() if n != "head.bias"
    ]
    assert model._distributed_rank == syncengine.rank()
    assert model._has_rebuilt_buckets is False
    assert not model._join_config.enable
    assert model._ddp_sink_clone is True


def test_private_attributes(pool: RankPool):
    pool.run(privates)


def caps() -> None:
    for options in ({}, {"bucket_cap_mb": 3}):
        ours, theirs = of_both(
            lambda m: (m.bucket_bytes_cap, m.bucket_bytes_cap_list, m.bucket_bytes_cap_default), **options
        )
        assert ours == theirs


def test_bucket_caps(pool: RankPool):
    pool.run(caps, gloo=True, settings={"numerics": "ring"})


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        return "returned", str(call())
    except Exception as error:
        return type(error).__name__, str(error)


def scatter() -> None:
    """On CPU ranks these can't do much, but no less than DDP's."""

    def step(model: nn.Module) -> list[Any]:
        assert model.dim == 1
        return [
            outcome(lambda: model.gather([data(1), data(2)], "cpu")),
            outcome(lambda: model.scatter((data(),), {"y": data(1)}, [])),
            outcome(lambda: model.to_kwargs((data(),), {"y": data(1)}, 0)),
        ]

    ours, theirs = of_both(step, dim=1)
    assert ours == theirs
    assert ours[2][0] == "returned"


def test_scatter_and_gather(pool: RankPool):
    pool.run(scatter, gloo=True)


def deprecated() -> None:
    with pytest.warns(FutureWarning, match="check_reduction"):
        model = syncengine.Parallel(nn.Linear(24, 2), check_reduction=True)
    model(data()).sum().backward()


def test_check_reduction_is_deprecated(pool: RankPool):
    pool.run(deprecated)


def checkpoint() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    ours, theirs = of_both(get_model_state_dict, Conv)
    assert list(ours) == list(theirs) == list(Conv().state_dict())
    model = syncengine.Parallel(Conv())
    set_model_state_dict(model, dict(ours))  # which it changes
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, ours[name]), name


def test_distributed_checkpointing_strips_the_prefix(pool: RankPool):
    pool.run(checkpoint, gloo=True)
