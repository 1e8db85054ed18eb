"""Which memory ranks share, what their children see of it, and that it goes."""

import gc
from pathlib import Path

import pytest
import torch
from faults import in_child, memory_of_this_process
from pool import run_on_ranks
from sharded_training import batch, bytes_of, common_memory, error_of, is_common, make, sharded, train, trained
from torch import nn

import syncengine
from syncengine._C import return_free_memory

MIB = 1 << 20


class Large(nn.Module):
    """16 MiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(24, 174_000)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.register_buffer("buffer", torch.zeros(5000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.frozen(x))


@pytest.mark.thorough
@run_on_ranks()
def test_trained_weights_and_state_are_shared_and_nothing_else():
    net = Large()
    model, optimizer = sharded(net)
    uncovered = nn.Linear(3, 3)
    optimizer.add_param_group({"params": list(uncovered.parameters())})
    train(model, optimizer, 2)
    assert [name for name, tensor in net.state_dict().items() if is_common(tensor)] == ["body.weight", "body.bias"]
    assert is_common(optimizer.state[net.body.weight]["exp_avg"])
    assert not any(map(is_common, uncovered.parameters()))


@pytest.mark.thorough
@run_on_ranks(world=4)
def test_weights_and_state_are_in_memory_once():
    model, optimizer = sharded(Large())
    train(model, optimizer, 2)
    for tensor in [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]:
        tensor.detach().sum()  # so that each rank has all pages
    syncengine.barrier()
    resident, share = (sum(bytes_of(each, kind) for each in common_memory()) for kind in ("Rss", "Pss"))
    syncengine.barrier()
    assert resident > 3 * 16 * MIB
    assert share < resident / 4 + MIB


@pytest.mark.thorough
@run_on_ranks(spawned=True)
def test_a_forked_child_reads_weights_that_nobody_has_copied():
    net, model, optimizer = trained(2, Large())
    optimizer.zero_grad()  # gradients are copied for children
    before = net.body.weight.detach().clone()
    gc.collect()
    size = memory_of_this_process("Anonymous")

    def child() -> str:
        weight = net.body.weight.detach()
        assert memory_of_this_process("Anonymous") - size <= 4 * MIB, "the fork copied them"
        assert weight.sum().item() == weight.clone().sum().item()
        assert (weight.fill_(7) == 7).all()
        with pytest.raises(syncengine.errors.InvalidUsage, match="forked child"):
            optimizer.step()
        return "read"

    assert in_child(child) == (0, "read")
    assert torch.equal(before, net.body.weight)
    train(model, optimizer, 1)


@run_on_ranks()
def test_a_survivor_takes_the_memory_of_one_copy():
    """What this rank takes when the communicator has failed, and what its weights and state are."""
    model, optimizer = sharded(Large())
    train(model, optimizer, 2)
    optimizer.zero_grad()
    gc.collect()
    syncengine.barrier()
    before = memory_of_this_process("Anonymous")
    if syncengine.rank() == 1:
        model.communicator.abort("rank 1: enough")
    assert "enough" in error_of(optimizer.step)
    taken = memory_of_this_process("Anonymous") - before
    assert common_memory() == []
    tensors = [p for p in model.parameters() if p.requires_grad]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert size > 3 * 16 * MIB
    assert abs(taken - size) < 2 * MIB


@pytest.mark.thorough
@run_on_ranks(spawned=True)
def test_dataloader_workers():
    _, model, optimizer = trained(1, Large())
    data = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)
    total = 0.0
    for part in data:
        total += part.sum().item()
        train(model, optimizer, 1)
    assert total == 28.0


@run_on_ranks()
def test_nothing_is_left_of_an_optimizer_that_is_gone():
    def once() -> None:
        _kept = trained(2)
        syncengine.barrier()

    once()
    gc.collect()
    files = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    assert common_memory() == [] and not any("memfd:syncengine-common" in file for file in files)


@run_on_ranks()
def test_layouts_stay():
    net, model, _ = trained(2, make("conv"))
    weight = net.body[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert is_common(weight)
    assert model(batch(0)).numel() > 0


@pytest.mark.thorough
@run_on_ranks()
def test_private_memory_is_not_kept():
    """32 MiB of weights, and 32 MiB of each rank's part of the state, were private before."""
    torch.optim.AdamW(nn.Linear(1, 1).parameters())  # imports modules
    return_free_memory()
    before = memory_of_this_process("Anonymous")
    torch.manual_seed(0)
    # Layers of 512 KiB: malloc would keep such blocks.
    model = syncengine.Parallel(nn.Sequential(*[nn.Linear(362, 362) for _ in range(64)]))
    optimizer = syncengine.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 362)).sum().backward()
        optimizer.step()
    growth = memory_of_this_process("Anonymous") - before
    optimizer.release()
    assert growth < 12 * MIB, "more is kept than modules and buffers"
