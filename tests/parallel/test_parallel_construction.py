"""What wrapping does: DDP's looks, rank 0's state on all ranks, an error for models that differ; what is refused."""

import copy
import inspect
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_models import Conv, Mlp, outcome
from pool import RankPool, run_on_ranks
from random_layers import linear
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch_versions import since_2_13

import syncengine
from syncengine.errors import InvalidUsage, Mismatch


@run_on_ranks()
def test_it_looks_like_ddp():
    model = syncengine.Parallel(Conv())
    assert isinstance(model, DistributedDataParallel)
    assert all(name.startswith("module.") for name in model.state_dict())
    names = """module reducer logger process_group device device_ids device_type output_device static_graph
        find_unused_parameters require_backward_grad_sync require_forward_param_sync parameters_to_ignore
        bucket_bytes_cap modules_buffers named_module_buffers broadcast_buffers join_device join_process_group"""
    for name in names.split():
        getattr(model, name)
    assert model.will_sync_module_buffers()
    assert model.train(False) is model
    assert not model.module.training


@since_2_13
def test_every_argument_of_ddp_is_known():
    theirs = list(inspect.signature(DistributedDataParallel.__init__).parameters.values())
    ours = list(inspect.signature(syncengine.Parallel.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert {p.kind for p in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}  # DDP may get more arguments


@run_on_ranks()
def test_rank_0_state_reaches_all_ranks():
    torch.manual_seed(syncengine.rank())
    module = Conv()
    module.register_buffer("large", torch.randn(40_000))
    module.register_buffer("strided", torch.randn(300, 200).t())
    module.register_buffer("scalar", torch.tensor(syncengine.rank() == 0))
    model = syncengine.Parallel(module)
    torch.manual_seed(0)
    expected = Conv().state_dict()
    expected.update(large=torch.randn(40_000), strided=torch.randn(300, 200).t(), scalar=torch.tensor(True))
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.stride() == expected[name].stride()


@run_on_ranks()
def test_init_sync_false_leaves_state_alone():
    torch.manual_seed(syncengine.rank())
    module = Mlp()
    before = copy.deepcopy(module.state_dict())
    syncengine.Parallel(module, init_sync=False)
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), before.values(), strict=True))


# A change to one rank's model, and what the error says.
DIFFERENCES: dict[str, tuple[Callable[[nn.Module], Any], tuple[str, ...]]] = {
    "shape": (lambda m: setattr(m, "head", nn.Linear(500, 8)), ("head.weight", "(7, 500)", "(8, 500)")),
    "dtype": (lambda m: m.head.double(), ("head.weight", "float32", "float64")),
    "strides": (lambda m: setattr(m.head.weight, "data", torch.zeros(500, 7).T), ("head.weight", "(500, 1)", "(1, 7)")),
    "frozen": (lambda m: m.head.bias.requires_grad_(False), ("head.bias", "trained")),
    "number": (lambda m: setattr(m, "extra", nn.Linear(2, 2)), ("extra.weight", "nothing")),
    "buffer": (lambda m: m.register_buffer("mask", torch.ones(3)), ("mask", "nothing")),
}


def with_difference(name: str) -> tuple[str, str]:
    module = Mlp()
    if syncengine.rank() == 1:
        DIFFERENCES[name][0](module)
    return outcome(lambda: syncengine.Parallel(module))


@pytest.mark.parametrize("name", DIFFERENCES)
def test_different_models_are_a_mismatch_that_names_both_sides(pool: RankPool, name: str):
    (kind, text), *others = pool.run(with_difference, name, world=3)
    assert kind == "Mismatch"
    assert others == [(kind, text)] * 2
    assert all(part in text for part in ("rank 0 has", "rank 1 has", "Parallel(Mlp)", *DIFFERENCES[name][1]))


@run_on_ranks()
def test_different_arguments_are_a_mismatch():
    switches = """find_unused_parameters static_graph gradient_as_bucket_view batched_grad_copy
        skip_all_reduce_unused_params"""
    arguments = {**dict.fromkeys(switches.split(), True), "mixed_precision": _MixedPrecision(torch.bfloat16)}
    arguments |= {"bucket_cap_mb": 1, "bucket_cap_mb_list": [1], "forward_sync_buffers": False, "audit": 5}
    for name, value in arguments.items():
        text = re.escape(f"{name}={value}")
        with pytest.raises(Mismatch, match=rf"rank 0 has .*{name}=.* rank 1 has .*{text}"):
            syncengine.Parallel(Mlp(), **{name: value} if syncengine.rank() == 1 else {})


@run_on_ranks(world=1)
def test_alone_it_is_the_module():
    before = set(threading.enumerate())
    model = syncengine.Parallel(Mlp())
    assert not isinstance(model.reducer, syncengine._C.Reducer)
    assert isinstance(model, DistributedDataParallel)
    with model.no_sync():
        model(torch.ones(2, 24)).sum().backward()
    assert not any(p.grad is None for p in model.parameters())
    assert set(threading.enumerate()) <= before
    pickle.loads(pickle.dumps(model))(torch.ones(2, 24)).sum().backward()


REFUSED_ARGUMENTS: dict[str, Any] = dict.fromkeys(("mixed_precision", "device_mesh", "process_group"), object())
REFUSED_ARGUMENTS |= {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": torch.zeros(1)}
REFUSED_ARGUMENTS |= {"bucket_cap_mb_list": [1, 0], "bucket_cap_mb": 0, "device_ids": [0], "output_device": 0}


class On(nn.Module):
    """Its parameters and its buffer say that they lie on these devices, which need not be there."""

    def __init__(self, *devices: str, buffer: str | None = None) -> None:
        super().__init__()
        with FakeTensorMode():
            for i, device in enumerate(devices):
                setattr(self, f"p{i}", nn.Parameter(torch.empty(2, 2, device=device)))
            self.register_buffer("statistics", torch.empty(2, device=buffer or devices[0]))


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    **{name: (linear, {name: value}, name) for name, value in REFUSED_ARGUMENTS.items()},
    **{f"audit {value!r}": (linear, {"audit": value}, "audit=") for value in (-1, 2.0, True, "5", None)},
    "group": (linear, {"process_group": "gloo"}, "process_group of type str is no group"),
    "large cap": (linear, {"bucket_cap_mb": 2.0**43}, r"bucket_cap_mb must be .*less than 2\*\*43"),
    "large caps": (linear, {"bucket_cap_mb_list": [1, 1e30]}, r"bucket_cap_mb_list must be .*less than 2\*\*43"),
    "lazy": (lambda: nn.LazyLinear(3), {}, "weight is not initialized"),
    "frozen": (lambda: linear().requires_grad_(False), {}, "doesn't have any parameter that requires a gradient"),
    "meta": (lambda: nn.Linear(1, 1, device="meta"), {}, "weight on meta"),
    "mixed": (lambda: On("cuda:1", "cpu"), {}, "several devices: parameter p0 is on cuda:1, p1 on cpu"),
    "two": (lambda: On("cuda:1", "cuda:0"), {}, "several devices: parameter p0 is on cuda:1, p1 on cuda:0"),
    "other": (lambda: On("xpu"), {}, "parameter p0 on xpu"),
    "ids": (lambda: On("cuda:1"), {"device_ids": [0]}, "device_ids says device 0, but the module is on cuda:1"),
    "output": (lambda: On("cuda:1"), {"device_ids": [1], "output_device": 0}, "output_device says device 0"),
    "output alone": (lambda: On("cuda:1"), {"output_device": 1}, "output_device 1 needs device_ids"),
    "buffer": (lambda: On("cuda:1", buffer="cpu"), {}, "buffer statistics on cpu of a module on cuda:1"),
}


@pytest.mark.parametrize("world", [1, 2])
@run_on_ranks()
def test_what_is_not_supported_is_refused_by_name(world: int):
    for make, arguments, text in REFUSED.values():
        with pytest.raises(InvalidUsage, match=text):
            syncengine.Parallel(make(), **arguments)
    with pytest.raises(InvalidUsage, match="_set_sparse_metadata.*not support|not support.*_set_sparse_metadata"):
        syncengine.Parallel(linear())._set_sparse_metadata()
    if world == 1:
        model = syncengine.Parallel(On("cuda:1"), device_ids=[1])
        assert (model.device_ids, model.output_device, model.device) == ([1], 1, torch.device("cuda:1"))
    if not torch.cuda.is_available():
        with pytest.raises(InvalidUsage, match="no CUDA side|no driver|no device"):  # one rank needs a hook
            syncengine.Parallel(On("cuda:1")).register_comm_hook(None, syncengine.hooks.bf16_compress)
