"""A training script in the style of nanoGPT's train.py, on CPUs. See test_patch.py.

torchrun --nproc-per-node 2 nanogpt_style.py weights.pt
"""

import math
import os
import sys
from contextlib import nullcontext

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

from examples.gpt.model import GPT, GPTConfig

out = sys.argv[1]
backend = "gloo"
gradient_accumulation_steps = 4
batch_size, block_size = 2, 16
learning_rate, max_iters, warmup_iters, min_lr = 1e-3, 4, 2, 1e-4
grad_clip = 1.0

ddp = int(os.environ.get("RANK", -1)) != -1
assert ddp
init_process_group(backend=backend)
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
seed_offset = ddp_rank
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size

torch.manual_seed(1337 + seed_offset)
data = torch.randint(64, (4096,))
ctx = nullcontext()


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT(GPTConfig(vocabulary=64, context=block_size, layers=2, heads=2, width=64))
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
model = DDP(model)
raw_model = model.module

X, Y = get_batch()
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            loss = model(X, Y) / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

if master_process:
    print("wrapped by", type(model).__qualname__, isinstance(model, DDP))
    torch.save(raw_model.state_dict(), out)
destroy_process_group()
