"""The part of ``Parallel`` that plans buckets, together with the other ranks."""

from __future__ import annotations

import gc

import torch

from syncengine.errors import InvalidUsage, Mismatch
from syncengine.parallel.buckets import Plan
from syncengine.parallel.model import Model
from syncengine.parallel.rounds import Round
from syncengine.parallel.tuning import Tuner, can_overlap, choose_cap, measure_link


class PlansBuckets(Model):
    """To be inherited from."""

    _tuner: Tuner | None  # while the cap is still to be chosen
    _number: int | None = None

    def _plan_buckets(self, current: Round | None = None) -> None:
        """The first plan is by registration; later ones by one rank's order of readiness."""
        trainable = [i for i, p in enumerate(self._module_parameters) if p.requires_grad]
        if self._plan is None:
            self._install_plan(self._planner.initial(trainable), provisional=self._planner.rebuilds)
            return
        if current is not None:  # ranks without a batch have nothing to time
            self._tuner = None
        planned = [i for bucket in self._plan for i in bucket]
        if self._has_rebuilt_buckets and self._tuner is not None and set(planned) == set(trainable):
            if not self._time_backward(self._tuner):
                self._install_plan(self._planner.rebuilt(planned), provisional=True)
                return
            self._tune(self._tuner, planned)
        order = self._agree_on_order(trainable, current)
        self._install_plan(self._planner.rebuilt(order), provisional=self._tuner is not None)
        self._has_rebuilt_buckets = True

    def _time_backward(self, tuner: Tuner) -> bool:
        """Notes the last backward for the choice of a cap; returns whether that was enough."""
        timeline = self.reducer.timeline()
        return tuner.note(self.reducer.ready_order(), timeline["ready"], timeline["backward_start"])

    def _tune(self, tuner: Tuner, order: list[int]) -> None:
        """Takes the cap that rank 0 finds best. Collective."""
        ready, self._tuner = tuner.ready(), None
        sizes = [p.nbytes for p in self._module_parameters]
        plan_of = lambda cap: self._planner.with_cap(cap).rebuilt(order)  # noqa: E731
        link = measure_link(self.communicator)
        overlaps = can_overlap(self.communicator.size, between_hosts=bool(self.communicator.links))
        best = choose_cap(self._planner.cap, plan_of, ready, sizes, link, overlaps)
        cap = torch.tensor([best], dtype=torch.int64, device="cpu")
        self.communicator.broadcast(cap, 0)
        self._planner = self._planner.with_cap(int(cap.item()))

    def _reserve_slots(self) -> int:
        """Collective, once. Deferred to the first plan for copies, which one rank alone may make."""
        try:
            return self.reducer.reserve_slots(self._number)
        except InvalidUsage:  # on all ranks, if there is no room: models that nobody has dropped yet may be garbage
            gc.collect()
            return self.reducer.reserve_slots(self._number)

    def _install_plan(self, plan: Plan, provisional: bool) -> None:
        self._reserve_slots()
        self.reducer.install_plan(plan, provisional)
        self._plan = plan

    def _agree_on_order(self, trainable: list[int], current: Round | None) -> list[int]:
        """Rank 0's order of its trainable parameters: last backward's, then what it did not bring.

        In a join context that of the first rank that has a batch, but in ``ring``, which does as DDP.
        """
        source = 0 if current is None or self._planner.follows_ddp else current.training[0]
        wanted = set(trainable)
        brought = [i for i in self.reducer.ready_order() if i in wanted]
        missing = wanted.difference(brought)
        order = brought + [i for i in reversed(trainable) if i in missing]
        padding = [-1] * (len(self._module_parameters) - len(order))
        message = torch.tensor(order + padding, dtype=torch.int64, device="cpu")
        self.communicator.broadcast(message, source)
        agreed = [i for i in message.tolist() if i >= 0]
        has_batch = current is None or self.communicator.rank in current.training
        if has_batch and (difference := sorted(set(agreed) ^ set(trainable))):
            ranks = self.communicator.global_ranks
            name, here = self._parameter_names[difference[0]], difference[0] in trainable
            with_grad, without = (ranks[self.communicator.rank], ranks[source])[:: 1 if here else -1]
            text = f"parameter {name} requires a gradient on rank {with_grad}, but not on rank {without}"
            self.communicator.abort(text)
            raise Mismatch(f"{text}: freeze and unfreeze on all ranks alike")
        return agreed
