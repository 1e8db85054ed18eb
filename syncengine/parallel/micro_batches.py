"""Steps of numbered micro-batches: the same model, bit for bit, at any number of ranks (docs/numerics.md)."""

import hashlib
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import SyncBatchNorm
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from syncengine._C import cut_tree
from syncengine.errors import InvalidUsage
from syncengine.parallel.kept_buffers import KeptBuffers
from syncengine.parallel.open_step import Step, drop_open_step, refuse
from syncengine.parallel.replication import check_same_on_all_ranks, gather_texts
from syncengine.parallel.tools import ForTools

_SAME = "Make micro_batches() from the same loader, with the same arguments and torch.set_num_threads(), on every rank."


class MicroBatches:
    """The steps of training a ``Parallel``, each of ``total`` micro-batches that are dealt to the ranks.

    Each iteration is one step, and yields ``(i, batch)`` for this rank's micro-batches, in order; i counts from 0 to
    total - 1 over all ranks. Afterwards every ``.grad`` is the mean over all of them, the same bits at any number of
    ranks: the sum as a binary tree over i, in the dtype of each parameter, times 1 / total.

        batches = syncengine.micro_batches(model, loader, total=8)
        for step in range(1000):
            for i, (x, y) in batches:
                loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    ``loader`` is a ``DataLoader`` as one process would have it: its batches are the micro-batches, all of one size. A
    step takes the next ``total`` of them; those of an epoch that are too few for a step are left out. A sampler draws
    from torch's default generator, which is seeded by epoch. Before each micro-batch, and before its samples are
    fetched, the generators of torch, Python and NumPy are seeded by ``seed``, step and i.

    A step that is left before its end, by ``break``, an exception, ``zip()`` or ``islice()``, stays open, and
    ``optimizer.step()`` raises ``InvalidUsage`` on all ranks. It has not happened: the next iteration is that step
    again. ``drop()`` ends it without beginning it again. ``state_dict()`` is the same on all ranks, and training goes
    on from it at any number of them.

    Raises ``InvalidUsage`` for models and loaders that can't give the same bits at any number of ranks, and
    ``Mismatch`` where ranks differ.
    """

    def __init__(self, model: ForTools, loader: DataLoader[Any], *, total: int, seed: int = 0) -> None:
        if not isinstance(model, ForTools):
            raise InvalidUsage(f"micro_batches() takes a syncengine.Parallel, not a {type(model).__name__}: wrap it")
        self._model, self._loader, self._total, self._seed = model, loader, total, seed
        self._norms = [(name, m) for name, m in model.module.named_modules() if isinstance(m, SyncBatchNorm)]
        communicator = model.communicator
        try:
            batches = self._look_at_loader()
            objection = self._objection()
        except InvalidUsage as error:
            objection = str(error)
        for rank, text in zip(communicator.global_ranks, gather_texts(communicator, objection), strict=True):
            if objection or text:
                raise InvalidUsage(objection or f"rank {rank}: {text}")
        self._facts = {
            "total": total,
            "seed": seed,
            "samples": len(batches[0]),
            "batches": len(batches),
            "threads": torch.get_num_threads(),
        }
        digest = hashlib.sha256(repr(batches).encode()).hexdigest()[:16]
        lines = [*(f"{name}={value}" for name, value in self._facts.items()), f"order of samples {digest}"]
        self._order_text = " ".join(lines)
        check_same_on_all_ranks(communicator, "the micro-batches differ", lines, _SAME)
        self._kept: KeptBuffers | None = None  # of the last step
        self._own = range(0)
        self._fetched: Iterator[Any] = iter(())
        self._fetched_step = -1  # the step whose batches come next from there
        self.step = 0

    def __len__(self) -> int:
        """The number of steps in an epoch."""
        return int(self._facts["batches"]) // self._total

    @property
    def step(self) -> int:
        """The number of the next step. Setting it seeds all generators as the end of the step before does."""
        return self._number

    @step.setter
    def step(self, number: int) -> None:
        self._number = number
        _seed(self._seed, number - 1, self._total)

    def state_dict(self) -> dict[str, int]:
        """The number of the next step, and the facts that have to be the same where training goes on."""
        return {"step": self.step, **self._facts}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where ``state`` was taken, at whatever number of ranks. Raises ``InvalidUsage`` if it can't."""
        for name, value in self._facts.items():
            if state[name] != value:
                raise InvalidUsage(
                    f"the checkpoint's micro-batches have {name}={state[name]}, these have {name}={value}: the steps "
                    "would not be those of the run that it comes from"
                )
        self.step = state["step"]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Makes a step, which begins when its first micro-batch is asked for."""
        return Step(self)

    def drop(self) -> None:
        """Drops a step of the model that was left before its end; it has not happened. Does not communicate."""
        drop_open_step(self._model)

    def _deal(self) -> tuple[int, range, Sequence[int]]:
        """Begins a step. Returns its number, the numbers of this rank's micro-batches, and the merges after each.

        The merges say how many times, after a micro-batch, the last two sums of gradients become one: see ``cut_tree``.
        """
        model = self._model
        objection = self._objection()
        if not objection and any(p.requires_grad and p.grad is not None for p in model._module_parameters):
            objection = (
                "a step of micro_batches() begins with gradients that are there already: call optimizer.zero_grad() "
                "after each step, with set_to_none=True, which is the default"
            )
        left = model._left_steps.pop(self._order_text, 0)
        if not objection and self.step < left:
            objection = (
                f"micro_batches() begins with step {self.step}, but was at step {left} when elastic() called the "
                "function again: the same samples would come once more. Set batches.step = elastic.step behind "
                "micro_batches()"
            )
        if objection:
            refuse(model.communicator, objection)
        model._begun_steps[self._order_text] = self.step
        begins, _ = cut_tree(self._total, model.communicator.size)
        own = range(begins[model.communicator.rank], begins[model.communicator.rank + 1])
        if (self._own, self._fetched_step) != (own, self.step):
            self._stop_fetching()
            self._own = own
            self._fetched = iter(self._fetcher())
        self._fetched_step = -1
        return self.step, own, cut_tree(len(own), len(own))[1]

    def _fetch(self, number: int, micro_batch: int) -> Any:
        batch = next(self._fetched)
        _seed(self._seed, number, micro_batch)
        return batch

    def _go_on(self, number: int) -> None:
        """Makes step ``number`` the next one, after the step before it has ended."""
        _seed(self._seed, number - 1, self._total)  # for what comes after the step, the same on all ranks
        self._number = self._fetched_step = number

    def _stop_fetching(self) -> None:
        """Ends the loader's workers, even if someone holds an error of the loader, and so the loader's iterator."""
        getattr(self._fetched, "_shutdown_workers", lambda: None)()
        self._fetched, self._fetched_step = iter(()), -1

    def _objection(self) -> str:
        """The reason why there can be no steps; or an empty text."""
        model = self._model
        size = model.communicator.size
        if self._total < size:
            return (
                f"total={self._total} micro-batches are too few for {size} ranks: each needs one. Give more of them, "
                "of fewer samples, or use fewer ranks"
            )
        if model.device.type not in ("cpu", "cuda"):
            return f"micro_batches() adds gradients on CPUs and CUDA devices, but the model is on {model.device}"
        hooks = model._comm_hooks or getattr(model._switches, "buffer_hook", None)
        if model._join_config.enable or hooks or model._uneven.weight is not None:
            return "micro_batches() works neither in join() nor with a communication hook or weight()"
        if not model.require_backward_grad_sync:
            return "the steps of micro_batches() are not to be under no_sync(), which it stands for"
        if model._optimizers.any(model._module_parameters):
            return "micro_batches() has averages at the end of a step alone: step there, by no optimizer in backward"
        if not (torch.tensor(2.0**-149, device="cpu") * 1.0).item():
            return "micro_batches() needs subnormal numbers: leave out torch.set_flush_denormal(True)"
        if model.communicator.numerics == "ring":
            return "micro_batches() has its own order of sums: call init() without numerics='ring'"
        for name, module in self._norms:
            if module.training:
                return (
                    f"module {name} is a SyncBatchNorm, whose statistics are those of several ranks' micro-batches: "
                    "use BatchNorm, GroupNorm or LayerNorm, or freeze its statistics with eval(), in each step anew"
                )
        return ""

    def _look_at_loader(self) -> list[list[int]]:
        """The batches of the loader's first epoch, as indices."""
        _check_loader(self._loader)
        batches = _order(self._loader, self._seed, 0)
        if batches != _order(self._loader, self._seed, 0):
            raise InvalidUsage(
                f"the sampler {type(self._loader.sampler).__name__} gives another order each time, though torch's "
                "generator has the same seed: let it draw from torch's default generator and keep no state of its own"
            )
        if len(batches) < self._total:
            raise InvalidUsage(f"the loader has {len(batches)} batches, fewer than the total={self._total} of one step")
        return batches

    def _fetcher(self) -> DataLoader[Any]:
        loader = self._loader
        dataset: Any = _SeededDataset(loader.dataset)
        kept = (
            "collate_fn",
            "pin_memory",
            "num_workers",
            "worker_init_fn",
            "multiprocessing_context",
            "prefetch_factor",
        )
        options: dict[str, Any] = {name: getattr(loader, name) for name in (*kept, "timeout")}
        return DataLoader(dataset, batch_sampler=_Places(self), **options)


micro_batches = MicroBatches


class _Places:
    """Iterates over this rank's micro-batches, from a step on: the seed and the samples' indices of each.

    This is no generator, which could not go on after an error: a call that has raised may be made again.
    """

    def __init__(self, batches: MicroBatches) -> None:
        self._loader, self._seed, self._total = batches._loader, batches._seed, batches._total
        self._own, self._steps_in_epoch, self._step = batches._own, len(batches), batches.step
        self._at = 0
        self._epoch, self._order = -1, [[0]]

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """Returns seed and indices of the next micro-batch."""
        if self._at == len(self._own):
            self._step, self._at = self._step + 1, 0
        epoch, within = divmod(self._step, self._steps_in_epoch)
        if self._epoch != epoch:
            self._epoch, self._order = epoch, _order(self._loader, self._seed, epoch)
        i = self._own[self._at]
        self._at += 1
        return [(self._seed, self._step, i, "samples"), *self._order[within * self._total + i]]


def _order(loader: DataLoader[Any], seed: int, epoch: int) -> list[list[int]]:
    """The samples' indices of each micro-batch of ``epoch``, of all ranks."""
    _seed(seed, "epoch", epoch)
    batches = [list(indices) for indices in loader.batch_sampler or ()]
    sizes = {len(indices) for indices in batches}
    if len(sizes) > 1:
        raise InvalidUsage(
            f"micro-batches have different sizes, {min(sizes)} to {max(sizes)} samples, so their mean would not be "
            "that of the samples: give the loader drop_last=True"
        )
    return batches


class _SeededDataset:
    """A dataset that seeds the generators by the micro-batch before it fetches: augmentation is alike on any rank."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, places: Sequence[Any]) -> Sequence[Any]:
        key, *indices = places
        _seed(*key)
        if callable(fetch := getattr(self._dataset, "__getitems__", None)):
            return fetch(indices)  # type: ignore[no-any-return]
        return [self._dataset[index] for index in indices]


def _seed(*key: Any) -> None:
    """Seeds every generator with the CRC-32 of ``key``'s parts, joined by blanks: any program can compute that."""
    number = zlib.crc32(" ".join(map(str, key)).encode())
    torch.default_generator.manual_seed(number)  # torch.manual_seed() formats a stack for each device that is not there
    if torch.cuda.is_initialized():  # never so in a worker of the loader
        torch.cuda.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _check_loader(loader: DataLoader[Any]) -> None:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        raise InvalidUsage(
            f"the loader's {type(loader.dataset).__name__} is an IterableDataset, whose samples have no numbers by "
            "which they could be dealt to any number of ranks: give a dataset with __len__() and __getitem__()"
        )
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or not hasattr(loader.dataset, "__getitem__"):
        raise InvalidUsage("micro_batches() takes a torch DataLoader over a dataset with indices, which makes batches")
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise InvalidUsage("the loader has a DistributedSampler, which cuts the data by rank: give it as for one rank")
    if getattr(sampler, "generator", None) is not None:
        raise InvalidUsage(
            f"the loader's {type(sampler).__name__} has a generator of its own, whose state would belong to a rank and "
            "be in no checkpoint: leave out generator=; micro_batches() seeds torch's default one by its seed and epoch"
        )
