"""What ranks tell each other in a join context: before each forward, in one small all-gather.

So those who have joined can match the others' collectives: a new bucket plan, buffers, gradients.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.algorithms.join import Join, Joinable

from syncengine._C import Communicator
from syncengine.errors import Aborted, Mismatch
from syncengine.parallel.replication import gather_texts


class Intent(NamedTuple):
    """What one rank does next. All numbers, for the all-gather."""

    trains: float  # has a batch: 1 or 0, as the next three
    synchronizes: float = 0.0
    plans: float = 0.0  # wants a new bucket plan
    sends_buffers: float = 0.0
    weight: float = -1.0  # of its gradients; none if negative
    leaves: float = 0.0  # with an error: it takes part no more
    steps: float = 0.0  # no forward, but a step of the model's optimizer of this number, from 1, that all take part in


class Round(NamedTuple):
    """What all ranks do next."""

    intents: Sequence[Intent]
    members: Sequence[int]  # what messages call the ranks

    @property
    def training(self) -> list[int]:
        """The ranks that have a batch."""
        return [rank for rank, intent in enumerate(self.intents) if intent.trains]

    @property
    def synchronizes(self) -> bool:
        """Whether backward averages."""
        return any(intent.synchronizes for intent in self.intents)

    @property
    def plans(self) -> bool:
        """Whether there is a new bucket plan first."""
        return any(intent.plans for intent in self.intents)

    @property
    def steps(self) -> int:
        """Whether it is no forward, but a step of an optimizer that all take part in: its number, else 0."""
        return max(int(intent.steps) for intent in self.intents)

    @property
    def buffers_from(self) -> int | None:
        """The rank whose buffers all get: as in DDP, the last that has a batch."""
        return self.training[-1] if any(intent.sends_buffers for intent in self.intents) else None

    @property
    def weights(self) -> list[float] | None:
        """Of each rank; zero of those that have no batch. None if nobody gave any."""
        weights = [intent.weight if intent.trains else 0.0 for intent in self.intents]
        return None if min(weights) < 0 else weights

    def check(self) -> None:
        """Raises ``Mismatch`` if those that have a batch do not do the same."""
        first, *others = self.training
        for rank in others:
            for field, does, does_not in (
                ("synchronizes", "synchronizes its gradients", "does not (no_sync?)"),
                ("sends_buffers", "synchronizes its buffers", "does not (forward_sync_buffers?)"),
                ("weight", "called weight()", "did not"),
                ("steps", "steps a ShardedOptimizer", "does not, or another one"),
            ):
                here, there = (float(getattr(self.intents[r], field)) for r in (rank, first))
                if field == "weight":
                    here, there = float(here >= 0), float(there >= 0)
                if here != there:
                    one, other = (rank, first) if here else (first, rank)
                    raise Mismatch(
                        f"in join(), rank {self.members[one]} {does}, but rank {self.members[other]} {does_not}: do "
                        "the same on every rank that has a batch"
                    )


_MOMENT = 1.0  # seconds


def notify_torch_join(joinable: Joinable, communicator: Communicator | None) -> None:
    """Tells ranks that wait in torch's ``Join`` of what ``joinable`` does next; nothing outside of it. Collective.

    It waits for them over torch's own process group, which may hear first of a rank that has died, and does not say
    which. Raises ``PeerLost`` then.
    """
    try:
        if notice := Join.notify_join_context(joinable):
            notice.wait()
    except RuntimeError:
        deadline = time.monotonic() + _MOMENT  # its connections end a moment before the process
        while communicator is not None and time.monotonic() < deadline:
            communicator.check_peers()
            time.sleep(0.005)
        raise


def tell(communicator: Communicator, intent: Intent, error: str = "") -> Round:
    """Collective: what all ranks do next, this one ``intent``. ``error``: why it leaves.

    Raises ``Aborted`` with another rank's error on those that would go on.
    """
    own = torch.tensor(intent, dtype=torch.float64, device="cpu")
    everyone = torch.empty(communicator.size * own.numel(), dtype=torch.float64, device="cpu")
    communicator.all_gather(everyone, own)
    intents = [Intent(*row) for row in everyone.view(communicator.size, -1).tolist()]
    if leaving := [rank for rank, other in enumerate(intents) if other.leaves]:
        texts = gather_texts(communicator, error)
        if not intent.leaves:
            raise Aborted(texts[leaving[0]])
    return Round(intents, communicator.global_ranks)
