"""Parameters and buffers that are not just elements in memory: lazily conjugated or negated, or of other kinds."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import run_on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from wrapping_tensors import Beside, Quantized, content, tensor_of

import syncengine
from syncengine._keeping import Updates
from syncengine.errors import InvalidUsage, Mismatch
from syncengine.parallel.kept_buffers import KeptBuffers


def lazy(value: float) -> dict[str, torch.Tensor]:
    """The same values in each, but for the conjugate's imaginary part."""
    found = {}
    for size in (6, 20_000):  # a tensor that travels with others, and one that travels alone
        numbers = torch.full((size,), complex(value, value))
        found |= {f"conj{size}": numbers.conj(), f"neg{size}": numbers.conj().imag, f"plain{size}": numbers.imag}
    return found


class Lazy(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        for name, tensor in lazy(value).items():
            self.register_buffer(f"buffer_{name}", tensor)
            self.register_parameter(f"frozen_{name}", nn.Parameter(tensor.clone(), requires_grad=False))
            getattr(self, f"frozen_{name}").data = tensor
            self.register_parameter(f"trained_{name}", nn.Parameter(tensor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((p.sum() for name, p in self.named_parameters() if "trained" in name), start=x.sum()).abs()


@run_on_ranks()
def test_lazily_conjugated_or_negated_tensors_are_synchronized() -> None:
    module = Lazy(1.0 + syncengine.rank())
    model = syncengine.Parallel(module)
    right, tensors = lazy(1.0), dict(module.state_dict(keep_vars=True))
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, right[name.partition("_")[2]])] == []
    lazily = [name for name, tensor in tensors.items() if tensor.is_conj() or tensor.is_neg()]
    assert len(lazily) == len(tensors) * 2 // 3, lazily
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.copy_(torch.full_like(buffer, 5.0 + syncengine.rank()) if buffer.is_neg() else buffer * 3)
    model(torch.ones(3)).backward()
    for buffer in module.buffers():
        value = buffer.resolve_conj().resolve_neg()
        mine = torch.view_as_real(value) if value.is_complex() else value
        syncengine.broadcast(everyones := mine.clone(), 0)
        assert torch.equal(everyones, mine)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: torch.ones(2, 3).to_sparse(),
    "sparse_csr": lambda: torch.ones(2, 3).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(2, 3).to_mkldnn(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
    "DTensor": lambda: DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Replicate()]),
}


@pytest.mark.parametrize("kind", KINDS)
@run_on_ranks(gloo=True)
def test_buffers_of_other_kinds_are_refused_by_name(kind: str):
    module = nn.Linear(3, 1)
    module.register_buffer("odd", KINDS[kind]())
    with pytest.raises(InvalidUsage, match=f"^odd is a.*{kind}.*_ddp_params_and_buffers_to_ignore"):
        syncengine.Parallel(module)
    module._ddp_params_and_buffers_to_ignore = ["odd"]
    syncengine.Parallel(module)(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("kind", ["sparse_coo", "quantized", "nested"])
@run_on_ranks()
def test_one_rank_has_put_another_kind_in_a_buffers_place(kind: str):
    module = nn.Linear(3, 1)
    module.register_buffer("odd", torch.ones(2, 3))
    model = syncengine.Parallel(module)
    model(torch.ones(2, 3)).sum().backward()
    if syncengine.rank() == 1:
        module.odd = KINDS[kind]()
    with pytest.raises(InvalidUsage, match=f"odd is a.*{kind}"):
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@run_on_ranks(gloo=True)
def test_collectives_and_the_backend_refuse_them_too(kind: str):
    """torch's functions refuse most of them before the backend does."""
    tensor, dense = KINDS[kind](), torch.ones(2, 3)
    for call in (lambda: syncengine.all_reduce(tensor), lambda: syncengine.broadcast(tensor, 0)):
        with pytest.raises(InvalidUsage, match="needs a dense tensor"):
            call()
    backend = dist.new_group(backend="syncengine")._get_backend(torch.device("cpu"))
    for call in (
        lambda: backend.allreduce([tensor]),
        lambda: backend.reduce(tensor, 0),
        lambda: backend._allgather_base(torch.ones(4, 3), tensor),
        lambda: backend._allgather_base(tensor, torch.ones(1, 3)),
        lambda: backend.allgather([[tensor, dense]], [dense]),
        lambda: backend.alltoall_base(dense, tensor, [], []),
        lambda: backend.send([tensor], 0, 0),
    ):
        with pytest.raises(InvalidUsage, match="syncengine takes dense|differ in dtype"):
            call()


# --- Kinds whose values are rank 0's afterwards


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Gradients of the third step, with the rank's own data."""
    for step in range(3):
        model.zero_grad()
        model(torch.full((2, 8), 1.0 + syncengine.rank() + step)).square().mean().backward()
    return [parameter.grad for parameter in model.module.layer.parameters()]


BY_BOTH = ["opaque", "opaque_large", "quantized", "quantized_large", "packed", "int64", "bool", "complex64"]
BY_OURS = ["nested", "float8_e4m3fn", "float4_e2m1fn_x2", "uint4", "bits8", "uint16", "uint64", "complex32"]


@pytest.mark.parametrize("place", ["frozen", "buffer"])
@pytest.mark.parametrize("kind", [*BY_BOTH, *BY_OURS])
@run_on_ranks(gloo=True)
def test_frozen_kinds_are_those_of_rank_0(kind: str, place: str):
    module = Beside(kind, place, syncengine.rank())
    gradients = trained(syncengine.Parallel(module, audit=1))
    assert content(module.odd) == content(tensor_of(kind, 0)) != content(tensor_of(kind, 1))
    if kind in BY_BOTH:
        beside = Beside(kind, place, syncengine.rank())
        assert all(map(torch.equal, gradients, trained(DistributedDataParallel(beside))))
        assert content(module.odd) == content(beside.odd)


@run_on_ranks(gloo=True)
def test_a_buffer_on_meta_stays_there():
    for wrapper in (syncengine.Parallel, DistributedDataParallel):
        module = Beside("meta", "buffer", 0)
        trained(wrapper(module))
        assert module.odd.is_meta


@run_on_ranks()
def test_buffers_that_wrap_others_are_copied_in_each_forward():
    module = Beside("nested", "buffer", 0)
    model = syncengine.Parallel(module)
    for step in range(2):
        module.odd.scale.values.fill_(10 * step + syncengine.rank())
        trained(model)
        assert module.odd.scale.values.item() == 10 * step
    module.odd = tensor_of("quantized", 3 + syncengine.rank())
    trained(model)
    assert content(module.odd) == content(tensor_of("quantized", 3))


@pytest.mark.parametrize("place", ["frozen", "buffer"])
@run_on_ranks()
def test_a_class_that_nothing_can_be_copied_into(place: str):
    module = Beside("locked", place, 0)
    with pytest.raises(InvalidUsage, match="^odd is a Locked, into which.*NotImplementedError: weights are locked"):
        syncengine.Parallel(module)
    module._ddp_params_and_buffers_to_ignore = ["odd"]
    trained(syncengine.Parallel(module))


@run_on_ranks()
def test_one_rank_alone_has_another_kind():
    with pytest.raises(Mismatch, match="odd is a Locked, into which"):
        syncengine.Parallel(Beside("locked" if syncengine.rank() else "opaque", "frozen", 0))
    with pytest.raises(Mismatch, match=r"odd: Quantized float32 \(8, 8\) .*{'bits': 8}"):
        syncengine.Parallel(Beside("quantized" if syncengine.rank() else "opaque", "frozen", 0))


@pytest.mark.parametrize("kind", ["opaque", "quantized"])
@run_on_ranks()
def test_wrapping_tensors_are_not_trained(kind: str):
    with pytest.raises(InvalidUsage, match="does not support training parameter odd of type (Opaque|Quantized)"):
        syncengine.Parallel(Beside(kind, "trained", 0))


@run_on_ranks()
def test_a_class_without_operations_of_its_own_is_trained():
    class Named(torch.Tensor):
        pass

    module = nn.Linear(8, 8)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Named))
    assert type(module.weight) is Named
    model = syncengine.Parallel(module)
    model(torch.full((1, 8), 1.0 + 2 * syncengine.rank())).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((8, 8), 2.0))


def test_what_is_kept_of_a_step():
    """A frozen weight that was written is noticed; a buffer that can't be compared is left alone."""
    for kind in ("opaque", "quantized", "nested"):
        module = Beside(kind, "frozen", 0)
        updates = Updates({"model": module})
        before = updates.look()
        assert updates.look() == before
        module.odd.values.add_(1)
        assert updates.look() != before
        for most in (None, 1 << 20):
            module = Beside(kind, "buffer", 0)
            kept = KeptBuffers(module, KeptBuffers(module, most=most), most=most)
            kept.put_back()
            assert content(module.odd) == content(tensor_of(kind, 0))
            assert isinstance(module.odd, Quantized) == (kind != "opaque")
