"""Steps of numbered micro-batches: one model, bit for bit, at any number of ranks (docs/numerics.md)."""

from __future__ import annotations

import hashlib
import random
import sys
import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import DataLoader, DistributedSampler

from syncengine._C import TreeSums, cut_tree
from syncengine.errors import InvalidUsage
from syncengine.parallel.replication import check_same_on_all_ranks
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

    A step that is left before its end, by ``break`` or an exception, has not happened: the next iteration is that step
    again. ``state_dict()`` is the same on all ranks, and goes on at any number of them.

    Raises ``InvalidUsage`` for what can't be the same at any number of ranks, and ``Mismatch`` where ranks differ.
    """

    def __init__(self, model: ForTools, loader: DataLoader[Any], *, total: int, seed: int = 0) -> None:
        if not isinstance(model, ForTools):
            raise InvalidUsage(f"micro_batches() takes a syncengine.Parallel, not a {type(model).__name__}: wrap it")
        self._model, self._loader, self._total, self._seed = model, loader, total, seed
        self.step = 0  # the next one
        communicator = model.communicator
        if total < communicator.size:
            raise InvalidUsage(
                f"total={total} micro-batches are too few for {communicator.size} ranks: each needs one. Give more of "
                "them, of fewer samples, or use fewer ranks"
            )
        _check_loader(loader)
        self._norms = [(name, m) for name, m in model.module.named_modules() if isinstance(m, _NormBase)]
        self._check_model()
        self._order_of = (-1, [[0]])  # an epoch and its batches, as indices
        batches = self._order(0)
        self._order_of = (-1, batches)
        if batches != self._order(0):
            raise InvalidUsage(
                f"the sampler {type(loader.sampler).__name__} gives another order each time, though torch's generator "
                "has the same seed: let it draw from torch's default generator and keep no state of its own"
            )
        if len(batches) < total:
            raise InvalidUsage(f"the loader has {len(batches)} batches, fewer than the total={total} of one step")
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
        begins, _ = cut_tree(total, communicator.size)
        self._own = range(begins[communicator.rank], begins[communicator.rank + 1])
        _, self._merges = cut_tree(len(self._own), len(self._own))  # after each
        self._fetched: Iterator[Any] = iter(())
        self._fetches = -1  # the step that comes next from there
        self._running: Generator[tuple[int, Any], None, None] | None = None

    def __len__(self) -> int:
        """Steps in an epoch."""
        return int(self._facts["batches"]) // self._total

    def state_dict(self) -> dict[str, int]:
        """The number of the next step, and what has to be the same where it goes on."""
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
        """One step."""
        if self._running is not None:  # was left by an exception, which may still hold it
            self._running.close()
        self._running = self._run()
        return self._running

    def _run(self) -> Generator[tuple[int, Any], None, None]:
        self._check_model()
        model, reducer, last = self._model, self._model.reducer, self._own[-1]
        if not model.require_backward_grad_sync:
            raise InvalidUsage("the steps of micro_batches() are not to be under no_sync(), which it enters itself")
        trained = self._trained()
        if any(p.grad is not None for p in trained):
            raise InvalidUsage(
                "a step of micro_batches() begins with gradients that are there already: call optimizer.zero_grad() "
                "after each step, with set_to_none=True, which is the default"
            )
        left = model._left_steps.pop(self._order_text, 0)
        if self.step < left:
            raise InvalidUsage(
                f"micro_batches() begins with step {self.step}, but was at step {left} when elastic() called the "
                "function again: the same samples would come once more. Set batches.step = elastic.step behind "
                "micro_batches()"
            )
        model._begun_steps[self._order_text] = self.step
        if self._fetches != self.step:
            self._fetched = iter(self._fetcher(self.step))
        self._fetches = -1
        if reducer.reduces:  # ranks may have unlike numbers of forwards, but the step has one beginning
            model._buffer_sync.begin_step()
        sums, averaged = TreeSums(model._module_parameters), False
        try:
            for i, merges in zip(self._own, self._merges, strict=True):
                batch = next(self._fetched)
                versions = [p._version for p in trained]
                _seed(self._seed, self.step, i)
                if reducer.reduces and i == last:
                    reducer.complete_step(sums, self._total, self.step)
                    yield i, batch
                    brought = reducer.end_step()
                else:
                    with model.no_sync():
                        yield i, batch
                    brought = sums.take(merges)
                if versions != [p._version for p in trained]:
                    raise InvalidUsage(f"the parameters have changed within micro-batch {i}: step after the whole loop")
                if [*map(id, trained)] != [*map(id, self._trained())]:
                    raise InvalidUsage(f"parameters were frozen or unfrozen in micro-batch {i}: do so between steps")
                if not brought:
                    raise InvalidUsage(
                        f"micro-batch {i} has brought no gradient: call backward() once in each, and not under "
                        "no_sync(), which micro_batches() enters itself; and zero_grad() after the step"
                    )
            if not reducer.reduces:
                sums.deliver(self._total)
            averaged = True
        finally:
            if not averaged:
                reducer.end_step()
                for parameter in trained:
                    parameter.grad = None
        self._fetches = self.step = self.step + 1
        _seed(self._seed, self.step - 1, self._total)  # for what comes after the step, the same on all ranks

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self._model._module_parameters if p.requires_grad]

    def _check_model(self) -> None:
        model = self._model
        if model.device.type != "cpu":
            raise InvalidUsage(f"micro_batches() adds gradients on CPUs, but the model is on {model.device}")
        hooks = model._comm_hooks or getattr(model._switches, "buffer_hook", None)
        if model._join_config.enable or hooks or model._uneven.weight is not None:
            raise InvalidUsage("micro_batches() works neither in join() nor with a communication hook or weight()")
        if not (torch.tensor(2.0**-149, device="cpu") * 1.0).item():
            raise InvalidUsage("micro_batches() needs subnormal numbers: leave out torch.set_flush_denormal(True)")
        if model.communicator.numerics == "ring":
            raise InvalidUsage("micro_batches() has its own order of sums: call init() without numerics='ring'")
        for name, module in self._norms:
            if module.training and (module.track_running_stats or isinstance(module, torch.nn.SyncBatchNorm)):
                raise InvalidUsage(
                    f"module {name} is a {type(module).__name__}, whose statistics depend on which micro-batches a "
                    "rank computes, and in which order: use GroupNorm or LayerNorm, or freeze its statistics "
                    "with eval(), in each step anew if need be"
                )

    def _order(self, epoch: int) -> list[list[int]]:
        """The indices of the micro-batches of ``epoch``, of all ranks."""
        if self._order_of[0] != epoch:
            _seed(self._seed, "epoch", epoch)
            batches = [list(indices) for indices in self._loader.batch_sampler or ()]
            sizes = {len(indices) for indices in batches}
            if len(sizes) > 1:
                raise InvalidUsage(
                    f"micro-batches have different sizes, {min(sizes)} to {max(sizes)} samples, so their mean would "
                    "not be that of the samples: give the loader drop_last=True"
                )
            self._order_of = (epoch, batches)
        return self._order_of[1]

    def _places(self, step: int) -> Iterator[list[Any]]:
        """From ``step`` on, what each of this rank's micro-batches consists of, behind what seeds its samples."""
        while True:
            epoch, within = divmod(step, len(self))
            order = self._order(epoch)
            for i in self._own:
                yield [(self._seed, step, i, "samples"), *order[within * self._total + i]]
            step += 1

    def _fetcher(self, step: int) -> DataLoader[Any]:
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
        return DataLoader(dataset, batch_sampler=self._places(step), **options)


micro_batches = MicroBatches


class _SeededDataset:
    """``dataset``, whose random numbers (augmentation) belong to the micro-batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, places: Sequence[Any]) -> Sequence[Any]:
        key, *indices = places
        _seed(*key)
        if callable(fetch := getattr(self._dataset, "__getitems__", None)):
            return fetch(indices)  # type: ignore[no-any-return]
        return [self._dataset[index] for index in indices]


def _seed(*key: Any) -> None:
    """Seeds every generator by ``key``: the CRC-32 of its parts with blanks in between, so that anybody can."""
    number = zlib.crc32(" ".join(map(str, key)).encode())
    torch.default_generator.manual_seed(number)  # torch.manual_seed() formats a stack for each device that is not there
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


def _check_loader(loader: DataLoader[Any]) -> None:
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
