"""syncengine.horovod on tensors that are not just elements in memory."""

import pytest
import torch
from horovod_ranks import run_with_hvd

import syncengine.horovod as hvd
from syncengine.errors import InvalidUsage


def lazy(rank: int) -> list[torch.Tensor]:
    numbers = torch.full((4,), complex(1.0 + rank, 2.0 + rank))
    return [numbers.conj(), numbers.clone().conj().imag]


@run_with_hvd()
def test_lazily_conjugated_or_negated_tensors() -> None:
    ranks = [lazy(0), lazy(1)]
    for i, mine in enumerate(lazy(hvd.rank())):
        of = [values[i].resolve_conj().resolve_neg() for values in ranks]
        assert torch.equal(hvd.broadcast(mine, 1), of[1])
        assert torch.equal(hvd.allgather(mine), torch.cat(of))
        assert torch.equal(hvd.alltoall(mine), torch.cat([part[:2] for part in of]))
        assert torch.equal(hvd.broadcast_(mine, 1), of[1])
        assert torch.equal(mine, of[1])
    mine = lazy(hvd.rank())[1]
    assert torch.equal(hvd.allreduce_(mine, op=hvd.Sum), torch.full((4,), -5.0))
    assert torch.equal(mine, torch.full((4,), -5.0))


@run_with_hvd()
def test_lazily_negated_gradients() -> None:
    weights = [torch.nn.Parameter(torch.full((size,), 3.0)) for size in (3, 5)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        loss = sum((torch.complex(torch.zeros_like(w), w).conj() * (1j + 1j * hvd.rank())).sum().real for w in weights)
        loss.backward()
        optimizer.step()
    assert all(torch.equal(w.detach(), torch.zeros_like(w)) for w in weights)  # the average of 1 and 2, twice


@pytest.mark.parametrize("call", ["broadcast", "broadcast_", "allgather", "allreduce"])
@pytest.mark.parametrize("kind", ["nested", "quantized"])
@run_with_hvd()
def test_other_kinds_are_refused_by_name(call: str, kind: str):
    values = torch.ones(2, 3)
    tensor = torch.nested.nested_tensor([*values])
    if kind == "quantized":
        tensor = torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
    arguments = (0,) if "broadcast" in call else ()
    with pytest.raises(InvalidUsage, match=f"needs a dense tensor, not a {kind} one"):
        getattr(hvd, call)(tensor, *arguments)
    hvd.barrier()  # nobody waits for this rank
