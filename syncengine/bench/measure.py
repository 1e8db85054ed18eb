"""Measures in turns: in each, every engine makes one verified call and some timed ones, in an order drawn anew."""

import argparse
import os
import random
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from syncengine._C import Communicator
from syncengine.bench.collectives import REDUCES, Case, Shape, bus_factor, engine_case, gloo_case
from syncengine.bench.options import DTYPES
from syncengine.errors import InvalidUsage

MOST_TURNS = 10


def open_gloo(communicator: Communicator, timeout: float) -> dist.ProcessGroup:
    """A group of Gloo with the same ranks, beside the default group. All ranks call it."""
    if not communicator.links:  # all on one machine: it need not know itself by name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        raise InvalidUsage(
            f"Gloo can't connect the ranks (GLOO_SOCKET_IFNAME is {interface or 'not set'}): "
            f"{str(error).splitlines()[0]}: give GLOO_SOCKET_IFNAME the interface that reaches the other ranks, or "
            "leave --compare out"
        ) from error
    return group


def measure(
    name: str, size: int, options: argparse.Namespace, communicator: Communicator, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Measures one row, with Gloo's figures if ``group`` is given. All ranks call it, and get the same row."""
    shape = Shape.of_size(name, communicator.size, size, DTYPES[options.dtype], options.op, options.root)
    cases = {"syncengine": engine_case(shape, communicator, options.memory == "shared")}
    missing = ""
    if group is not None:
        gloo = gloo_case(shape, group)
        try:
            gloo.call()
            cases["gloo"] = gloo
        except (RuntimeError, ValueError, NotImplementedError) as error:  # on all ranks alike: it does not have this
            missing = str(error).splitlines()[0]
    turns = min(MOST_TURNS, options.iters)
    calls = -(-options.iters // turns)
    for case in cases.values():
        for _ in range(options.warmup_iters):
            case.call()
    times, wrong = take_turns(cases, turns, calls, bool(options.check), communicator)
    row = {
        "collective": name,
        "size": shape.size,
        "count": shape.count,
        "type": options.dtype,
        "redop": options.op if name in REDUCES else "none",
        "root": options.root if name == "broadcast" else -1,
        **_figures(shape, times["syncengine"], wrong["syncengine"] if options.check else None),
    }
    if "gloo" in cases:
        row["gloo"] = _figures(shape, times["gloo"], wrong["gloo"] if options.check else None)
        row["ratio"] = _quartiles(times["gloo"] / times["syncengine"])
    elif missing:
        row["gloo"] = {"missing": missing}
    return row


def take_turns(
    cases: dict[str, Case], turns: int, calls: int, checks: bool, communicator: Communicator
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Returns, by engine, a call's microseconds on the slowest rank by turn, and all ranks' count of wrong elements."""
    names = list(cases)
    times = torch.zeros(len(names), turns, dtype=torch.float64, device="cpu")
    wrong = torch.zeros(len(names), dtype=torch.float64, device="cpu")
    for turn in range(turns):
        for index in random.Random(turn).sample(range(len(names)), len(names)):  # the same on all ranks
            case = cases[names[index]]
            if checks:
                wrong[index] += case.check(turn, communicator)
            communicator.barrier()
            begin = time.perf_counter_ns()
            for _ in range(calls):
                case.call()
            times[index, turn] = (time.perf_counter_ns() - begin) / 1e3 / calls
    everyone = torch.empty(communicator.size, times.numel() + wrong.numel(), dtype=torch.float64, device="cpu")
    communicator.all_gather(everyone, torch.cat([times.flatten(), wrong]))
    slowest = everyone[:, : times.numel()].amax(0).view_as(times)
    total = everyone[:, times.numel() :].sum(0)
    return dict(zip(names, slowest, strict=True)), {name: int(n) for name, n in zip(names, total, strict=True)}


def _figures(shape: Shape, times: torch.Tensor, wrong: int | None) -> dict[str, Any]:
    time_us = _quartiles(times)
    algbw = shape.size / time_us["median"] / 1e3  # GB/s, of 10^9 bytes
    return {
        "time": time_us["median"],
        "spread": time_us,
        "algbw": algbw,
        "busbw": algbw * bus_factor(shape.name, shape.ranks),
        "wrong": None if shape.name == "barrier" else wrong,
    }


def _quartiles(numbers: torch.Tensor) -> dict[str, float]:
    low, middle, high = torch.quantile(numbers, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return {"p25": low, "median": middle, "p75": high}
