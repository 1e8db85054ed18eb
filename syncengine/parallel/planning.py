"""Plans buckets together with the other ranks, when a plan is due, and keeps the plan of the model."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from syncengine._C import Reducer, ReducerOptions
from syncengine.errors import InvalidUsage, Mismatch
from syncengine.parallel.buckets import DDP_CAP, BucketPlanner, Plan
from syncengine.parallel.model import Model, looks_for_unused
from syncengine.parallel.replication import fail_all
from syncengine.parallel.rounds import Round


@dataclass(eq=False)
class Planning:
    """The bucket plan of one model."""

    model: Model
    reducer: Reducer
    options: ReducerOptions
    caps: tuple[float | None, Sequence[float] | None]  # bucket_cap_mb, bucket_cap_mb_list
    number: int | None  # that the ranks gave this model when it was wrapped, for its copies; or that of the original
    has_rebuilt: bool = False

    def __post_init__(self) -> None:
        self._trained_when_wrapped = self.reducer.wanted()
        self.start_over(self.model.communicator.numerics == "ring")

    def start_over(self, follows_ddp: bool) -> None:
        """Makes the next forward plan buckets anew: as DDP does if ``follows_ddp``, else as is fastest."""
        model, on_cpu = self.model, self.model.device.type == "cpu"
        between_hosts = bool(model.communicator.links)
        finds_unused = looks_for_unused(self.options)
        self.planner = BucketPlanner.create(
            model.parameters, model.sparse, follows_ddp, finds_unused, *self.caps, on_cpu, between_hosts
        )
        self.plan: Plan | None = None
        # The order in which one rank's gradients became ready; None until all ranks have it. Some may be frozen by now.
        self._order: list[int] | None = None
        self.bucket_bytes_cap_default = default = self.caps[0] is None and not self.planner.given_caps
        # Dynamo cuts compiled graphs by this cap: into pieces as large as DDP's, whatever the size of our buckets.
        self.bucket_bytes_cap = DDP_CAP if default else self.planner.cap
        self.bucket_bytes_cap_list = list(self.planner.caps) if self.planner.given_caps else []

    @temporarily_clear_interpreter_stack()  # torch.func's transforms would wrap what ranks tell each other
    def renew(self, current: Round | None = None) -> None:
        """Makes the bucket plan: first by the order of registration, later by the order of one rank's gradients.

        All ranks call it together when they exchange that order, or are in a join context. Otherwise the plan follows
        from facts that each rank has.
        """
        trainable = self.reducer.wanted()
        if self.plan is not None and (current is not None or (self._order is None and self.reducer.knows_order())):
            order = self._agree_on_order(trainable, current)
            self.has_rebuilt = True
        elif self._order is not None:  # from facts that all ranks know: a rank may be here alone, and must not wait
            order = _completed(self._order, trainable)
        else:  # the first plan, or parameters were frozen or thawed before any backward
            if self.plan is None and not trainable and self._trained_when_wrapped:  # they may be thawed before one
                self._install(self.planner.initial(self._trained_when_wrapped), provisional=self.planner.rebuilds)
            self._install(self.planner.initial(trainable), provisional=self.planner.rebuilds)
            return
        self._install(self.planner.rebuilt(order), provisional=False)

    def reserve_slots(self) -> int:
        """Agrees with all ranks, once, on slots for buckets. A copy does at its first plan: one rank alone may copy."""
        try:
            return self.reducer.reserve_slots(self.number)
        except InvalidUsage:  # on all ranks, as there is no room: models may be garbage that holds slots
            gc.collect()
            return self.reducer.reserve_slots(self.number)

    def _install(self, plan: Plan, provisional: bool) -> None:
        self.reserve_slots()
        self.reducer.install_plan(plan, provisional)
        self.plan = plan

    def _agree_on_order(self, trainable: list[int], current: Round | None) -> list[int]:
        """Takes over one rank's order of gradients: as they came in its last backward, then those that did not come.

        Returns the part of it that is trainable on that rank. This is rank 0, but in a join context the first rank that
        has a batch, unless plans follow DDP's.
        """
        communicator = self.model.communicator
        source = 0 if current is None or self.planner.follows_ddp else current.training[0]
        ready = self.reducer.ready_order()
        order = ready + _completed((), sorted(set(trainable).difference(ready)))  # what is frozen by now may thaw
        padding = [-1] * (len(self.model.parameters) - len(order))
        wanted = set(trainable)
        trains = [i in wanted for i in order]
        message = torch.tensor([order + padding, trains + padding], dtype=torch.int64, device="cpu")
        what = f"planning the buckets of {self.model} in a forward with gradients enabled, as all ranks make it"
        communicator.broadcast(message, source, layout=what)
        self._order, trains = ([i for i in row if i >= 0] for row in message.tolist())
        agreed = [i for i, is_trained in zip(self._order, trains, strict=True) if is_trained]
        has_batch = current is None or communicator.rank in current.training
        if has_batch and (difference := sorted(set(agreed) ^ set(trainable))):
            ranks = communicator.global_ranks
            name, here = self.model.names[difference[0]], difference[0] in trainable
            with_grad, without = (ranks[communicator.rank], ranks[source])[:: 1 if here else -1]
            text = f"parameter {name} requires a gradient on rank {with_grad}, but not on rank {without}"
            fail_all(communicator, Mismatch(f"{text}: freeze and unfreeze on all ranks alike"))
        return agreed


def _completed(order: Sequence[int], trainable: Sequence[int]) -> list[int]:
    """The ``trainable`` parameters: those in ``order``, then the others in reverse, as backward mostly brings them."""
    wanted = set(trainable)
    known = [i for i in order if i in wanted]
    missing = wanted.difference(known)
    return known + [i for i in reversed(trainable) if i in missing]
