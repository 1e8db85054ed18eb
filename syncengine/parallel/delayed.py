"""``delay_all_reduce_named_params``: gradients in one buffer, which is reduced when another parameter's is there."""

from collections.abc import Iterable, Sequence

import torch

from syncengine._C import Communicator, Work
from syncengine.errors import InvalidUsage
from syncengine.parallel.replication import StateBroadcast


class DelayedParameters:
    """Keeps ``.grad`` of ``parameters`` in one buffer, which is averaged when ``trigger`` gets its gradient.

    With ``flat_buckets`` it is averaged at the end of that backward, behind all buckets: between them, at a place that
    depends on the order of this rank's gradients, ranks could wait crosswise.
    """

    def __init__(
        self,
        communicator: Communicator,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        trigger: torch.nn.Parameter,
        flat_buckets: bool,
    ) -> None:
        self.synchronizes = True  # whether the last forward's backward will
        self.communicator = communicator
        self._flat_buckets = flat_buckets
        self._scale = 1.0  # of this rank's gradients in the next average
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        first_name, first = named_parameters[0]
        for name, parameter in named_parameters:
            if parameter.dtype != first.dtype:
                raise InvalidUsage(
                    f"delay_all_reduce_named_params must be of one dtype: {first_name} is {first.dtype}, {name} is "
                    f"{parameter.dtype}"
                )
        self._buffer = torch.zeros(sum(p.numel() for p in self._parameters), dtype=first.dtype, device=first.device)
        parts = self._buffer.split([p.numel() for p in self._parameters])
        self._views = [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]
        if communicator.size > 1:
            StateBroadcast(communicator, self._parameters)()
        trigger.register_hook(self._reduce)

    def check_hooks(self) -> None:
        """Raises ``InvalidUsage`` naming a parameter whose hook would take this rank's gradient for the average."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter._post_accumulate_grad_hooks or hasattr(parameter, "_in_backward_optimizers"):
                raise InvalidUsage(
                    f"parameter {name} is delayed (delay_all_reduce_named_params), so what runs when its gradient is "
                    "accumulated (register_post_accumulate_grad_hook, an optimizer in backward) would see this rank's "
                    "gradient instead of the average: do not delay it, or use its gradient after backward"
                )

    def hold_gradients(self) -> None:
        """Before each backward: ``.grad`` is the buffer, zeroed where it was None."""
        without = [view for view, p in zip(self._views, self._parameters, strict=True) if p.grad is None]
        if len(without) == len(self._views):
            self._buffer.zero_()
        elif without:
            torch._foreach_zero_(without)
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if parameter.grad is None:
                parameter.grad = view

    def average_over(self, divisor: float, weight: float) -> None:
        """As ``Reducer.average_over``: for the next backward that synchronizes."""
        self._scale = weight * self.communicator.size / divisor

    def shadow(self) -> None:
        """Takes part in an average of the others without a gradient of its own."""
        self._average(torch.zeros_like(self._buffer))

    def _reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.synchronizes and self.communicator.size > 1:
            at_end = torch.autograd.Variable._execution_engine.queue_callback
            if self._flat_buckets:
                at_end(lambda: self._average(self._buffer))  # on a stream that waits for all that have made gradients
            else:
                at_end(self._average(self._buffer, async_op=True).wait)
        return gradient

    def _average(self, gradients: torch.Tensor, async_op: bool = False) -> Work | None:
        communicator, scale = self.communicator, self._scale
        self._scale = 1.0
        if scale == 0.0:
            gradients.zero_()  # may be NaN
        elif scale != 1.0:
            gradients.mul_(scale)
        if communicator.numerics == "ring":  # DDP divides first
            return communicator.all_reduce(gradients.div_(communicator.size), async_op=async_op)
        return communicator.all_reduce(gradients, "avg", async_op=async_op)


def check_delayed(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None, trigger: torch.nn.Parameter | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters to delay; raises ``InvalidUsage`` where the two arguments do not go together."""
    if (named_parameters is None) != (trigger is None):
        raise InvalidUsage(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )
    delayed = [] if named_parameters is None else list(named_parameters)
    for name, parameter in delayed:
        if parameter is trigger:
            raise InvalidUsage(f"param_to_hook_all_reduce is {name}, which is delayed itself")
    return delayed
