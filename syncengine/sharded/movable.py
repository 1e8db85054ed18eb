"""Finds parameters that can't move into memory that all ranks share, as other code holds or writes to them."""

import gc
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from syncengine._C import is_borrowed, is_dense, storage_references
from syncengine.sharded.weights import Named


def why_not_shared(named: Sequence[Named], modules: Sequence[torch.nn.Module] = ()) -> str:
    """Why these parameters of ``modules`` can't move into common memory, naming the first of them; or an empty text."""
    names = {id(parameter): name for name, parameter in named}
    if problem := _renorms(modules, names):
        return problem
    by_storage: dict[int, list[Named]] = {}
    mapped = _mapped_for_others()
    for one in named:
        name, parameter = one
        if parameter.device.type != "cpu":
            return f"parameter {name} is on {parameter.device}: ShardedOptimizer is for CPU models"
        if parameter.layout is not torch.strided or not is_dense(parameter):
            return (
                f"parameter {name} of shape {tuple(parameter.shape)} and strides {parameter.stride()} has elements "
                "that share memory, or gaps between them: clone() it into dense memory first"
            )
        if parameter.numel():
            if problem := _belongs_to_others(one, mapped):
                return problem
            by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(one)
    for together in by_storage.values():
        if problem := _shares_memory(together, modules):
            return problem
    return ""


def _renorms(modules: Sequence[torch.nn.Module], names: Mapping[int, str]) -> str:
    """A text about an embedding whose ``max_norm`` writes to one of these parameters in forward; or an empty text."""
    for layer in itertools.chain.from_iterable(map(torch.nn.Module.modules, modules)):
        if not isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) or layer.max_norm is None:
            continue
        if name := names.get(id(layer.weight)):
            return (
                f"{name} belongs to an {type(layer).__name__} with max_norm, which writes to it in forward: that can't "
                "be shared. Leave out max_norm"
            )
    return ""


def _belongs_to_others(one: Named, mapped: Sequence[range]) -> str:
    """A text if code that torch knows nothing of may read or write the parameter's memory; or an empty text."""
    name, parameter = one
    if is_borrowed(parameter):
        what = "comes from other code than torch (numpy, DLPack, a buffer, syncengine.empty), which may still hold it"
    elif any(parameter.data_ptr() in each for each in mapped):
        what = "is shared with other processes, or with a file (share_memory_(), from_file(shared=True))"
    else:
        return ""
    return (
        f"the memory of parameter {name} {what}: that would not follow it into shared memory. Give it memory of "
        "its own before the first forward: parameter.data = parameter.data.clone()"
    )


def _mapped_for_others() -> list[range]:
    """Addresses of this process's mappings that other processes or files share, but for syncengine's own."""
    found = []
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, access, rest = line.split(maxsplit=2)
        if access[3] == "s" and "memfd:syncengine" not in rest:
            begin, end = addresses.split("-")
            found.append(range(int(begin, 16), int(end, 16)))
    return found


def _shares_memory(named: Sequence[Named], modules: Sequence[torch.nn.Module]) -> str:
    """A text if the parameters ``named``, which lie in one storage, overlap, or something else holds that storage."""
    end, before = 0, ""
    for name, parameter in sorted(named, key=lambda one: one.parameter.storage_offset()):
        begin = int(parameter.storage_offset())
        if begin < end:
            return f"parameters {before} and {name} share memory: make them one parameter, or clone() one of them"
        end, before = begin + parameter.numel(), name
    parameter = named[0].parameter
    if _others(parameter, len(named)) > 0:
        gc.collect()  # perhaps they are gone, in a cycle
    if (others := _others(parameter, len(named))) > 0:
        attributes = "".join(f"the attribute {name}, " for name in _attributes(parameter, modules))
        return (
            f"the memory of parameter {named[0].name} is also held by {others} other tensor(s), which would not follow "
            f"it into shared memory: {attributes}a detach()ed, numpy or state_dict() view made before, a graph that is "
            "still alive, or another ShardedOptimizer. Drop them, or clone() them, before the first forward"
        )
    return ""


def _holders(tensor: torch.Tensor) -> int:
    """How many tensors, and references of Python to the storage, hold the memory of ``tensor``, itself among them."""
    storage = tensor.untyped_storage()
    return storage_references(tensor) + sys.getrefcount(storage)


def _others(tensor: torch.Tensor, known: int) -> int:
    return _holders(tensor) - _holders(torch.empty(1)) - known + 1


def _attributes(parameter: torch.Tensor, modules: Sequence[torch.nn.Module]) -> list[str]:
    """The names of modules' plain attributes that are other tensors in the parameter's memory."""
    found = []
    for prefix, layer in itertools.chain.from_iterable(map(torch.nn.Module.named_modules, modules)):
        for key, value in layer.__dict__.items():
            if not isinstance(value, torch.Tensor) or value is parameter or value.layout is not torch.strided:
                continue
            if value.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr():
                found.append(f"{prefix}.{key}" if prefix else key)
    return found
