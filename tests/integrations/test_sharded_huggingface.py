"""ShardedOptimizer in Accelerate and in the Trainer of Transformers: bit for bit as torch's own over DDP and Gloo."""

import copy

import accelerate
import safetensors.torch
import test_transformers
import torch
from huggingface_ranks import both, gpt2, loader
from lightning_ranks import run_alone, same, shared_folder, weights
from sharded_training import is_common
from transformers import EarlyStoppingCallback

import syncengine


def prepared(accelerator, model=None):
    model = model or gpt2()
    if type(accelerator) is accelerate.Accelerator:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = syncengine.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    return accelerator.prepare(model, optimizer, loader(), schedule)


def train(accelerator, model, optimizer, data, schedule, factor=1.0):
    skipped = []
    for number, batch in enumerate(data):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss * factor
            accelerator.backward(loss * float("inf") if number in skipped_at(accelerator) else loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if accelerator.sync_gradients:
                skipped.append(optimizer.step_was_skipped)
            schedule.step()
            optimizer.zero_grad()
    ours = type(accelerator) is not accelerate.Accelerator
    assert all(is_common(p) == ours for p in model.parameters())
    return skipped


def skipped_at(accelerator):
    """The batches whose gradients overflow, on rank 1 alone: what is averaged overflows everywhere."""
    return [1] if accelerator.scaler is not None and accelerator.process_index == 1 else []


@run_alone
def test_accumulation_and_clipping():
    def run(kind):
        accelerator = kind(cpu=True, gradient_accumulation_steps=3)
        model, optimizer, data, schedule = prepared(accelerator)
        assert type(optimizer) is accelerate.optimizer.AcceleratedOptimizer
        train(accelerator, model, optimizer, data, schedule)
        return weights(model), copy.deepcopy(optimizer.state_dict()), schedule.get_last_lr()

    both(run)


@run_alone
def test_steps_that_the_scaler_skips():
    def run(kind):
        accelerator = kind(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        model, optimizer, data, schedule = prepared(accelerator)
        skipped = train(accelerator, model, optimizer, data, schedule)
        assert skipped == [False, True, False, False]
        return weights(model), copy.deepcopy(optimizer.state_dict()), schedule.get_last_lr()

    both(run)


@run_alone
def test_save_and_load_state():
    """Into what was trained meanwhile, and into what was made anew, as in a new process."""

    def run(kind):
        accelerator = kind(cpu=True)
        ready = prepared(accelerator)
        train(accelerator, *ready)
        folder = accelerator.save_state(str(shared_folder() / kind.__module__))
        train(accelerator, *ready)
        at_once = weights(ready[0]), copy.deepcopy(ready[1].state_dict())
        accelerator.load_state(folder)
        train(accelerator, *ready)
        same(at_once, (weights(ready[0]), ready[1].state_dict()))
        accelerator.free_memory()
        del ready
        again = prepared(accelerator)
        accelerator.load_state(folder)
        train(accelerator, *again)
        same(at_once, (weights(again[0]), again[1].state_dict()))
        return at_once

    both(run)


@run_alone
def test_a_model_in_the_memory_of_its_file():
    """from_pretrained and safetensors leave parameters in private maps of the file."""

    def run(kind):
        accelerator = kind(cpu=True, gradient_accumulation_steps=3)
        folder = shared_folder() / kind.__module__
        if accelerator.is_main_process:
            gpt2().save_pretrained(folder)
        accelerator.wait_for_everyone()
        model = type(gpt2()).from_pretrained(folder)
        stored = safetensors.torch.load_file(folder / "model.safetensors")
        own = {name.removeprefix("transformer."): value for name, value in stored.items()}
        model.transformer.load_state_dict(own, assign=True)
        model.tie_weights()
        ready = prepared(accelerator, model)
        train(accelerator, *ready)
        return weights(ready[0])

    both(run)


def trainer_of(folder, **options):
    """Of test_transformers, with an optimizer that it makes before it wraps the model."""
    settings = {"lr": options.get("learning_rate", 5e-3), "betas": (0.9, 0.99)}
    if folder.name == "Parallel":
        kind = (syncengine.ShardedOptimizer, {"optimizer_class": torch.optim.AdamW, **settings})
    else:
        kind = (torch.optim.AdamW, settings)
    return test_transformers.trainer_of(folder, optimizer_cls_and_kwargs=kind, **options)


def left(trainer):
    return weights(trainer.model), copy.deepcopy(trainer.optimizer.state_dict())


@run_alone
def test_trainer_saves_and_resumes():
    def run(folder):
        trainer = trainer_of(folder, gradient_accumulation_steps=2, max_grad_norm=0.5, save_strategy="epoch")
        trainer.train()
        assert all(is_common(p) == (folder.name == "Parallel") for p in trainer.model.parameters())
        assert len(trainer.optimizer.param_groups) == 2  # with weight decay, and without
        at_once = left(trainer)
        again = trainer_of(folder, gradient_accumulation_steps=2, max_grad_norm=0.5)
        first = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))[0]
        torch.manual_seed(11)
        again.train(resume_from_checkpoint=str(first))
        assert again.state.global_step == trainer.state.global_step == 4
        return at_once, left(again)

    test_transformers.both(run)


@run_alone
def test_trainer_loads_the_best_model_at_its_end():
    def run(folder):
        trainer = trainer_of(folder, **test_transformers.BEST, callbacks=[EarlyStoppingCallback(1)])
        trainer.train()
        assert trainer.state.epoch < 9
        again = trainer.evaluate()["eval_loss"]
        assert again == trainer.state.best_metric
        return weights(trainer.model), trainer.state.best_metric, trainer.state.epoch

    test_transformers.both(run)
