"""``torch.nn.SyncBatchNorm`` between CPU ranks, for which torch itself has none."""

import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from syncengine._C import Communicator
from syncengine.communicator import default_communicator, is_initialized
from syncengine.errors import InvalidUsage, name_ranks
from syncengine.parallel.compiled import not_compiled
from syncengine.parallel.groups import resolve_group
from syncengine.torch_group import default_group


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """Normalizes by the mean and variance of all ranks' batches together, each sample counting once.

    ``Parallel`` makes these of the ``torch.nn.SyncBatchNorm`` in its module, in place; parameters, buffers, state_dict
    and the meaning of all attributes stay. ``process_group`` may also be a ``syncengine.Communicator``; ``None`` is all
    ranks. Batches may differ in size between ranks, or be empty. All ranks run these layers in the same order in each
    training forward, and in its backward.
    """

    @not_compiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes the input: in training on the CPU by all ranks' batches, otherwise as torch's own layer does."""
        if not self.training or input.device.type != "cpu":
            if self.training and is_initialized() and not dist.is_initialized() and self._communicator().size > 1:
                raise _without_torch("SyncBatchNorm", input.device)
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        communicator = self._communicator()
        if communicator.size == 1:
            return _BatchNorm.forward(self, input)
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, communicator
        )
        normalized, mean, variance = results
        self._update_running_statistics(mean, variance)
        return normalized

    def _communicator(self) -> Communicator:
        """Returns this layer's communicator. Looks it up again if its group, or a default one, has changed since.

        If the layer's process group is not that of all ranks, all ranks of the group take part in the look-up.
        """
        found = self.__dict__.get("_found")
        if found is None or found.is_outdated(self.process_group):
            communicator = resolve_group(self.process_group, None)[0]
            defaults = (None if default is None else weakref.ref(default) for default in _defaults())
            found = self._found = _Found(communicator, self.process_group, tuple(defaults))
        return found.communicator

    @torch.no_grad()
    def _update_running_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if not self.track_running_stats:
            return
        weight = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if weight is None:  # the plain average over all batches, as in every BatchNorm
                weight = 1.0 / self.num_batches_tracked.item()
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:  # a program may take them away
                running.lerp_(new.to(running.dtype), weight or 0.0)

    def __getstate__(self) -> dict[str, Any]:
        dropped = {"_found", "_compiled_call_impl"}  # compile() has made a function that calls the original
        return {name: value for name, value in self.__dict__.items() if name not in dropped}


class _Found(NamedTuple):
    """The communicator of a layer, and the groups by which it was found."""

    communicator: Communicator
    process_group: Any
    defaults: tuple[weakref.ReferenceType[Any] | None, ...]

    def is_outdated(self, process_group: Any) -> bool:
        """Whether a look-up may find another communicator. If a default is gone, the old one stays and raises."""
        if process_group is not self.process_group:
            return True
        return any(
            default is not None and (old is None or old() is not default)
            for default, old in zip(_defaults(), self.defaults, strict=True)
        )


def _defaults() -> tuple[Communicator | None, dist.ProcessGroup | None]:
    """The default communicator and torch's default group, as they are now; None if there is none."""
    communicator = default_communicator() if is_initialized() else None
    return communicator, default_group()


def adopt_sync_batch_norm(module: torch.nn.Module) -> None:
    """Makes every ``torch.nn.SyncBatchNorm`` in ``module`` one that works on CPU ranks. All ranks call it."""
    for layer in module.modules():
        if type(layer) is torch.nn.SyncBatchNorm:
            layer.__class__ = SyncBatchNorm  # in place: the model may refer to it from anywhere
        if isinstance(layer, SyncBatchNorm):
            layer.__dict__.pop("_found", None)  # it may have failed
            layer._communicator()


def check_exchange(module: torch.nn.Module, device: torch.device) -> None:
    """Raises ``InvalidUsage`` if torch's layers in ``module``, on ``device``, would exchange nothing."""
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and not dist.is_initialized():
            raise _without_torch(f"{name or 'the module'}, a SyncBatchNorm", device)


def _without_torch(layer: str, device: torch.device) -> InvalidUsage:
    """The error in place of torch's layer, which would normalize by this rank's batch alone, without a word."""
    return InvalidUsage(
        f"{layer} on {device} exchanges its statistics by torch.distributed, which is not initialized: call "
        "torch.distributed.init_process_group() first"
    )


def check_all_have_batches(module: torch.nn.Module, without: Collection[int]) -> None:
    """Raises ``InvalidUsage`` naming a layer in training mode that would wait for a rank ``without`` a batch."""
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and layer.training:
            missing = set(without).intersection(_ranks_of(layer))
            if missing:
                raise InvalidUsage(
                    f"{name or 'the module'} is a SyncBatchNorm, which needs a batch of each of its ranks, but "
                    f"{name_ranks(missing)} {'has' if len(missing) == 1 else 'have'} run out of them in join(): pass "
                    "throw_on_early_termination=True to join(), so that training ends on all ranks there"
                )


def _ranks_of(layer: torch.nn.SyncBatchNorm) -> Sequence[int]:
    if isinstance(layer, SyncBatchNorm):
        return layer._communicator().global_ranks
    return dist.get_process_group_ranks(layer.process_group) if dist.is_initialized() else ()


class _Normalize(torch.autograd.Function):
    """The normalized input, and the mean and unbiased variance for the running statistics, as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        communicator: Communicator,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total, mean, variance = _statistics(x, communicator)
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt())
        ctx.total, ctx.communicator = total, communicator
        computed = _computed_dtype(x)
        # Without training=True, F.batch_norm() takes the statistics as given.
        normalized = F.batch_norm(
            x,
            mean.to(computed),
            variance.to(computed),
            None if weight is None else weight.to(computed),
            None if bias is None else bias.to(computed),
            eps=eps,
        )
        unbiased = variance * (total / (total - 1))
        ctx.mark_non_differentiable(mean, unbiased)
        return normalized, mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse_deviation = ctx.saved_tensors
        dtype = _computed_dtype(x)
        grad, centered = grad.to(dtype), x.to(dtype) - _per_channel(mean, x)
        sums = torch.stack([grad.sum(_all_but_channels(x)), (grad * centered).sum(_all_but_channels(x))]).double()
        grad_bias, grad_weight = sums[0].clone(), sums[1] * inverse_deviation  # this rank's own: the reducer averages
        grad_x = None
        if ctx.needs_input_grad[0]:
            ctx.communicator.all_reduce(sums)
            through_mean, through_variance = sums / ctx.total
            slope = inverse_deviation if weight is None else inverse_deviation * weight
            grad_x = grad - _per_channel(through_mean, x)
            grad_x -= centered.mul_(_per_channel(through_variance * inverse_deviation**2, x))
            grad_x = grad_x.mul_(_per_channel(slope, x)).to(x.dtype)
        if weight is not None:
            grad_weight, grad_bias = grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
        wanted = ctx.needs_input_grad
        return grad_x, grad_weight if wanted[1] else None, grad_bias if wanted[2] else None, None, None


def _statistics(x: torch.Tensor, communicator: Communicator) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The number of values per channel, mean and biased variance over all ranks: the same bits on each rank."""
    channels = x.shape[1]
    count = x.numel() // channels
    # The rows are, for each channel: the number of values, their mean, and the sum of squared distances from that.
    own = torch.zeros(3, channels, dtype=torch.float64, device=x.device)
    if count > 0:
        variance, mean = torch.var_mean(x.to(_computed_dtype(x)), _all_but_channels(x), correction=0)
        own[0], own[1], own[2] = count, mean, variance.double() * count
    everyone = torch.empty(communicator.size, 3, channels, dtype=torch.float64, device=x.device)
    communicator.all_gather(everyone, own)
    counts, means, distances = everyone.unbind(1)
    total = int(counts[:, 0].sum())
    if total < 2:
        raise ValueError(f"Expected more than 1 value per channel over all ranks when training, got {total}")
    mean = (counts * means).sum(0) / total
    variance = (distances + counts * (means - mean) ** 2).sum(0) / total
    return total, mean, variance


def _computed_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The values with a shape that is broadcast over `x`, by channel."""
    return values.to(_computed_dtype(x)).view(1, -1, *[1] * (x.dim() - 2))
