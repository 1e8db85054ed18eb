"""The part of ``Parallel`` that plans buckets, together with the other ranks."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from syncengine._C import Communicator, Reducer
from syncengine.errors import Mismatch
from syncengine.parallel.buckets import BucketPlanner, Plan
from syncengine.parallel.join import Round
from syncengine.parallel.tuning import Tuner, can_overlap, choose_cap, measure_link


class PlansBuckets(DistributedDataParallel):
    """To be inherited from."""

    communicator: Communicator
    reducer: Reducer
    _module_parameters: list[torch.Tensor]
    _parameter_names: list[str]
    _planner: BucketPlanner
    _plan: Plan | None
    _tuner: Tuner | None  # while the cap is still to be chosen

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
            if not self._time_backward():
                self._install_plan(self._planner.rebuilt(planned), provisional=True)
                return
            self._tune(planned)
        order = self._agree_on_order(trainable, current)
        self._install_plan(self._planner.rebuilt(order), provisional=self._tuner is not None)
        self._has_rebuilt_buckets = True

    def _time_backward(self) -> bool:
        """Notes the last backward for the choice of a cap; returns whether that was enough."""
        timeline = self.reducer.timeline()
        return self._tuner.note(self.reducer.ready_order(), timeline["ready"], timeline["backward_start"])

    def _tune(self, order: list[int]) -> None:
        """Takes the cap that rank 0 finds best. Collective."""
        ready, self._tuner = self._tuner.ready(), None
        sizes = [p.nbytes for p in self._module_parameters]
        plan_of = lambda cap: self._planner.with_cap(cap).rebuilt(order)  # noqa: E731
        link = measure_link(self.communicator)
        overlaps = can_overlap(self.communicator.size, between_hosts=bool(self.communicator.links))
        cap = torch.tensor([choose_cap(self._planner.cap, plan_of, ready, sizes, link, overlaps)])
        self.communicator.broadcast(cap, 0)
        self._planner = self._planner.with_cap(cap.item())

    def _install_plan(self, plan: Plan, provisional: bool) -> None:
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
        message = torch.tensor(order + [-1] * (len(self._module_parameters) - len(order)))
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
