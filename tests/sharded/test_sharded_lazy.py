"""Weights whose memory holds the conjugate, or the negative, of their elements."""

from __future__ import annotations

import torch
from pool import run_on_ranks
from sharded_training import not_divided, plain, sharded, train
from torch import nn


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Parameter(torch.randn(24, 300))
        numbers = torch.randn(300, dtype=torch.complex64)
        self.waves = nn.Parameter(numbers.clone().conj())
        self.imaginary = nn.Parameter(torch._neg_view(numbers.imag.clone()))  # as x.conj().imag is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.always * self.waves * self.imaginary).abs()


@run_on_ranks()
def test_they_become_plain_ones():
    nets = [Lazy(), Lazy()]
    assert nets[0].waves.is_conj() and nets[0].imaginary.is_neg()
    (model, optimizer), reference = sharded(nets[0], torch.optim.SGD), plain(nets[1], torch.optim.SGD)
    for each in ((model, optimizer), reference):
        train(*each, 3)
    pairs = zip(nets[0].named_parameters(), nets[1].parameters(), strict=True)
    return [name for (name, ours), theirs in pairs if not torch.equal(ours, theirs)] + not_divided(nets[0], optimizer)
