"""SyncBatchNorm between CPU ranks: one process's BatchNorm over all ranks' samples is the reference, in float64."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import my_rank
from pool import RankPool, run_on_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import InvalidUsage, SyncError
from syncengine.parallel.sync_batch_norm import SyncBatchNorm

CHANNELS = 6
PAIRS = [[0, 1], [2, 3]]  # of four ranks


def batch(rank: int, step: int, size: int, *shape: int) -> torch.Tensor:
    """Samples far from zero, of different scale in each rank: sums of squares would lose them."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(size, CHANNELS, *shape, generator=generator, dtype=torch.float64) * (rank + 1)) + 30 + 5 * rank


def make(dtype: torch.dtype, **options: Any) -> nn.Module:
    """A plain BatchNorm with something behind it, all in `dtype`."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(CHANNELS, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return nn.Sequential(norm, nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Tanh()).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).double().pow(3).sum()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3)).item() if b.numel() else 0.0


def errors(sizes: list[int], dtype: torch.dtype, channels_last: bool, options: dict[str, Any]) -> dict[str, float]:
    """How far our training, evaluation and state are from those of one process with the whole batch, in float64."""
    rank, world = syncengine.rank(), syncengine.world_size()
    alone = make(torch.float64, **options)
    model = make(dtype, **options)
    model.load_state_dict(alone.state_dict())
    alone.load_state_dict(model.state_dict())  # with what `dtype` leaves of them
    model = syncengine.Parallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    found = {}
    for step in range(3):
        parts = [batch(r, step, sizes[r], 3, 2).to(dtype) for r in range(world)]
        whole = torch.cat(parts).double().requires_grad_()
        alone.zero_grad()
        (loss_of(alone, whole) / world).backward()  # the average over ranks, as gradients are
        own = parts[rank].clone().requires_grad_()
        model.zero_grad()
        loss_of(model, own.to(memory_format=torch.channels_last) if channels_last else own).backward()
        found[f"input {step}"] = distance(own.grad, whole.grad.split(sizes)[rank] * world)
        for (name, p), q in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            found[f"{name} {step}"] = distance(p.grad, q.grad)
    found |= {name: distance(model.state_dict()[f"module.{name}"], t) for name, t in alone.state_dict().items()}
    x = batch(rank, 9, 4, 3, 2)
    found["evaluation"] = distance(model.eval()(x.to(dtype)), alone.eval()(x.to(dtype).double()))
    return found


CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "even": ([4, 4], {}),
    "uneven": ([3, 7, 1], {}),
    "one rank without samples": ([3, 0, 2], {}),
    "one sample each": ([1, 1], {}),
    "cumulative average": ([3, 5], {"momentum": None}),
    "large momentum and eps": ([3, 5], {"momentum": 0.7, "eps": 0.5}),
    "without weight and bias": ([3, 5], {"affine": False}),
    "without running statistics": ([3, 5], {"track_running_stats": False}),
    "low precision": ([4, 6], {"momentum": 1.0}),
}


@run_on_ranks()
def test_inputs_that_are_refused():
    layer = syncengine.Parallel(nn.SyncBatchNorm(CHANNELS)).module
    with pytest.raises(ValueError, match="at least 2D"):
        layer(torch.ones(3))
    with pytest.raises(ValueError, match="more than 1 value per channel over all ranks"):
        layer(torch.ones(1 - syncengine.rank(), CHANNELS))
    # On devices torch's own layer communicates, but only if torch.distributed is initialized.
    with pytest.raises(InvalidUsage, match=r"SyncBatchNorm on meta .* call torch\.distributed\.init_process_group\(\)"):
        layer(torch.empty(4, CHANNELS, device="meta"))
    layer.eval().to("meta")(torch.empty(4, CHANNELS, device="meta"))


@pytest.mark.parametrize("name", CASES)
def test_statistics_and_gradients_are_those_of_the_whole_batch(pool: RankPool, name: str):
    sizes, options = CASES[name]
    # The 8 bits of bfloat16 values allow no more; statistics are never rounded to them on the way.
    tolerances = {torch.bfloat16: 0.05} if name == "low precision" else {torch.float64: 1e-12, torch.float32: 1e-5}
    for dtype, tolerance in tolerances.items():
        for found in pool.run(errors, sizes, dtype, name == "even", options, world=len(sizes)):
            assert max(found.values()) < tolerance, found


@run_on_ranks()
def test_mixed_precision_under_autocast():
    model = syncengine.Parallel(nn.SyncBatchNorm.convert_sync_batchnorm(make(torch.float32)))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch(syncengine.rank(), 0, 4, 3, 2).float())
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert model.module[0].weight.grad.dtype == torch.float32
    syncengine.all_gather(everyone := torch.empty(2, CHANNELS), model.module[0].running_mean)
    assert torch.equal(everyone[0], everyone[1])


@run_on_ranks()
def test_other_dimensions():
    for shape in ((), (5,), (2, 3, 2)):
        x = batch(syncengine.rank(), 0, 4, *shape).requires_grad_()
        model = syncengine.Parallel(nn.Sequential(nn.SyncBatchNorm(CHANNELS)).double())
        model(x).pow(3).sum().backward()
        whole = torch.cat([batch(r, 0, 4, *shape) for r in range(2)]).requires_grad_()
        nn.functional.batch_norm(whole, None, None, training=True).pow(3).sum().backward()
        torch.testing.assert_close(x.grad, whole.grad[4 * syncengine.rank() :][:4])


@run_on_ranks()
def test_statistics_that_a_program_switches_off_or_takes_away():
    """Statistics stay, or are not missed, as in every BatchNorm."""
    model = syncengine.Parallel(nn.SyncBatchNorm(CHANNELS))
    model.module.track_running_stats = False
    parts = [batch(rank, 0, 4).float() for rank in range(2)]
    model(parts[syncengine.rank()]).sum().backward()
    assert torch.equal(model.module.running_mean, torch.zeros(CHANNELS))
    assert model.module.num_batches_tracked == 0
    for momentum in (0.1, None):
        norm, alone = nn.SyncBatchNorm(CHANNELS, momentum=momentum), nn.BatchNorm1d(CHANNELS, momentum=momentum)
        for layer in (norm, alone):
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        expected = alone(torch.cat(parts))[4 * syncengine.rank() :][:4]
        torch.testing.assert_close(syncengine.Parallel(norm)(parts[syncengine.rank()]), expected)


@run_on_ranks()
def test_a_layer_follows_a_new_communicator():
    module = nn.Sequential(nn.SyncBatchNorm(CHANNELS, momentum=1.0))
    for step in range(2):
        model = syncengine.Parallel(module)
        model(torch.full((2, CHANNELS), float(syncengine.rank() + step))).sum().backward()
        assert torch.equal(module[0].running_mean, torch.full((CHANNELS,), 0.5 + step))
        syncengine.shutdown()
        syncengine.init(timeout=60.0)


def samples(rank: int, step: int) -> torch.Tensor:
    return torch.full((2, CHANNELS), float(rank + step)).add_(torch.tensor([[-1.0], [1.0]]))


def steps_of_a_layer(layer: nn.Module, step: int, ranks: list[int]) -> None:
    """The statistics are those of the samples of these ranks, in forward and in backward."""
    rank = syncengine.rank()
    weights = [torch.randn(2, CHANNELS, generator=torch.Generator().manual_seed(r)) for r in ranks]
    x = samples(rank, step).requires_grad_()
    (layer(x) * weights[ranks.index(rank)]).sum().backward()
    whole = torch.cat([samples(r, step) for r in ranks]).requires_grad_()
    (nn.functional.batch_norm(whole, None, None, training=True) * torch.cat(weights)).sum().backward()
    torch.testing.assert_close(x.grad, whole.grad.split(2)[ranks.index(rank)])
    assert torch.allclose(layer.running_mean, torch.full((CHANNELS,), sum(ranks) / len(ranks) + step))


@run_on_ranks()
def test_a_layer_without_a_wrapper_follows_a_new_communicator():
    layer = SyncBatchNorm(CHANNELS, momentum=1.0)
    steps_of_a_layer(layer, 0, [0, 1])
    syncengine.shutdown()
    with pytest.raises(InvalidUsage, match="closed"):
        layer(torch.ones(2, CHANNELS))
    syncengine.init()
    with pytest.raises(SyncError, match="the end"):  # the other rank's may come earlier
        steps_of_a_layer(layer, 1, [0, 1])
        syncengine.default_communicator().abort("the end")
        layer(torch.ones(2, CHANNELS))
    syncengine.init()
    steps_of_a_layer(layer, 2, [0, 1])


@run_on_ranks(world=4)
def test_a_layers_process_group_may_change():
    pair = PAIRS[syncengine.rank() // 2]
    layer = SyncBatchNorm(CHANNELS, momentum=1.0)
    steps_of_a_layer(layer, 0, [0, 1, 2, 3])
    layer.process_group = syncengine.default_communicator().split(pair)
    steps_of_a_layer(layer, 1, pair)
    layer.process_group = None
    steps_of_a_layer(layer, 2, [0, 1, 2, 3])


@run_on_ranks(settings=None)
def test_a_layer_follows_a_new_default_group_of_torch(tmp_path: Path):
    layer = SyncBatchNorm(CHANNELS, momentum=1.0)
    for step in range(2):
        dist.init_process_group("syncengine", init_method=f"file://{tmp_path}/{step}", rank=my_rank(), world_size=2)
        layer(samples(my_rank(), step))
        assert torch.allclose(layer.running_mean, torch.full((CHANNELS,), 0.5 + step))
        dist.barrier()
        dist.destroy_process_group()


@run_on_ranks()
def test_it_is_torchs_in_all_else():
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.ModuleDict({"a": make(torch.float32), "b": nn.Linear(2, 2)}))
    norm, before = module["a"][0], copy.deepcopy(module.state_dict())
    model = syncengine.Parallel(module)
    assert model.module["a"][0] is norm
    assert isinstance(norm, nn.SyncBatchNorm)
    assert list(module.state_dict()) == list(before)
    assert repr(norm) == repr(nn.SyncBatchNorm(CHANNELS))
    x = batch(syncengine.rank(), 0, 4, 3, 2).float()
    expected = module["a"](x)
    module["a"].load_state_dict({name.removeprefix("a."): t for name, t in before.items() if name.startswith("a.")})
    norm.compile(backend="eager")
    for other in (pickle.loads(pickle.dumps(module["a"])), copy.deepcopy(module["a"])):
        assert other[0]._compiled_call_impl is None  # which would call the original
        assert torch.equal(other(x), expected)
    with torch.no_grad():
        assert torch.equal(module["a"](x), expected)
    assert isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(module)["a"][0], nn.SyncBatchNorm)


@pytest.mark.parametrize("torchs", [True, False])
@run_on_ranks(world=4, gloo=True)
def test_its_process_group(torchs: bool):
    rank = syncengine.rank()
    of_torch = [dist.new_group(pair) for pair in PAIRS]
    group = of_torch[rank // 2] if torchs else syncengine.default_communicator().split(PAIRS[rank // 2])
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(CHANNELS)), group)
    model = syncengine.Parallel(module, forward_sync_buffers=False)
    model(torch.full((2, CHANNELS), float(rank))).sum().backward()
    assert torch.allclose(module[0].running_mean, torch.full((CHANNELS,), 0.05 if rank < 2 else 0.25))


@pytest.mark.parametrize("torchs", [True, False])
@run_on_ranks(world=3, gloo=True)
def test_a_rank_without_a_batch_is_an_error_that_names_the_layer(torchs: bool):
    """DDP hangs, and says in its documentation to terminate early then."""
    model = syncengine.Parallel(nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.SyncBatchNorm(CHANNELS)))
    rank = syncengine.rank()
    text = r"1 is a SyncBatchNorm.*rank 1 has run out of them in join\(\): pass throw_on_early_termination=True"
    with pytest.raises(SyncError, match=text), Join([model]) if torchs else model.join():
        for step in range(1 + 2 * (rank != 1)):
            model(batch(rank, step, 4).float()).sum().backward()


@run_on_ranks(world=4)
def test_uneven_inputs_where_no_rank_of_the_layer_is_without_a_batch():
    rank = syncengine.rank()
    pair = syncengine.default_communicator().split(PAIRS[rank // 2])
    norm = nn.SyncBatchNorm(CHANNELS, process_group=pair)
    model = syncengine.Parallel(nn.Sequential(nn.Linear(CHANNELS, CHANNELS), norm))
    for training, count in ((True, 3 if rank < 2 else 1), (False, 1 + rank)):
        model.train(training)
        with model.join():
            for step in range(count):
                model(batch(rank, step, 4).float()).sum().backward()
        assert norm.num_batches_tracked == 3


@run_on_ranks()
def test_with_checkpoints_accumulation_and_compile():
    results = []
    for way in ("plain", "checkpointed", "compiled"):
        module = nn.SyncBatchNorm.convert_sync_batchnorm(make(torch.float64, momentum=1.0))
        model = syncengine.Parallel(module)
        if way == "compiled":
            model = torch.compile(model, backend="eager")
        for step in range(3):
            model.zero_grad()
            x = batch(syncengine.rank(), step, 4, 3, 2).requires_grad_()
            with model.no_sync():
                loss_of(model, x + 1).backward()
            out = checkpoint(model, x, use_reentrant=False) if way == "checkpointed" else model(x)
            out.pow(3).sum().backward()
        results.append([p.grad for p in module.parameters()] + [module[0].running_var])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-12, atol=1e-10)


@run_on_ranks(world=1)
def test_alone_it_is_batch_norm():
    x = torch.randn(5, CHANNELS)
    model = syncengine.Parallel(nn.SyncBatchNorm(CHANNELS))
    assert torch.equal(model(x), nn.BatchNorm1d(CHANNELS)(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()(x)
