"""Hugging Face Accelerate with a small GPT-2 of random weights: --ddp is the same training over DDP.

torchrun --nproc-per-node 2 examples/with_accelerate.py
"""

import argparse
from pathlib import Path

import accelerate
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import syncengine.accelerate

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    # The one changed line takes the Accelerator of syncengine.accelerate instead of Accelerate's.
    kind = accelerate.Accelerator if options.ddp else syncengine.accelerate.Accelerator
    accelerator = kind(cpu=True, gradient_accumulation_steps=2)
    accelerate.utils.set_seed(1)
    shape = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **shape))
    tokens = (torch.arange(96)[:, None] + torch.arange(32)) % 64  # sequences that count
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=4, shuffle=True))
    for _epoch in range(2):
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    losses = accelerator.gather_for_metrics(loss.detach())
    accelerator.print(f"{type(model).__name__}: loss {losses.mean():.4f}")
    if options.out and accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), options.out)
    accelerator.end_training()
