"""Trains with Accelerate or Transformers on the ranks of the pool: over DDP and Gloo, then with syncengine."""

import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning_ranks import leave, same
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import syncengine.accelerate

logging.set_verbosity_error()


def both(train: Callable[[Any], Any]) -> Any:
    """`train(Accelerator)` with Accelerate's and with ours: what they return must have the same bits. Returns ours."""
    results = []
    for kind in (accelerate.Accelerator, syncengine.accelerate.Accelerator):
        forget()
        torch.manual_seed(7)
        results.append(train(kind))
        assert dist.get_backend() == ("gloo" if kind is accelerate.Accelerator else "syncengine")
        leave()
    forget()
    same(*results)
    return results[1]


def forget() -> None:
    """What Accelerate keeps for a whole process."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    warnings.filterwarnings("ignore", message=".*pin_memory.*")


def gpt2() -> GPT2LMHeadModel:
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **shape))


def bert() -> BertForSequenceClassification:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **shape))


def tokens(count: int = 24) -> torch.Tensor:
    return torch.randint(64, (count, 12), generator=torch.Generator().manual_seed(5))


def loader(count: int = 24, batch: int = 3) -> DataLoader:
    return DataLoader(tokens(count), batch_size=batch)
