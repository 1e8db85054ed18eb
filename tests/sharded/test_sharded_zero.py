"""Scripts for torch's ZeroRedundancyOptimizer, with another name in one place."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from pool import run_on_ranks
from sharded_training import differences, different_weights, error_of, make, not_divided, train
from torch.distributed.optim import ZeroRedundancyOptimizer

import syncengine


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "by"),
    mostly_nightly(
        [({}, "nothing"), ({}, "keyword"), ({"parameters_as_bucket_view": True, "overlap_with_ddp": False}, "keyword")],
        2,
    ),
)
@run_on_ranks(gloo=True)
def test_the_script_runs_as_it_is(options: dict[str, Any], by: str):
    group = dist.group.WORLD
    nets, saved, wrong = [make(), make()], [], [""]
    for net, kind in zip(nets, (syncengine.ShardedOptimizer, ZeroRedundancyOptimizer), strict=True):
        model = syncengine.Parallel(net, process_group=group)
        if by == "keyword":
            more = {"process_group": group, **options}
            optimizer = kind(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2, **more)
        else:
            optimizer = kind(model.parameters(), torch.optim.AdamW, lr=1e-2)
        train(model, optimizer, 3)
        if kind is syncengine.ShardedOptimizer:
            wrong = not_divided(net, optimizer)
        optimizer.consolidate_state_dict(to=0)
        saved.append(optimizer.state_dict() if dist.get_rank() == 0 else None)
    if saved[0] is not None:
        wrong += differences(saved[1], saved[0])
    return wrong + different_weights(*nets)


@pytest.mark.thorough
@run_on_ranks(world=4, gloo=True)
def test_another_group_than_the_models_is_refused():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    net = make()
    model = syncengine.Parallel(net)
    optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.AdamW, process_group=mine)
    text = error_of(lambda: train(model, optimizer, 1))
    assert "InvalidUsage" in text and "process_group" in text and "ranks [0, 1, 2, 3]" in text
    net = make()
    model = syncengine.Parallel(net, process_group=mine)
    train(model, syncengine.ShardedOptimizer(net.parameters(), torch.optim.AdamW, process_group=mine), 1)


@run_on_ranks(gloo=True)
def test_models_of_several_groups_are_refused():
    nets = [make(), make()]
    models = [syncengine.Parallel(nets[0]), syncengine.Parallel(nets[1], process_group=dist.new_group())]
    optimizer = syncengine.ShardedOptimizer([p for net in nets for p in net.parameters()], torch.optim.AdamW)
    texts = [error_of(lambda model=model: train(model, optimizer, 1)) for model in models]
    assert all("the models of one ShardedOptimizer need one process group" in text for text in texts), texts
