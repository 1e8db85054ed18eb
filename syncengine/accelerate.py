"""Hugging Face Accelerate with Parallel in DDP's place: `from syncengine.accelerate import Accelerator`.

Nothing else changes. On CPUs under torchrun the process group is syncengine's, too.
"""

import os
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env

import syncengine  # noqa: F401 (registers the backend)
from syncengine.errors import InvalidUsage
from syncengine.parallel import Parallel
from syncengine.parallel.summary import for_loggers
from syncengine.torch_backend import NAME


class Accelerator(accelerate.Accelerator):  # type: ignore[misc] # which is not there where types are checked
    """Accelerate's Accelerator, but its `prepare` wraps models with `Parallel`.

    Raises InvalidUsage where a launcher has started several ranks and Accelerate would train each of them alone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        on_cpu = bool(kwargs.get("cpu")) or parse_flag_from_env("ACCELERATE_USE_CPU")
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if on_cpu and ranks > 1 and "RANK" in os.environ and not dist.is_initialized():
            handlers = [h for h in kwargs.get("kwargs_handlers") or () if isinstance(h, InitProcessGroupKwargs)]
            dist.init_process_group(NAME, timeout=handlers[-1].timeout if handlers else None)
        super().__init__(*args, **kwargs)
        if ranks > self.num_processes == 1:
            raise InvalidUsage(
                f"{ranks} ranks were launched, and Accelerate, which has found no accelerator, would train each of "
                "them alone: for CPUs give Accelerator(cpu=True), or set ACCELERATE_USE_CPU=1"
            )

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Prepares a model as Accelerate does. Meanwhile the name by which Accelerate finds DDP means `Parallel`."""
        names: Any = torch.nn.parallel
        theirs, names.DistributedDataParallel = names.DistributedDataParallel, Parallel
        try:
            prepared: torch.nn.Module = super().prepare_model(model, *args, **kwargs)
        finally:
            names.DistributedDataParallel = theirs
        return prepared


def log_stragglers(trainer: Any) -> None:
    """Lets a ``Trainer`` of Transformers log which rank is late, as often as it logs anything.

    Call it before ``train()``. It adds a callback, whose numbers are ``step_ms``, ``exposed_sync_ms``, ``latest_rank``
    and ``latest_rank_ms`` of ``Parallel.stats()``, under ``syncengine/``. Nothing is logged where the model is no
    ``Parallel``.
    """
    from transformers import TrainerCallback  # which may be missing: Accelerate does without

    class Stragglers(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            model = trainer.model_wrapped
            if control.should_log and isinstance(model, Parallel) and (numbers := for_loggers(model.stats())):
                trainer.log(numbers)
                control.should_log = True  # log() takes all as logged, and the Trainer's own loss comes behind this

    trainer.add_callback(Stragglers())
