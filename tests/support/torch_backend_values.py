"""What tests of the torch.distributed backend share, inside rank processes: a group, and values with exact sums."""

from typing import Any

import torch
import torch.distributed as dist
from models.workload import same_bits

equal = same_bits  # for dtypes that torch.equal does not know, too
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)


def ours(**options: Any) -> dist.ProcessGroup:
    """All ranks, over syncengine; the default group is Gloo's."""
    return dist.new_group(backend="syncengine", **options)


def value(dtype: torch.dtype, rank: int, *shape: int) -> torch.Tensor:
    """Small integers, other ones on each rank: sums and products are exact in any order."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(4) * 3 + rank * 5 + 1) % 4
    if dtype.is_complex:
        numbers = torch.complex(numbers.double(), 1 + numbers.double())
    return numbers.to(dtype).repeat(-(-count // 4))[:count].reshape(shape)


def values(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    return [value(dtype, rank, *shape) for rank in range(dist.get_world_size())]


def mine(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return value(dtype, dist.get_rank(), *shape)
