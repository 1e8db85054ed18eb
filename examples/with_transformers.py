"""The Trainer of Hugging Face Transformers with a small BERT of random weights: --ddp is the same training over DDP.

torchrun --nproc-per-node 2 examples/with_transformers.py
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import syncengine

if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit(
            "with_transformers.py needs 2 ranks or more: torchrun --nproc-per-node 2 examples/with_transformers.py"
        )
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("outputs/with_transformers"), help="a folder")
    options = parser.parse_args()

    if not options.ddp:  # before TrainingArguments, which would make a group of Gloo
        dist.init_process_group("syncengine")
        torch.nn.parallel.DistributedDataParallel = syncengine.Parallel  # what the Trainer looks up

    set_seed(1)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **shape))
    tokens = torch.randint(64, (128, 12))
    data = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]  # is the first one odd?
    arguments = TrainingArguments(
        output_dir=str(options.out),
        use_cpu=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=5e-3,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{type(trainer.model_wrapped).__name__}: loss {result.training_loss:.4f}")
        torch.save(model.state_dict(), options.out / "weights.pt")
    dist.destroy_process_group()
