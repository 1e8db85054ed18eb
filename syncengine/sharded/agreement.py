"""Agreements: ranks compare facts before they change the memory that they have in common, so all do it or none."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from syncengine._C import Communicator
from syncengine.errors import Aborted, InvalidUsage, Mismatch
from syncengine.parallel.replication import check_same_on_all_ranks, gather_bytes, gather_texts, own_name

_DIGEST = 24


def agree(
    communicator: Communicator,
    what: str,
    facts: bytes,
    describe: Callable[[], Sequence[str]],
    error: str,
    advise: Callable[[], str],
) -> None:
    """Returns on all ranks if ``facts`` are the same on all and none has an ``error``; else all raise.

    All ranks call it. A rank that has an ``error`` raises it as ``InvalidUsage``; the others raise ``Aborted`` with the
    same text. If facts differ, all raise ``Mismatch`` with the first line of ``describe`` that differs, and the text of
    ``advise``. The communicator can still be used.
    """
    own = hashlib.sha256(facts).digest()[:_DIGEST] + bytes([bool(error)])
    everyone = gather_bytes(communicator, own, len(own))
    if everyone.count(own) == len(everyone) and not error:
        return
    failed = [rank for rank, other in enumerate(everyone) if other[_DIGEST]]
    if failed:
        me = f"{own_name(communicator)}: "
        texts = gather_texts(communicator, me + error)
        if error:
            raise InvalidUsage(me + error)
        raise Aborted(texts[failed[0]])
    check_same_on_all_ranks(communicator, what, describe(), advise())
    raise Mismatch(f"{what} between ranks. {advise()}")


def gather_json(communicator: Communicator, value: Any) -> list[Any]:
    """Every rank's value, made of texts, numbers, lists and dicts. All ranks call it."""
    return list(map(json.loads, gather_texts(communicator, json.dumps(value))))


def only_makes_state(communicator: Communicator, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all gradients are zeros on all ranks. All ranks call it.

    torch.distributed.checkpoint makes a step of zeros, so that the optimizer makes its state. It holds views of the
    weights meanwhile, and these would not follow the weights into shared memory.
    """
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    zeros = bool(gradients) and all(g.layout is torch.strided and not g.any() for g in gradients)
    flag = torch.tensor([zeros], dtype=torch.int64, device="cpu")
    communicator.all_reduce(flag, "min")
    return bool(flag.item())
