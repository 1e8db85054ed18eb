"""Rounds: a small all-gather before each forward in a join context, in which ranks say what they will do.

So ranks that have run out of batches can match the others' collectives: a new bucket plan, buffers, gradients.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.algorithms.join import Join, Joinable

from syncengine._C import Communicator
from syncengine.errors import Aborted, Mismatch
from syncengine.parallel.replication import gather_texts


class Intent(NamedTuple):
    """The plan of one rank for its next forward. All fields are numbers, for the all-gather."""

    trains: float  # has a batch: 1 or 0, as the next three
    synchronizes: float = 0.0
    plans: float = 0.0  # wants a new bucket plan
    sends_buffers: float = 0.0
    weight: float = -1.0  # the weight of its gradients; none if negative
    leaves: float = 0.0  # has an error, and takes part no more
    steps: float = 0.0  # no forward, but a step of the model's optimizer of this number, from 1, that all take part in


class Round(NamedTuple):
    """The intents of all ranks for the next forward."""

    intents: Sequence[Intent]
    members: Sequence[int]  # the numbers of the ranks in messages

    @property
    def training(self) -> list[int]:
        """The ranks that have a batch."""
        return [rank for rank, intent in enumerate(self.intents) if intent.trains]

    @property
    def synchronizes(self) -> bool:
        """Whether the backward of this forward averages gradients."""
        return any(intent.synchronizes for intent in self.intents)

    @property
    def plans(self) -> bool:
        """Whether the ranks make a new bucket plan first."""
        return any(intent.plans for intent in self.intents)

    @property
    def steps(self) -> int:
        """The number of the optimizer that all ranks step in this round; 0 if the round is for a forward."""
        return max(int(intent.steps) for intent in self.intents)

    @property
    def buffers_from(self) -> int | None:
        """The rank whose buffers all ranks get: the last that has a batch, as in DDP."""
        return self.training[-1] if any(intent.sends_buffers for intent in self.intents) else None

    @property
    def weights(self) -> list[float] | None:
        """The weight of each rank, zero if it has no batch. None if no rank gave a weight."""
        weights = [intent.weight if intent.trains else 0.0 for intent in self.intents]
        return None if min(weights) < 0 else weights

    def check(self) -> None:
        """Raises ``Mismatch`` unless all ranks with a batch ask the same of this round.

        Compares which optimizer they step; or whether they synchronize gradients and buffers, and have a weight.
        """
        first, *others = self.training or [0]
        for rank in others:
            for field, does, does_not in (
                ("steps", "steps a ShardedOptimizer", "does not, or another one"),
                ("synchronizes", "synchronizes its gradients", "does not (no_sync?)"),
                ("sends_buffers", "synchronizes its buffers", "does not (forward_sync_buffers?)"),
                ("weight", "called weight()", "did not"),
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


def notify_torch_join(joinable: Joinable, communicator: Communicator | None) -> None:
    """Tells ranks that have run out of batches, in torch's ``Join``, that ``joinable`` goes on.

    All other ranks call it. Does nothing outside of ``Join``. If a rank has died, torch's own process group may fail
    first, and does not say which rank. Then the communicator gets a second to notice, and raises ``PeerLost``;
    otherwise torch's error is raised.
    """
    try:
        if notice := Join.notify_join_context(joinable):
            notice.wait()
    except RuntimeError:
        deadline = time.monotonic() + 1.0  # in seconds: a rank's connections end a moment before its process
        while communicator is not None and time.monotonic() < deadline:
            communicator.check_peers()
            time.sleep(0.005)
        raise


def tell(communicator: Communicator, intent: Intent, error: str = "") -> Round:
    """Exchanges all ranks' intents, of which this rank's is ``intent``. ``error``: why this rank leaves.

    Raises ``Aborted``, with the error of a rank that leaves, on the ranks that would go on.
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
