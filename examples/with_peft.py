"""PEFT: LoRA on a small BERT of random weights, whose base is frozen; --ddp is the same training over DDP and Gloo.

torchrun --nproc-per-node 2 examples/with_peft.py
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import syncengine

if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("with_peft.py needs 2 ranks or more: torchrun --nproc-per-node 2 examples/with_peft.py")
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    dist.init_process_group("gloo" if options.ddp else "syncengine")
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    base = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **shape))
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["query", "value"], modules_to_save=["classifier"])
    peft = get_peft_model(base, lora)
    model = DistributedDataParallel(peft) if options.ddp else syncengine.Parallel(peft)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.randint(64, (128, 12))
    data = TensorDataset(tokens, tokens[:, 0] % 2)  # is the first one odd?
    sampler = DistributedSampler(data)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch, labels in DataLoader(data, batch_size=8, sampler=sampler):
            loss = model(input_ids=batch, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.all_reduce(loss.detach())
    if dist.get_rank() == 0:
        print(f"{type(model).__name__}: loss {loss / 2:.4f}")
        if options.out:  # LoRA's matrices and the classifier
            torch.save(get_peft_model_state_dict(peft, save_embedding_layers=False), options.out)
    dist.destroy_process_group()
