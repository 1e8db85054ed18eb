"""``delay_all_reduce_named_params``: gradients that are averaged in one piece when another parameter's is ready.

Nothing is known here of a forward or a step: whether a backward averages, and with which weights, the reducer says;
what there is to average is in ``.grad``.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from syncengine._C import ReducerOptions, Work
from syncengine.errors import InvalidUsage
from syncengine.parallel.model import Model
from syncengine.parallel.reducer import ModelReducer

_NamedParameters = Sequence[tuple[str, torch.nn.Parameter]]

# By memory, the average that is being made there: perhaps of another wrapper, of the same parameters.
_under_way: weakref.WeakValueDictionary[StorageWeakRef, Work] = weakref.WeakValueDictionary()


class DelayedParameters:
    """Averages the gradients of ``named`` in those of the reducer's backwards in which ``trigger`` gets its gradient.

    They then lie one after the other in one piece of memory. Its hook is removed with it.
    """

    def __init__(self, named: _NamedParameters, trigger: torch.nn.Parameter) -> None:
        self.named = list(named)
        self._parameters = [parameter for _, parameter in named]
        self._check_dtypes()
        self._memory: StorageWeakRef | None = None  # that was made last: .grad may lie there, or not any more
        weak, weak_trigger = weakref.ref(self), weakref.ref(trigger)

        def hook(_: torch.Tensor) -> None:
            delayed, trigger = weak(), weak_trigger()
            if delayed is not None and trigger is not None:
                delayed._reduce(trigger)

        self.remove_hook = weakref.finalize(self, trigger.register_hook(hook).remove)
        self.remove_hook.atexit = False

    def average_with(self, model: Model, reducer: ModelReducer, options: ReducerOptions) -> None:
        """In the backwards of ``model``, from now on."""
        self._communicator, self._reducer, self._options = model.communicator, reducer, options
        self._on_device = model.device.type != "cpu"

    def check_hooks(self) -> None:
        """Raises ``InvalidUsage`` naming a parameter whose hook would see this rank's gradient instead of the
        average."""
        if self._communicator.size == 1:
            return
        for name, parameter in self.named:
            if parameter._post_accumulate_grad_hooks or hasattr(parameter, "_in_backward_optimizers"):
                raise InvalidUsage(
                    f"parameter {name} is delayed (delay_all_reduce_named_params), so what runs when its gradient is "
                    "accumulated (register_post_accumulate_grad_hook, an optimizer in backward) would see this rank's "
                    "gradient instead of the average: do not delay it, or use its gradient after backward"
                )

    def shadow(self) -> None:
        """Takes part in an average of the others without a gradient of its own."""
        self._average(self._zeros(), (self._communicator.size, 1.0))

    def _reduce(self, trigger: torch.nn.Parameter) -> None:
        if self._communicator.size == 1 or (weighting := self._reducer.join_backward(trigger)) is None:
            return
        self.check_hooks()
        at_end = torch.autograd.Variable._execution_engine.queue_callback
        # After all buckets, on a stream that waits for all that have made gradients: between flat buckets, at a point
        # that depends on the order of this rank's gradients, ranks could wait for each other crosswise. And a static
        # graph may bring the trigger's gradient several times.
        if self._on_device or self._options.flat_buckets or self._options.static_graph:
            at_end(partial(self._average_at_end, weighting))
            return
        gradients = self._gather()
        if (work := self._average(gradients, weighting, async_op=True)) is not None:
            _under_way[StorageWeakRef(gradients.untyped_storage())] = work
            at_end(work.wait)

    def _average_at_end(self, weighting: tuple[float, float]) -> None:
        self._average(self._gather(), weighting)

    @torch.inference_mode(False)  # for gradients, whatever the mode now
    @torch.no_grad()
    def _gather(self) -> torch.Tensor:
        """All gradients as one vector, in whose memory they lie from now on; zeros where there is none."""
        self._check_dtypes()
        if _under_way:
            self._let_others_end()
        if self._lie_in_one_piece():
            return self._parameters[0].grad.as_strided((self._size(),), (1,), 0)  # type: ignore[union-attr]
        gathered = self._zeros()
        parts = gathered.split([parameter.numel() for parameter in self._parameters])
        for part, parameter in zip(parts, self._parameters, strict=True):
            view, gradient = part.view(parameter.shape), parameter.grad
            if gradient is not None:
                view.add_(gradient)  # as autograd adds to DDP's zeros
                if gradient.is_cuda and not gradient.is_sparse:
                    gradient.record_stream(torch.cuda.current_stream(gradient.device))
            parameter.grad = view
        self._memory = StorageWeakRef(gathered.untyped_storage())
        return gathered

    def _let_others_end(self) -> None:
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                continue
            if (work := _under_way.get(StorageWeakRef(gradient.untyped_storage()))) is not None:
                work.wait()

    def _lie_in_one_piece(self) -> bool:
        """Whether all still lie where they were gathered last."""
        if self._memory is None:
            return False
        begin = 0
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse or not gradient.is_contiguous():
                return False
            if StorageWeakRef(gradient.untyped_storage()) != self._memory or gradient.storage_offset() != begin:
                return False
            if gradient.dtype != parameter.dtype or gradient.shape != parameter.shape:
                return False
            begin += parameter.numel()
        return True

    def _zeros(self) -> torch.Tensor:
        first = self._parameters[0]
        return torch.zeros(self._size(), dtype=first.dtype, device=first.device)

    def _size(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters)

    def _check_dtypes(self) -> None:
        """Raises ``InvalidUsage`` naming two parameters that can't be averaged in one piece."""
        first_name, first = self.named[0]
        for name, parameter in self.named:
            if parameter.dtype != first.dtype:
                raise InvalidUsage(
                    f"delay_all_reduce_named_params must be of one dtype: {first_name} is {first.dtype}, {name} is "
                    f"{parameter.dtype}"
                )

    def _average(self, gradients: torch.Tensor, weighting: tuple[float, float], async_op: bool = False) -> Work | None:
        communicator = self._communicator
        divisor, weight = weighting
        if weight == 0.0:
            gradients.zero_()  # may be NaN
        elif weight != 1.0 or divisor != communicator.size:
            gradients.mul_(weight * communicator.size / divisor)
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
