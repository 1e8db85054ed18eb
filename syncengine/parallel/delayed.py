"""``delay_all_reduce_named_params``: gradients in one buffer, which is reduced when another parameter's is ready."""

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from syncengine._C import Communicator, Work
from syncengine.errors import InvalidUsage

# Of each trigger: whose forward was the last. Several wrappers may listen to one, whose next backward is that one's.
_last_forward = WeakIdKeyDictionary()


class DelayedParameters:
    """Keeps ``.grad`` of ``parameters`` in one buffer, which is averaged when ``trigger`` gets its gradient.

    Its hook is removed with it. If several have the same ``trigger``, the one whose forward was last averages.

    With ``flat_buckets`` the buffer is averaged at the end of that backward, after all buckets: between them, at a
    point that depends on the order of this rank's gradients, ranks could wait for each other crosswise.
    """

    def __init__(
        self,
        communicator: Communicator,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        trigger: torch.nn.Parameter,
        flat_buckets: bool,
    ) -> None:
        self.synchronizes = True  # whether the last forward's backward will
        self.average_on(communicator)
        self._flat_buckets = flat_buckets
        self._scale = 1.0  # of this rank's gradients in the next average
        self.named = list(named_parameters)
        self._parameters = [parameter for _, parameter in named_parameters]
        first_name, first = named_parameters[0]
        for name, parameter in named_parameters:
            if parameter.dtype != first.dtype:
                raise InvalidUsage(
                    f"delay_all_reduce_named_params must be of one dtype: {first_name} is {first.dtype}, {name} is "
                    f"{parameter.dtype}"
                )
        size = sum(p.numel() for p in self._parameters)
        with torch.inference_mode(False):  # for gradients, whatever the mode now
            self._buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
            parts = self._buffer.split([p.numel() for p in self._parameters])
            self._views = [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]
        self._trigger = weakref.ref(trigger)
        weak = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            if (delayed := weak()) is not None:
                delayed._reduce()

        self.remove_hook = weakref.finalize(self, trigger.register_hook(hook).remove)
        self.remove_hook.atexit = False

    def average_on(self, communicator: Communicator) -> None:
        """From now on."""
        self.communicator = communicator
        self._checked = communicator.size == 1

    def _check_hooks(self) -> None:
        """Raises ``InvalidUsage`` naming a parameter whose hook would see this rank's gradient instead of the
        average."""
        for name, parameter in self.named:
            if parameter._post_accumulate_grad_hooks or hasattr(parameter, "_in_backward_optimizers"):
                raise InvalidUsage(
                    f"parameter {name} is delayed (delay_all_reduce_named_params), so what runs when its gradient is "
                    "accumulated (register_post_accumulate_grad_hook, an optimizer in backward) would see this rank's "
                    "gradient instead of the average: do not delay it, or use its gradient after backward"
                )

    def begin_forward(self, synchronizes: bool) -> None:
        """In each forward that may have a backward: ``.grad`` is the buffer, zeroed where it was None."""
        if not self._checked:
            self._checked = True
            self._check_hooks()
        _last_forward[self._trigger()] = weakref.ref(self)
        self.synchronizes, self._scale = synchronizes, 1.0
        without = [view for view, p in zip(self._views, self._parameters, strict=True) if p.grad is None]
        if len(without) == len(self._views):
            self._buffer.zero_()
        elif without:
            torch._foreach_zero_(without)
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if parameter.grad is None:
                parameter.grad = view
        self._bring_back()

    def average_over(self, divisor: float, weight: float) -> None:
        """As ``Reducer.average_over``: for the next backward that synchronizes."""
        self._scale = weight * self.communicator.size / divisor

    def shadow(self) -> None:
        """Takes part in an average of the others without a gradient of its own."""
        self._average(torch.zeros_like(self._buffer))

    @torch.no_grad()
    def _bring_back(self) -> None:
        """Gradients that are not in the buffer: they were replaced, or autograd did not add in place."""
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is None:  # cleared after the forward, and this rank has no gradient
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view

    def _reduce(self) -> None:
        last = _last_forward.get(self._trigger())
        if self.synchronizes and self.communicator.size > 1 and last is not None and last() is self:
            at_end = torch.autograd.Variable._execution_engine.queue_callback
            if self._flat_buckets:
                at_end(self._average_at_end)  # on a stream that waits for all that have made gradients
            else:
                self._bring_back()
                at_end(self._average(self._buffer, async_op=True).wait)

    def _average_at_end(self) -> None:
        self._bring_back()
        self._average(self._buffer)

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
