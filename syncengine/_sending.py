"""Packs states that ranks send each other, without objects that `pickle` would execute code for."""

import copy
import io
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from syncengine.errors import InvalidUsage

_NUMPY = "\0numpy"  # begins the tuple in the place of an array or a scalar


def pack(state: Any) -> bytes:
    """``state`` as bytes, for a state that ``refuse_unsendable`` lets pass."""
    file = io.BytesIO()
    torch.save(_changed(state, _encoded), file)
    return file.getvalue()


def unpack(packed: bytes, device: torch.device | None = None) -> Any:
    """The state that ``pack`` has made bytes of, on ``device``. It calls no function that the sender names."""
    return _changed(torch.load(io.BytesIO(packed), device, weights_only=True), _decoded)


def refuse_unsendable(name: str, state: Any) -> None:
    """Raises ``InvalidUsage`` if ``state``, that of ``name``, has an object that ``pack`` can't send: says where."""
    if where := _unsendable(state, "state_dict()"):
        raise InvalidUsage(
            f"elastic() can't give another rank the state of {name}: {where}, is neither a tensor, nor NumPy's without "
            "Python objects, nor a plain number, text or container of such. Let state_dict() say it by these, and "
            "load_state_dict() take them"
        )


def _unsendable(value: Any, where: str) -> str:
    """The place and type of the innermost object that can't be sent; "" if there is none."""
    try:
        unpack(pack(_changed(value, _emptied)))
    except Exception:  # pickle's and torch's, of many kinds
        items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
        found = (_unsendable(item, f"{where}[{key!r}]") for key, item in items)
        return next(filter(None, found), f"{where}, a {type(value).__name__}")
    return ""


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns ``value`` with ``change`` applied to each object in its containers, keys included."""
    kind = type(value)
    if kind in (list, set, tuple) and not _is_encoded(value):
        return kind(_changed(item, change) for item in value)
    if kind in (dict, OrderedDict, Counter):
        result = copy.copy(value)  # with the attributes that torch gives to a model's state
        result.clear()
        for key, item in value.items():
            result[_changed(key, change)] = _changed(item, change)
        return result
    return change(value)


def _encoded(value: Any) -> Any:
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return value
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    encoded = (_NUMPY, isinstance(value, np.ndarray), file.getvalue())
    again = _decoded(encoded)
    if (type(again), again.dtype) != (type(value), value.dtype):
        raise TypeError(f"NumPy can't save {value.dtype}")
    return encoded


def _is_encoded(value: Any) -> bool:
    return type(value) is tuple and len(value) == 3 and isinstance(value[0], str) and value[0] == _NUMPY


def _decoded(value: Any) -> Any:
    if not _is_encoded(value):
        return value
    array = np.load(io.BytesIO(value[2]), allow_pickle=False)
    return array if value[1] else array[()]


def _emptied(value: Any) -> Any:
    """Returns an empty tensor for a plain one, whose elements can always be sent, and any other value as it is."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return torch.empty(0, dtype=value.dtype) if plain and not value.is_quantized else value
