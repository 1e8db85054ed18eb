"""A training script in the style of timm's train.py, on CPUs. See test_patch.py.

torchrun --nproc-per-node 2 timm_style.py weights.pt
"""

import argparse
import copy
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("output")
parser.add_argument("--no-ddp-bb", action="store_true")
parser.add_argument("--dist-bn", default="reduce")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_stem, self.bn1 = nn.Conv2d(3, 16, 3, 2, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), nn.BatchNorm2d(32), nn.SiLU())
        self.classifier = nn.Linear(32, 10)

    def forward(self, x):
        return self.classifier(self.blocks(nn.functional.silu(self.bn1(self.conv_stem(x)))).mean((2, 3)))


class ModelEma:
    def __init__(self, model, decay=0.9):
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    def update(self, model):
        with torch.no_grad():
            for ema, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
                if ema.is_floating_point():
                    ema.lerp_(value, 1.0 - self.decay)
                else:
                    ema.copy_(value)


def unwrap_model(model):
    return unwrap_model(model.module) if hasattr(model, "module") else model


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= n
    return rt


def distribute_bn(model, world_size, reduce):
    for name, buffer in unwrap_model(model).named_buffers(recurse=True):
        if "running_mean" in name or "running_var" in name:
            if reduce:
                dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
                buffer /= float(world_size)
            else:
                dist.broadcast(buffer, 0)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, model_ema, amp_autocast=suppress):
    model.train()
    losses = []
    for inputs, target in loader:
        with amp_autocast():
            loss = loss_fn(model(inputs.contiguous(memory_format=torch.channels_last)), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model_ema.update(unwrap_model(model))
        losses.append(reduce_tensor(loss.data, args.world_size))
    return torch.stack(losses)


def main():
    args = parser.parse_args()
    dist.init_process_group(backend="gloo", init_method="env://")
    args.world_size, args.rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(42 + args.rank)
    model = Net().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=2e-5)
    model_ema = ModelEma(model)
    model = NativeDDP(model, broadcast_buffers=not args.no_ddp_bb)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(28, 3, 16, 16, generator=generator), torch.arange(28) % 10
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses.append(train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, model_ema))
        distribute_bn(model, args.world_size, args.dist_bn == "reduce")
        model.eval()
        with torch.no_grad():
            losses.append(reduce_tensor(loss_fn(model(images), labels), args.world_size)[None])
    if args.rank == 0:
        print("wrapped by", type(model).__qualname__, isinstance(model, NativeDDP))
        state = {f"ema.{name}": value for name, value in model_ema.module.state_dict().items()}
        torch.save({**unwrap_model(model).state_dict(), **state, "losses": torch.cat(losses)}, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
