"""What still works where syncengine's extension does not load, and what is said. See test_autoload.py."""

import sys

import torch
import torch.distributed as dist

assert "syncengine" not in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
print("model:", type(model).__name__)
model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
try:
    dist.init_process_group("syncengine", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print("group:", error)
