"""Drift between ranks: `Parallel(audit=N)` names the parameter and the rank."""

import copy

import pytest
import torch
from parallel_models import Conv, Mlp, backwards, data
from pool import RankPool, run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import Mismatch
from syncengine.parallel.audit import _checksums, _who_differs


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """As a faulty memory does."""
    octets = tensor.data.view(-1).view(torch.uint8)
    octets[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def drift(rank: int, name: str, element: int, bit: int, after: int, every: int, count: int) -> tuple[int, str]:
    """The first forward, from 0, that raises, and its text."""
    torch.manual_seed(0)
    model = syncengine.Parallel(Mlp(), audit=every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(count):
        try:
            loss = model(data(i)).square().mean()
        except Mismatch as error:
            return i, str(error)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i == after and syncengine.rank() == rank:
            flip(dict(model.module.named_parameters())[name], element, bit)
    return count, ""


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_a_flipped_bit_is_named_at_the_next_border(pool: RankPool, bit: int):
    for forward, text in pool.run(drift, 2, "layers.2.weight", 123_456, bit, 3, 3, 12, world=4):
        assert forward == 6  # the bit flips behind forward 3, and comparisons are before 3, 6 and 9
        assert "audit of Parallel(Mlp) after 6 synchronized forwards" in text
        # All gradients are averages, so only what was written to differs.
        assert "different bits in layers.2.weight (rank 2 differs from the others)." in text
    for forward, text in pool.run(drift, 1, "head.bias", 6, bit, 0, 1, 5):  # of two ranks both are named
        assert forward == 1
        assert "different bits in head.bias (rank 0 against rank 1)." in text


def test_otherwise_nobody_is_named(pool: RankPool):
    for without, *drifts in (("audit", 1, "head.bias", 0, 0, 1, 0, 9), ("drift", -1, "", 0, 0, 0, 4, 9)):
        assert pool.run(drift, *drifts, world=3) == [(9, "")] * 3, without


@run_on_ranks()
def test_several_parameters_are_counted():
    """Rank 1 has another weight decay: all parameters drift."""
    torch.manual_seed(0)
    model = syncengine.Parallel(Mlp(), audit=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1 * syncengine.rank())
    for _ in range(2):
        backwards(model, 1)
        optimizer.step()
    with pytest.raises(Mismatch, match=r"in layers.0.weight \(rank 0 against rank 1\), layers.0.bias.* and 7 others\."):
        model(data(0))
    # The model can still be used, and saved to find out what happened.
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    backwards(model)


@run_on_ranks()
def test_what_is_each_ranks_own_is_not_compared():
    """Buffers, which other ranks overwrite anyway, and parameters that are ignored."""
    module = Conv()
    module.own = nn.Parameter(torch.full((3,), float(syncengine.rank())))
    module._ddp_params_and_buffers_to_ignore = ["own"]
    model = syncengine.Parallel(module, audit=1, forward_sync_buffers=False)
    backwards(model, 4)
    means = torch.empty(2, 8)
    syncengine.all_gather(means, module.body[1].running_mean)
    assert not torch.equal(means[0], means[1])
    assert module.own[0] == syncengine.rank()


@run_on_ranks()
def test_accumulation_and_join_and_copies():
    """Forwards under no_sync do not count, nor those in a join context: ranks have different numbers of them."""
    model = copy.deepcopy(syncengine.Parallel(Mlp(), audit=2))
    with model.no_sync():
        backwards(model)
    with model.join():
        backwards(model, 3 + syncengine.rank())
    if syncengine.rank() == 1:
        flip(model.module.head.weight, 0, 5)
    for steps in (2, 1):
        backwards(model, steps)
        with pytest.raises(Mismatch, match=r"head\.weight \(rank 0 against rank 1\)"):
            model(data(0))


@pytest.mark.parametrize(("every", "world"), [(3, 2), (3, 3), (0, 2)])
@run_on_ranks()
def test_a_comparison_is_one_operation(every: int, world: int):
    """The forwards from the third on are looked at, in which nothing is planned."""
    model = syncengine.Parallel(Mlp(), audit=every)
    backwards(model, 2)
    for i in range(2, 9):
        before = model.communicator.counters()
        loss = model(data(i)).square().mean()
        after = model.communicator.counters()
        due = every > 0 and i % every == 0
        counted = {name: after[name] - before[name] for name in ("operations", "staged_bytes", "messages")}
        assert counted == {"operations": int(due), "staged_bytes": 8 * 10 * due, "messages": 0}, i
        loss.backward()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]
)
def test_each_bit_counts(dtype: torch.dtype):
    values = torch.arange(6).to(dtype).view(2, 3)
    before = _checksums([values, values.t(), values[:, :1], values[:0], torch.tensor(1.5)])
    assert before.shape == (5,)
    assert before[0] == before[1] == _checksums([values.t().contiguous()])  # whatever the strides
    for bit in range(1 if dtype == torch.bool else 8 * values.element_size()):
        changed = values.clone()
        flip(changed, 4, bit)
        assert (_checksums([changed]) != _checksums([values])).all()


def test_a_majority_says_who_is_wrong():
    assert _who_differs([0, 1, 0], [0, 1, 2]) == "rank 1 differs from the others"
    assert _who_differs([0, 1, 0, 2, 0], [0, 2, 4, 6, 8]) == "ranks 2, 6 differ from the others"
    assert _who_differs([0, 1, 1, 0], [0, 1, 2, 3]) == "ranks 0, 3 against ranks 1, 2"
    assert _who_differs([0, 1, 2], [0, 1, 2]) == "rank 0 against rank 1 against rank 2"
