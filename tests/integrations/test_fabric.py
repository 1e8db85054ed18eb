"""`Fabric(strategy=syncengine.lightning.FabricStrategy())`, bit for bit as over DDP."""

import contextlib
import functools

import pytest
import torch
from lightning_ranks import both, leave, loader, net, on_ranks, same, shared_folder, weights

import syncengine
from syncengine import errors


def start(lightning, strategy, **options):
    """A launched Fabric, a model and its optimizer."""
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
    fabric.launch()
    module = net()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    return fabric, model, optimizer


def train(fabric, model, optimizer, data, accumulate=1):
    for i, (x, y) in enumerate(data):
        waits = (i + 1) % accumulate > 0
        with fabric.no_backward_sync(model, enabled=waits):
            fabric.backward((model(x) - y.to(x.dtype)).square().mean())
        if not waits:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()


@on_ranks
def test_no_backward_sync_and_clipping_and_bfloat16(lightning):
    def run(lightning, strategy, accumulate=1, **options):
        fabric, model, optimizer = start(lightning, strategy, **options)
        train(fabric, model, optimizer, fabric.setup_dataloaders(loader()), accumulate)
        return weights(model)

    for options in ({"accumulate": 2}, {"precision": "bf16-mixed"}, {"precision": "bf16-true"}):
        both(lightning, functools.partial(run, **options), fabric=True)


@on_ranks
def test_the_names(lightning):
    _, model, _ = start(lightning, "syncengine_find_unused_parameters_true")
    assert type(model._forward_module) is syncengine.Parallel
    assert model._forward_module.find_unused_parameters
    leave()
    _, model, _ = start(lightning, lightning.FabricStrategy(process_group_backend="gloo", bucket_cap_mb=1))
    assert torch.distributed.get_backend() == "gloo"
    assert type(model._forward_module) is syncengine.Parallel
    assert model._forward_module.bucket_bytes_cap == 2**20


@on_ranks
def test_checkpoint_and_resume(lightning):
    def run(lightning, strategy):
        fabric, model, optimizer = start(lightning, strategy)
        data = fabric.setup_dataloaders(loader())
        train(fabric, model, optimizer, data)
        path = shared_folder() / f"{type(strategy).__module__}.ckpt"
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 4})
        torch.manual_seed(11)
        train(fabric, model, optimizer, data)
        at_once = weights(model)
        module = net()
        again, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        rest = fabric.load(path, {"model": again, "optimizer": optimizer})
        torch.manual_seed(11)
        train(fabric, again, optimizer, data)
        same(at_once, weights(again))
        return at_once, rest

    _, rest = both(lightning, run, fabric=True)
    assert rest == {"step": 4}


@on_ranks
def test_collectives(lightning):
    def run(lightning, strategy):
        fabric, _, _ = start(lightning, strategy)
        rank = fabric.global_rank
        fabric.barrier("a name")
        with fabric.rank_zero_first():
            pass
        return [
            fabric.broadcast({"from": rank}, src=1),
            [fabric.all_reduce(torch.tensor(5 * rank + 2), reduce_op=op) for op in ("mean", "sum")],
            fabric.all_reduce({"a": torch.ones(3) * rank, "b": 2.5 * rank}),
            fabric.all_gather({"a": torch.arange(3) + rank, "b": rank}),
        ]

    found = both(lightning, run, fabric=True)
    assert found[0] == {"from": 1}


@on_ranks
def test_uneven_data_in_join(lightning):
    """Rank 1 has half the batches: as under DDP's join."""

    def run(lightning, strategy):
        fabric, model, optimizer = start(lightning, strategy)
        data = list(loader(12 if fabric.global_rank else 24))
        with model._forward_module.join():
            train(fabric, model, optimizer, data)
        return weights(model)

    both(lightning, run, fabric=True)


@on_ranks
def test_uneven_data_without_join_is_named(lightning):
    fabric, model, optimizer = start(lightning, "syncengine")
    data = list(loader(12 if fabric.global_rank else 24))
    expects = contextlib.nullcontext() if fabric.global_rank else pytest.raises(errors.PeerLost, match="rank 1")
    with expects:
        train(fabric, model, optimizer, data)
        leave()


@on_ranks
def test_a_model_that_is_wrapped_already_or_was_not_set_up(lightning):
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy="syncengine")
    fabric.launch()
    with pytest.warns(UserWarning, match=r"If a tool wraps models by itself, do not wrap yours"):
        fabric.setup_module(syncengine.Parallel(net()))
    with pytest.raises(TypeError, match="(?i)you need to set up the model first"), fabric.no_backward_sync(net()):
        pass
