"""A model in which tests of faults can interfere, in the middle of forward and of backward."""

import torch
from faults import my_rank
from raising_model import InBackward
from torch import nn

import syncengine


class Model(nn.Module):
    """Six layers, so that several buckets are on their way when the middle of backward is reached."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self.at_forward = self.at_backward = lambda: None

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number == 3:
                self.at_forward()
                x = InBackward.apply(x, self.at_backward)
            x = layer(x).relu()
        return x


def model_and_step():
    torch.manual_seed(0)
    model = Model()
    parallel = syncengine.Parallel(model, bucket_cap_mb=0.1)

    def step():
        model.zero_grad()
        torch.manual_seed(my_rank())
        parallel(torch.randn(8, 128)).square().sum().backward()

    return model, step
