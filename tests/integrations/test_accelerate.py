"""`syncengine.accelerate.Accelerator`: what mainstream training does with it, bit for bit as with Accelerate's own."""

import datetime
import functools
import os

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, find_executable_batch_size
from huggingface_ranks import both, forget, gpt2, loader
from lightning_ranks import run_alone, same, shared_folder, weights
from torch.nn.parallel import DistributedDataParallel

import syncengine
from syncengine import errors

OUT_OF_MEMORY = (
    "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)


def prepared(accelerator, count=24, batch=3):
    model = gpt2()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader(count, batch))


def train(accelerator, model, optimizer, data):
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@run_alone
def test_accumulation_and_clipping_and_bfloat16():
    def run(kind, **options):
        accelerator = kind(cpu=True, **options)
        model, optimizer, data = prepared(accelerator)
        train(accelerator, model, optimizer, data)
        ours = kind is not accelerate.Accelerator
        assert type(model) is (syncengine.Parallel if ours else DistributedDataParallel)
        assert accelerator.unwrap_model(model) is model.module
        return weights(model)

    for options in ({"gradient_accumulation_steps": 3}, {"mixed_precision": "bf16"}):
        both(functools.partial(run, **options))
        assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel


@run_alone
def test_gather_for_metrics_and_other_collectives():
    """Uneven data: the last batch is filled up, and what was added is dropped again."""

    def run(kind):
        accelerator = kind(cpu=True)
        model, optimizer, data = prepared(accelerator, count=22)
        train(accelerator, model, optimizer, data)
        rank = accelerator.process_index
        found = []
        with torch.no_grad():
            for batch in data:
                found.append(accelerator.gather_for_metrics(model(input_ids=batch).logits[:, -1].argmax(-1)))
        assert sum(map(len, found)) == 22
        accelerator.wait_for_everyone()
        found += [
            accelerator.gather_for_metrics([f"text {rank}"], use_gather_object=True),
            accelerator.reduce(torch.tensor([1.0, 2.0]) * rank, "mean"),
            accelerator.reduce(torch.tensor(rank + 1), "sum"),
            accelerator.pad_across_processes(torch.ones(rank + 1)),
            accelerate.utils.broadcast_object_list([rank, {"rank": rank}], from_process=1),
        ]
        return found, weights(model)

    both(run)


@run_alone
def test_save_and_load_state():
    """Training goes on as if it had not been interrupted, random numbers included."""

    def run(kind):
        accelerator = kind(cpu=True)
        model, optimizer, data = prepared(accelerator)
        train(accelerator, model, optimizer, data)
        folder = accelerator.save_state(str(shared_folder() / kind.__module__))
        train(accelerator, model, optimizer, data)
        at_once = weights(model)
        accelerator.free_memory()  # forgets what was prepared, as a new process would
        again, optimizer, data = prepared(accelerator)
        accelerator.load_state(folder)
        train(accelerator, again, optimizer, data)
        same(at_once, weights(again))
        return at_once

    both(run)


@run_alone
def test_find_executable_batch_size():
    """Out of memory in forward, on all ranks, until the batch is small enough; the model trains on."""

    def run(kind):
        accelerator = kind(cpu=True)
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        tried = []

        def run_out(module, args, kwargs):
            if len(kwargs["input_ids"]) > 3:
                raise RuntimeError(OUT_OF_MEMORY)

        model.module.transformer.h[1].register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True)
        model.module.register_forward_pre_hook(run_out, with_kwargs=True)

        @find_executable_batch_size(starting_batch_size=12)
        def attempt(size):
            tried.append(size)
            train(accelerator, model, optimizer, accelerator.prepare(loader(batch=size)))

        attempt()
        assert tried[0] == 12 and tried[-1] <= 3
        return tried, weights(model)

    both(run)


@run_alone
def test_arguments_reach_the_wrapper_and_the_group():
    forget()
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=1),
        InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=77)),
    ]
    accelerator = syncengine.accelerate.Accelerator(cpu=True, kwargs_handlers=handlers)
    model, _, _ = prepared(accelerator)
    assert model.find_unused_parameters and model.bucket_bytes_cap == 2**20
    assert dist.get_backend() == "syncengine"
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == datetime.timedelta(seconds=77)
    assert model.communicator.timeout == 77.0  # what its waits end by
    forget()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which they would train together")
@run_alone
def test_ranks_that_would_train_alone():
    """Without a GPU, and without cpu=True."""
    forget()
    os.environ.pop("ACCELERATE_USE_CPU", None)
    with pytest.raises(errors.InvalidUsage, match=r"2 ranks were launched.*alone.*Accelerator\(cpu=True\)"):
        syncengine.accelerate.Accelerator()
    dist.barrier()  # the other may still connect
    forget()


@run_alone
def test_a_model_that_is_wrapped_already():
    forget()
    accelerator = syncengine.accelerate.Accelerator(cpu=True)
    with pytest.warns(UserWarning, match=r"If a tool wraps models by itself, do not wrap yours"):
        accelerator.prepare(syncengine.Parallel(gpt2()))
    forget()


def test_without_a_launcher():
    """One process: nothing is wrapped, as with Accelerate's own."""
    forget()
    accelerator = syncengine.accelerate.Accelerator(cpu=True)
    model, optimizer, data = prepared(accelerator)
    train(accelerator, model, optimizer, data)
    assert not isinstance(model, DistributedDataParallel) and not dist.is_initialized()
    forget()
