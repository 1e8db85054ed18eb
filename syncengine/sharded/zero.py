"""Arguments of torch's ZeroRedundancyOptimizer, whose scripts run as they are; and of the wrong kind, by name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage
from syncengine.parallel.groups import Group, check_group


def check_arguments(process_group: Any, as_bucket_view: Any, overlaps: Any, elements: Any) -> None:
    """Raises ``InvalidUsage`` for what ``ShardedOptimizer`` does not do, and for values that mean nothing."""
    if not isinstance(elements, bool | None):
        raise InvalidUsage(
            f"ShardedOptimizer: elements={elements!r} is none of True, False and None (a group goes by its name, "
            "process_group=)"
        )
    if not isinstance(as_bucket_view, bool):
        raise InvalidUsage(f"ShardedOptimizer: parameters_as_bucket_view={as_bucket_view!r} is neither True nor False")
    if overlaps:
        raise InvalidUsage(
            f"ShardedOptimizer: overlap_with_ddp={overlaps!r} would step within backward, by a communication hook: "
            "leave it out, and call step()"
        )
    check_group(process_group)


def other_ranks(process_group: Group | None, communicator: Communicator) -> str:
    """Says so if ``process_group`` has other ranks than ``communicator``, the model's; or an empty text."""
    if process_group is None or process_group is communicator:
        return ""
    of_group = (
        process_group.global_ranks
        if isinstance(process_group, Communicator)
        else dist.get_process_group_ranks(process_group)
    )
    if sorted(of_group) == sorted(communicator.global_ranks):
        return ""
    return (
        f"process_group of ShardedOptimizer has ranks {sorted(of_group)}, but the model is trained on ranks "
        f"{sorted(communicator.global_ranks)}: give it the model's, or leave it out"
    )
