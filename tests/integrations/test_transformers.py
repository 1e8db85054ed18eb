"""The Trainer of Transformers with Parallel in DDP's place, bit for bit as over DDP and Gloo."""

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from huggingface_ranks import bert, forget, tokens
from lightning_ranks import leave, run_alone, same, shared_folder, weights
from torch.nn.parallel import DistributedDataParallel
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

import syncengine
from syncengine.accelerate import log_stragglers

# Options of a training in bfloat16 that keeps its best model; the loss gets worse.
BEST = {
    "bf16": True,
    "num_train_epochs": 9,
    "learning_rate": 0.2,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}


def data(count=24):
    return [{"input_ids": row, "labels": row[0] % 2} for row in tokens(count)]


def trainer_of(folder: Path, **options) -> Trainer:
    settings = {
        "use_cpu": True,
        "per_device_train_batch_size": 3,
        "num_train_epochs": 2,
        "learning_rate": 5e-3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    others = {name: options.pop(name) for name in ("callbacks", "optimizer_cls_and_kwargs") if name in options}
    torch.manual_seed(7)
    return Trainer(
        model=bert(),
        args=TrainingArguments(output_dir=str(folder), **settings | options),
        train_dataset=data(),
        eval_dataset=data(9),
        **others,
    )


def without_times(line: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if not key.endswith(("_runtime", "_per_second"))}


def both(train):
    results = []
    for wrapper in (DistributedDataParallel, syncengine.Parallel):
        forget()
        if wrapper is syncengine.Parallel:
            dist.init_process_group("syncengine")
        with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", wrapper):
            results.append(train(shared_folder() / wrapper.__name__))
        leave()
    forget()
    same(*results)
    return results[1]


@run_alone
def test_accumulation_clipping_and_evaluation():
    def train(folder):
        trainer = trainer_of(folder, gradient_accumulation_steps=2, max_grad_norm=0.5, eval_strategy="epoch")
        trainer.train()
        assert type(trainer.model_wrapped).__name__ == folder.name
        losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        assert len(losses) == 2
        return weights(trainer.model), losses, trainer.predict(data(7)).predictions.tolist()

    both(train)


@run_alone
def test_resume():
    def train(folder):
        trainer = trainer_of(folder, save_strategy="epoch")
        trainer.train()
        at_once = weights(trainer.model)  # a resumed Trainer's differ under DDP, too: other dropout
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
        again = trainer_of(folder)
        torch.manual_seed(11)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        assert again.state.global_step == 8
        return at_once, weights(again.model)

    both(train)


@run_alone
def test_early_stopping_and_bfloat16():
    def train(folder):
        trainer = trainer_of(folder, **BEST, callbacks=[EarlyStoppingCallback(1)])
        trainer.train()
        assert trainer.state.epoch < 9
        return weights(trainer.model), trainer.state.best_metric, trainer.state.epoch

    both(train)


@run_alone
def test_batches_that_are_too_large():
    """`auto_find_batch_size`: out of memory on all ranks, and a new model wrapper with smaller batches."""
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"

    def train(folder):
        trainer = trainer_of(folder, auto_find_batch_size=True, per_device_train_batch_size=12)

        def run_out(module, args, kwargs):
            if module.training and len(kwargs["input_ids"]) > 4:
                raise RuntimeError(text)

        trainer.model.register_forward_pre_hook(run_out, with_kwargs=True)
        trainer.train()
        assert trainer._train_batch_size <= 4
        return weights(trainer.model), trainer._train_batch_size

    both(train)


@run_alone
def test_who_is_late_is_logged():
    """With the callback, as often as the Trainer logs anything. Its own lines are those without the callback."""
    dist.init_process_group("syncengine")
    logs = []
    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", syncengine.Parallel):
        for adds_lines in (False, True):
            trainer = trainer_of(shared_folder() / f"late-{adds_lines}", logging_steps=3)
            if adds_lines:
                log_stragglers(trainer)
            trainer.train()
            logs.append(trainer.state.log_history)
    lines = [line for line in logs[1] if "syncengine/latest_rank" in line]
    plain, own = ([without_times(line) for line in log if line not in lines] for log in logs)
    assert own == plain
    assert [line["step"] for line in own if "loss" in line] == [3, 6]
    assert [line["step"] for line in lines] == [3, 6]  # of 8
    for line in lines:
        assert line["syncengine/latest_rank"] in (0, 1)
        assert line["syncengine/step_ms"] > line["syncengine/latest_rank_ms"] >= 0
    leave()
