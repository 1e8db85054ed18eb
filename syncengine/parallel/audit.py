"""Drift: compares the parameters of all ranks every so many steps, and names a parameter that differs, and the rank."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from syncengine.errors import InvalidUsage, Mismatch
from syncengine.launch.arrivals import name_ranks
from syncengine.parallel.model import Model
from syncengine.parallel.replication import gather_bytes, is_freed

_NAMED = 3  # parameters in a message


def check_audit(every: Any) -> None:
    """Raises ``InvalidUsage`` unless it is a number of steps, or 0."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise InvalidUsage(
            f"audit={every!r} is not allowed: give after how many steps to compare ranks, or 0 for never"
        )


class Audit:
    """Compares the parameters of a model's ranks before a synchronized forward, once in ``every`` of them."""

    def __init__(self, model: Model, every: int) -> None:
        self._model, self.every = model, every
        self._forwards = 0  # so far, outside of join contexts: as many on all ranks

    def look(self, in_join: bool) -> None:
        """Before each synchronized forward. Collective, where it is due.

        Not in a join context, where ranks have different numbers of forwards. Raises ``Mismatch`` on all ranks, naming
        parameters and ranks, if the bits of a parameter are not the same on all of them.
        """
        if not self.every or in_join:
            return
        forwards, self._forwards = self._forwards, self._forwards + 1
        if forwards == 0 or forwards % self.every:
            return
        model = self._model
        sums = _checksums(model.parameters)
        digest = hashlib.sha256(sums).digest()
        if len(set(gather_bytes(model.communicator, digest, len(digest)))) == 1:
            return
        # In this forward all ranks have seen that, so all of them tell their checksums.
        by_rank = [_words(everything) for everything in gather_bytes(model.communicator, sums, len(sums))]
        of_parameter = list(zip(*by_rank, strict=True))
        differ = [i for i, values in enumerate(of_parameter) if len(set(values)) > 1]
        ranks = model.communicator.global_ranks
        named = [f"{model.names[i]} ({_who_differs(of_parameter[i], ranks)})" for i in differ[:_NAMED]]
        more = f" and {len(differ) - _NAMED} others" if len(differ) > _NAMED else ""
        raise Mismatch(
            f"audit of {model} after {forwards} synchronized forwards: ranks have different bits in "
            f"{', '.join(named)}{more}. Either something has written to the model of one rank alone (an optimizer with "
            "other settings or state there, a checkpoint), or that rank's memory is faulty. Go on from a checkpoint "
            "that was saved before"
        )


def _checksums(tensors: Sequence[torch.Tensor]) -> bytes:
    """Eight bytes for each: the sum of its elements' bits, as integers. One bit that differs always changes them."""
    with torch.inference_mode():
        sums = [_sum_of_bits(tensor) for tensor in tensors]
        return bytes(torch.stack(sums).cpu().view(torch.uint8).tolist())


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    if is_freed(tensor):
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)  # in the order of elements, whatever the strides
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def _words(data: bytes) -> list[bytes]:
    return [data[i : i + 8] for i in range(0, len(data), 8)]


def _who_differs(values: Sequence[bytes], ranks: Sequence[int]) -> str:
    """ "rank 2 differs from the others", or which ranks have what, where no majority says who is wrong."""
    alike: dict[bytes, list[int]] = defaultdict(list)
    for rank, value in zip(ranks, values, strict=True):
        alike[value].append(rank)
    groups = sorted(alike.values(), key=len)
    if 2 * len(groups[-1]) > len(ranks):
        wrong = sorted(rank for group in groups[:-1] for rank in group)
        return f"{name_ranks(wrong)} {'differs' if len(wrong) == 1 else 'differ'} from the others"
    return " against ".join(name_ranks(group) for group in sorted(groups))
