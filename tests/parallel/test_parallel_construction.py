"""What wrapping does: DDP's looks, rank 0's state on all ranks, models that differ, one rank alone."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_models import Conv, Mlp
from pool import RankPool, run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch_versions import since_2_13

import syncengine
from syncengine import _C
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
    model._check_reducer_finalized()


@since_2_13
def test_every_argument_of_ddp_is_known():
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    ours = inspect.signature(syncengine.Parallel.__init__).parameters
    assert [(p.name, p.default) for p in ours.values()][: len(theirs)] == [(p.name, p.default) for p in theirs.values()]


@run_on_ranks()
def test_rank_0_state_reaches_all_ranks():
    torch.manual_seed(syncengine.rank())
    module = Conv()
    module.register_buffer("large", torch.randn(40_000))
    module.register_buffer("strided", torch.randn(300, 200).t())
    module.register_buffer("scalar", torch.tensor(syncengine.rank() == 0))
    before = copy.deepcopy(module.state_dict())
    model = syncengine.Parallel(module)
    torch.manual_seed(0)
    expected = Conv().state_dict()
    expected.update(large=torch.randn(40_000), strided=torch.randn(300, 200).t(), scalar=torch.tensor(True))
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.stride() == before[name].stride()


@run_on_ranks()
def test_init_sync_false_leaves_state_alone():
    torch.manual_seed(syncengine.rank())
    module = Mlp()
    before = copy.deepcopy(module.state_dict())
    syncengine.Parallel(module, init_sync=False)
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), before.values(), strict=True))


@dataclasses.dataclass
class Difference:
    """A change to one rank's model, and what the error says."""

    change: Callable[[nn.Module], Any]
    texts: tuple[str, ...]


DIFFERENCES = {
    "shape": Difference(lambda m: setattr(m, "head", nn.Linear(500, 8)), ("head.weight", "(7, 500)", "(8, 500)")),
    "dtype": Difference(lambda m: m.head.double(), ("head.weight", "float32", "float64")),
    "strides": Difference(
        lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(500, 7).t())),
        ("head.weight", "(500, 1)", "(1, 7)"),
    ),
    "frozen": Difference(lambda m: m.head.bias.requires_grad_(False), ("head.bias", "trained")),
    "number": Difference(lambda m: setattr(m, "extra", nn.Linear(2, 2)), ("extra.weight", "nothing")),
    "buffer": Difference(lambda m: m.register_buffer("mask", torch.ones(3)), ("mask", "nothing")),
}


def mismatch_text(name: str) -> str:
    module = Mlp()
    if syncengine.rank() == 1:
        DIFFERENCES[name].change(module)
    with pytest.raises(Mismatch) as error:
        syncengine.Parallel(module)
    return str(error.value)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_different_models_are_a_mismatch_that_names_both_sides(pool: RankPool, name: str):
    first, *others = pool.run(mismatch_text, name, world=3)
    assert others == [first, first]
    assert all(text in first for text in ("rank 0 has", "rank 1 has", "Parallel(Mlp)", *DIFFERENCES[name].texts))


DIFFERENT_ARGUMENTS = {
    "find_unused_parameters": True,
    "bucket_cap_mb": 1,
    "bucket_cap_mb_list": [1],
    "forward_sync_buffers": False,
    "static_graph": True,
    "gradient_as_bucket_view": True,
    "batched_grad_copy": True,
    "skip_all_reduce_unused_params": True,
    "mixed_precision": _MixedPrecision(torch.bfloat16),
}


@run_on_ranks()
def test_different_arguments_are_a_mismatch():
    for name, value in DIFFERENT_ARGUMENTS.items():
        text = re.escape(f"{name}={value}")
        with pytest.raises(Mismatch, match=rf"rank 0 has .*{name}=.* rank 1 has .*{text}"):
            syncengine.Parallel(Mlp(), **{name: value} if syncengine.rank() == 1 else {})


@run_on_ranks(world=1)
def test_alone_it_is_the_module():
    before = set(threading.enumerate())
    module = Mlp()
    model = syncengine.Parallel(module)
    assert not isinstance(model.reducer, _C.Reducer)
    assert isinstance(model, DistributedDataParallel)
    with model.no_sync():
        model(torch.ones(2, 24)).sum().backward()
    assert not any(p.grad is None for p in module.parameters())
    assert set(threading.enumerate()) <= before
    pickle.loads(pickle.dumps(model))(torch.ones(2, 24)).sum().backward()
    with pytest.raises(InvalidUsage, match="mixed_precision"):
        syncengine.Parallel(module, mixed_precision=object())
