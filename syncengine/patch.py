"""Scripts for DistributedDataParallel, unchanged: ``SYNCENGINE_PATCH=1 torchrun ... train.py``."""

import functools
import inspect
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from syncengine._C import has_cuda
from syncengine.config import MOST_RANKS
from syncengine.parallel import Parallel
from syncengine.parallel.broadcast import describe_layout
from syncengine.parallel.compiled import not_traced
from syncengine.parallel.devices import check_buffers_on, check_device_ids, device_of
from syncengine.parallel.mixed_precision import compression
from syncengine.parallel.model import named_parameters, not_ignored
from syncengine.parallel.refusal import check_arguments, check_parameters, refuse_delayed
from syncengine.parallel.tools import ForTools
from syncengine_autoload import SERVED_BY, torchs_own

# The boolean arguments of Parallel, and the types that they may have. Other arguments are checked where they are read.
_FLAGS: dict[str, tuple[type, ...]] = {
    name: (bool,) if parameter.default is not None else (bool, type(None))
    for name, parameter in inspect.signature(Parallel.__init__).parameters.items()
    if isinstance(parameter.default, bool) or name in ("broadcast_buffers", "forward_sync_buffers")
}

# Names that DDP's class does not take over from Parallel, since every class has its own.
_OF_CLASSES = {"__module__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl"}
_OF_CLASSES |= {
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "__firstlineno__",
    "__static_attributes__",
}


class _Either:
    """An attribute of DDP's class: ``ours`` for an object that ``Parallel`` serves, torch's for others.

    So a model that is served stays an instance of DDP, for programs that check its type or add attributes to the class.
    A function of the class, ``DistributedDataParallel.forward(model, x)``, chooses in the same way.
    """

    def __init__(self, name: str, ours: Any, theirs: Any) -> None:
        self._name, self._ours, self._theirs = name, ours, theirs
        self._of_class = theirs
        if inspect.isfunction(theirs):

            @not_traced
            @functools.wraps(theirs)
            def of_class(model: Any, *args: Any, **kwargs: Any) -> Any:
                return (ours if SERVED_BY in vars(model) else theirs)(model, *args, **kwargs)

            self._of_class = of_class

    @not_traced
    def __get__(self, model: Any, owner: type) -> Any:
        if model is not None and SERVED_BY in model.__dict__:
            return self._ours.__get__(model, owner) if hasattr(self._ours, "__get__") else self._ours
        if self._theirs is None:  # a base class may have one
            return getattr(super(DistributedDataParallel, owner if model is None else model), self._name)
        if model is None:
            return self._of_class
        return self._theirs.__get__(model, owner) if hasattr(self._theirs, "__get__") else self._theirs


class _EitherData(_Either):
    """An ``_Either`` for a name that is a property of ``Parallel``, but an instance attribute of torch's DDP."""

    @not_traced
    def __get__(self, model: Any, owner: type) -> Any:
        if model is not None and SERVED_BY not in model.__dict__ and self._name in model.__dict__:
            return model.__dict__[self._name]
        return super().__get__(model, owner)

    @not_traced
    def __set__(self, model: Any, value: Any) -> None:
        if SERVED_BY in model.__dict__:
            self._ours.__set__(model, value)
        else:
            model.__dict__[self._name] = value

    def __delete__(self, model: Any) -> None:
        if model.__dict__.pop(self._name, self) is self:
            raise AttributeError(self._name)


def _reduce(model: Any, protocol: int) -> tuple[Any, ...]:
    """Pickles a served model so that ``Parallel`` serves the copies, too, even in a process without the patch."""
    return make_served, (), model.__getstate__()


def make_served() -> Any:
    """Makes the object that ``__setstate__`` fills: of DDP's type under the patch, else a ``Parallel``."""
    if not torchs_own or give_to_ddp() is not None:
        return object.__new__(Parallel)
    made = object.__new__(DistributedDataParallel)
    made.__dict__[SERVED_BY] = Parallel
    return made


def give_to_ddp() -> str | None:
    """Gives DDP's class the attributes of ``Parallel``. Returns None, or, if it can't, the reason, and does nothing."""
    ours = {**vars(ForTools), **vars(Parallel), "__reduce_ex__": _reduce}
    for name in _OF_CLASSES:
        ours.pop(name, None)
    present = vars(DistributedDataParallel)
    for name, value in present.items():
        torchs = torchs_own.get(name)
        changed = hasattr(torchs, "__get__") and value is not torchs
        if (changed or (name in ours and name not in torchs_own)) and not isinstance(value, _Either):
            return f"the program has given DistributedDataParallel another {name!r}"
    for name in ours:
        if not isinstance(present.get(name), _Either):
            kind = _EitherData if hasattr(ours[name], "__set__") else _Either
            setattr(DistributedDataParallel, name, kind(name, ours[name], present.get(name)))
    return None


def refusal(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int) -> str | None:
    """Returns the reason why ``Parallel(*args, **kwargs)`` can't take DDP's place; None if there is none."""
    try:
        bound = inspect.signature(Parallel.__init__).bind(None, *args, **kwargs)
    except TypeError as error:
        return f"syncengine.Parallel does not take the same arguments: {error}"
    bound.apply_defaults()
    arguments = bound.arguments
    module = arguments["module"]
    if not isinstance(module, torch.nn.Module):
        return "it is no torch.nn.Module"
    if ranks > MOST_RANKS:
        return f"syncengine can't connect {ranks} ranks, {MOST_RANKS} at most"
    for name, value in arguments.items():
        if name in _FLAGS and not isinstance(value, _FLAGS[name]):
            return f"{name}={value!r} is no {' or '.join(kind.__name__ for kind in _FLAGS[name])}"
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    try:
        refuse_delayed(arguments["delay_all_reduce_named_params"], arguments["param_to_hook_all_reduce"])
        check_arguments(arguments["device_ids"], arguments["bucket_cap_mb"], arguments["bucket_cap_mb_list"])
        named = named_parameters(module, ignored)
        check_parameters(named)
        device = device_of(named.items())
        check_device_ids(device, arguments["device_ids"], arguments["output_device"])
        if arguments["mixed_precision"] is not None:
            compression(arguments["mixed_precision"], [*named.values()])
        buffers = not_ignored(module.named_buffers(), ignored)
        if device.type == "cuda":
            check_buffers_on(device, buffers)
        if arguments["forward_sync_buffers"] is None and arguments["broadcast_buffers"] is False:
            buffers = {}  # nothing is copied into them
        describe_layout([*named.items(), *buffers.items()])
    except Exception as error:  # of a value of another kind, say: DDP accepts it, or has an error of its own
        return str(error)
    if device.type == "cuda" and not has_cuda:
        return (
            "it is on a CUDA device, and syncengine was built without CUDA: with nvcc and a torch that has CUDA, "
            "build it in a checkout (pip install --no-build-isolation --force-reinstall --no-deps .)"
        )
    return None
