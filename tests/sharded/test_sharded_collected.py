"""Sharded optimizers that are gone but for a cycle, which the collector has taken on one rank alone."""

from __future__ import annotations

import gc
from typing import Any

import torch
from pool import run_on_ranks
from torch import nn

import syncengine


def leave_behind(binds: bool) -> nn.Module:
    """A module whose optimizer nobody has any more."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer: Any = syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.itself = optimizer
    if binds:
        model: Any = syncengine.Parallel(net)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def train(net: nn.Module) -> None:
    model = syncengine.Parallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@run_on_ranks()
def test_no_rank_binds_or_is_refused_alone():
    gc.disable()
    try:
        for binds in (False, True):
            net = leave_behind(binds)
            if syncengine.rank() == 0:
                gc.collect()
            train(net)
            optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
            model = syncengine.Parallel(nn.Linear(4, 4))
            other: Any = syncengine.Parallel(nn.Linear(4, 4))
            other.itself = [other]
            del other
            if syncengine.rank() == 0:
                gc.collect()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.release()
    finally:
        gc.enable()


@run_on_ranks()
def test_weights_of_one_that_is_gone_may_be_written():
    gc.disable()
    try:
        net = leave_behind(binds=True)
        if syncengine.rank() == 0:
            gc.collect()
        with torch.no_grad():
            net.weight.zero_()
        train(net)
    finally:
        gc.enable()


@run_on_ranks()
def test_a_plain_optimizer_may_step_behind_one_that_is_gone():
    gc.disable()
    try:
        net = leave_behind(binds=True)
        if syncengine.rank() == 0:
            gc.collect()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    finally:
        gc.enable()


@run_on_ranks()
def test_a_step_binds_no_model_that_is_gone():
    gc.disable()
    try:
        net = nn.Linear(4, 4)
        model: Any = syncengine.Parallel(net)
        model.itself = [model]
        del model
        if syncengine.rank() == 0:
            gc.collect()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1).step()
        assert not net.weight.is_shared()
    finally:
        gc.enable()
