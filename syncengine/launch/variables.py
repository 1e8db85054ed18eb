"""Reads a launcher's variables from an environment. A wrong one is an InvalidUsage that names variable and value."""

from collections.abc import Mapping

from syncengine.errors import InvalidUsage

_REMEDY = "start every rank by the launcher, or correct the variable"


def text(environ: Mapping[str, str], name: str, kind: str) -> str:
    """The text of a variable, which must be there and not empty."""
    value = environ.get(name, "")
    if not value:
        raise InvalidUsage(f"{name} is missing, though other variables of {kind} are set: set it, or unset them all")
    return value


def number(environ: Mapping[str, str], name: str, kind: str, low: int = 0, high: int | None = None) -> int:
    """The number in a variable, which must be there and hold a whole number from `low` to `high`."""
    value = text(environ, name, kind)
    if not (value.isascii() and value.isdigit()):
        raise InvalidUsage(f"{name}={value!r}, a variable of {kind}, is not a whole number: {_REMEDY}")
    parsed = int(value[:20])  # longer is out of range anyway, and int() refuses very long digit strings
    if parsed < low or (high is not None and parsed > high) or len(value) > 20:
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidUsage(f"{name}={value}, a variable of {kind}, is out of range, which is {allowed}: {_REMEDY}")
    return parsed
