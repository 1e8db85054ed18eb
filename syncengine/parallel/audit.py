"""Detects drift: compares all ranks' parameters every so many steps, and names one that differs, and the rank."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from syncengine.errors import Mismatch, name_ranks
from syncengine.parallel.model import Model
from syncengine.parallel.replication import is_freed, is_wrapper, plain_copy, unwrapped

_NAMED = 3  # parameters in a message


class Audit:
    """Compares a model's parameters between its ranks, once in ``every`` synchronized forwards."""

    def __init__(self, model: Model, every: int) -> None:
        self._model, self.every = model, every
        self._forwards = 0  # so far, outside of join contexts, where ranks have different numbers of them

    def look(self) -> None:
        """Compares the parameters before a synchronized forward outside of join contexts, if it is time to.

        All ranks call it. Raises ``Mismatch`` on all of them, naming parameters and ranks, if the bits of a parameter
        are not the same everywhere.
        """
        forwards, self._forwards = self._forwards, self._forwards + 1
        if forwards == 0 or forwards % self.every:
            return
        model = self._model
        parts = unwrapped(zip(model.names, model.parameters, strict=True))
        sums = _checksums([tensor for _, tensor in parts])
        everyone = torch.empty((model.communicator.size, len(sums)), dtype=torch.int64, device="cpu")
        model.communicator.all_gather(everyone, sums)
        differ = (everyone != sums).any(0).nonzero().flatten().tolist()
        if not differ:
            return
        ranks = model.communicator.global_ranks
        named = [f"{parts[i][0]} ({_who_differs(everyone[:, i].tolist(), ranks)})" for i in differ[:_NAMED]]
        more = f" and {len(differ) - _NAMED} others" if len(differ) > _NAMED else ""
        raise Mismatch(
            f"audit of {model} after {forwards} synchronized forwards: ranks have different bits in "
            f"{', '.join(named)}{more}. Either something has written to the model of one rank alone (an optimizer with "
            "other settings or state there, a checkpoint), or that rank's memory is faulty. Go on from a checkpoint "
            "that was saved before"
        )


def _checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the bits of each tensor's elements, as integers. One bit that differs always changes it."""
    with torch.inference_mode():
        return torch.stack([_sum_of_bits(tensor) for tensor in tensors]).cpu()


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    if is_freed(tensor):
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    plain = plain_copy(tensor) if is_wrapper(tensor) else tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
    return plain.view(integers[plain.element_size()]).sum(dtype=torch.int64)


def _who_differs(values: Sequence[int], ranks: Sequence[int]) -> str:
    """A text such as "rank 2 differs from the others", or all groups of ranks, if there is no majority."""
    alike: dict[int, list[int]] = defaultdict(list)
    for rank, value in zip(ranks, values, strict=True):
        alike[value].append(rank)
    groups = sorted(alike.values(), key=len)
    if 2 * len(groups[-1]) > len(ranks):
        wrong = sorted(rank for group in groups[:-1] for rank in group)
        return f"{name_ranks(wrong)} {'differs' if len(wrong) == 1 else 'differ'} from the others"
    return " against ".join(name_ranks(group) for group in sorted(groups))
