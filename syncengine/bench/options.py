"""The command line of `syncengine bench`: the options of nccl-tests, short and long, where they mean something here."""

import argparse
import re

import torch

from syncengine.bench.collectives import COLLECTIVES
from syncengine.errors import InvalidUsage

# The dtypes by the names of nccl-tests, in its column "type".
DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}
OPS = ("sum", "prod", "min", "max", "avg")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str) -> int:
    """The bytes that a text such as 8, 4K, 128M or 1G means; B or iB may follow."""
    matched = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not matched or int(matched[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes such as 8, 4K or 128M")
    return int(matched[1]) * _UNITS[matched[2].upper()]


def _at_least(least: int) -> type[int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return parse  # type: ignore[return-value] # what argparse calls


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``syncengine bench`` to the parser."""
    many, some = _at_least(1), _at_least(0)
    add = parser.add_argument
    choices = (*COLLECTIVES, "all")
    add("--collective", choices=choices, default="all_reduce", help="what to measure; default %(default)s")
    add("-b", "--minbytes", type=parse_size, default=8, metavar="SIZE", help="least size; default 8")
    add("-e", "--maxbytes", type=parse_size, default=128 << 20, metavar="SIZE", help="largest size; default 128M")
    add("-f", "--stepfactor", type=_at_least(2), default=2, metavar="N", help="from size to size; default 2")
    add("-i", "--stepbytes", type=parse_size, metavar="SIZE", help="added from size to size, instead of a factor")
    add("-d", "--dtype", "--datatype", choices=[*DTYPES], default="float", help="of the elements; default float")
    add("-o", "--op", choices=OPS, default="sum", help="how they are reduced; default sum")
    add("-r", "--root", type=some, default=0, metavar="RANK", help="of broadcast; default 0")
    add("-n", "--iters", type=many, default=50, metavar="N", help="timed calls of each size; default 50")
    add("-w", "--warmup_iters", type=some, default=5, metavar="N", help="calls before these; default 5")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="whether results are verified; default 1")
    add("--memory", choices=("torch", "shared"), default="torch", help="torch: any tensors; shared: syncengine.empty's")
    add("--compare", action="store_true", help="measure Gloo as well, in turns in the same run")
    add("--ranks", type=many, metavar="N", help="without a launcher: start N ranks on this machine")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="that a call may wait; default 60")
    add("--json", action="store_true", help="JSON instead of a table")


def check(options: argparse.Namespace) -> None:
    """Raises InvalidUsage for options that can't go together."""
    if options.maxbytes < options.minbytes:
        raise InvalidUsage(f"-e {options.maxbytes} is less than -b {options.minbytes}: give the larger size with -e")
    if options.op == "avg" and not DTYPES[options.dtype].is_floating_point:
        raise InvalidUsage(f"avg has no meaning for {options.dtype}: give a floating -d, or -o sum")


def sizes(options: argparse.Namespace) -> list[int]:
    """The sizes to measure, in bytes, ascending."""
    found = [options.minbytes]
    while True:
        following = found[-1] + options.stepbytes if options.stepbytes else found[-1] * options.stepfactor
        if following > options.maxbytes:
            return found
        found.append(following)
