"""The events of a trace: reads the rings of all ranks, and puts them on one clock. See docs/tracing.md."""

import itertools
import json
import math
import os
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from syncengine.errors import InvalidUsage

# The layout of a ring, as csrc/base/trace.cpp writes it.
_MAGIC = b"SSTrace1"
_HEADER_BYTES = 4096
# The header: magic, capacity, room for texts, events so far, bytes of texts, has ended, events without their text.
_HEADER = struct.Struct("<8s6Q")
_SLOT = struct.Struct("<8Q")
_RING = re.compile(r"rank-(\d+)\.ring")


class Kind(IntEnum):
    """The kind of an event."""

    PHASE = 1
    STEP = 2
    BUCKET = 3
    ANNOUNCED = 4
    SCHEDULED = 5
    REDUCED = 6
    DELIVERED = 7
    WAIT = 8
    MESSAGE = 9
    TRANSFER = 10
    COPY = 11
    ERROR = 12
    NOTE = 13


class Phase(IntEnum):
    """The phase of a step: ``Event.lane`` of an event of ``Kind.PHASE``."""

    INPUT = 0  # the time in no other phase
    FORWARD = 1  # ends when backward begins, so the loss is in it
    BACKWARD = 2
    OPTIMIZER = 3
    WAIT = 4  # the wait for averages at the end of backward


Operation = tuple[int, int, int, int]


class Bucket(NamedTuple):
    """A bucket of gradients, by its number in its model's plan."""

    model: str
    number: int
    parameters: list[str]


class Event(NamedTuple):
    """Something that has happened on a rank. Times are nanoseconds, on one clock for all ranks."""

    rank: int
    kind: Kind
    begin: int
    end: int  # the same as `begin` for an instant
    group: int  # names the operation together with `lane`, `place` and `epoch`, the same on all ranks
    lane: int
    place: int
    epoch: int
    detail: int
    text: str

    @property
    def operation(self) -> Operation:
        """The operation that the event belongs to: the same on every rank."""
        return self.group, self.lane, self.place, self.epoch

    @property
    def bucket(self) -> Bucket:
        """The bucket that an event of ``Kind.BUCKET`` is about."""
        model, number, *parameters = self.text.split("\n") if self.text else ("", "-1")
        return Bucket(model, int(number), parameters)


def by_operation(events: Iterable[Event], *kinds: Kind) -> dict[Operation, list[Event]]:
    """The events of these kinds, by their operation."""
    found: dict[Operation, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in kinds:
            found[event.operation].append(event)
    return found


@dataclass(frozen=True)
class RankTrace:
    """The part of a trace that one rank has recorded."""

    rank: int
    host: int
    about: dict[str, Any]  # rank, size, host, hostname, pid, command, and the same moment as `epoch_ns` and `clock_ns`
    ended: bool  # whether it has ended its part: not if it was killed, or goes on
    recorded: int  # events that were recorded, also those that are lost
    events: list[Event]  # the last ones, by their begin
    offset: int = 0  # nanoseconds that were added to this rank's own clock
    textless: int = 0  # events whose text is missing, since the ring had no room for it

    @property
    def dropped(self) -> int:
        """How many of ``recorded`` are not in ``events``, since the ring keeps only the last ones."""
        return self.recorded - len(self.events)

    @property
    def is_over(self) -> bool:
        """Whether this rank can record nothing more, as far as this machine knows."""
        return self.ended or (self.about["hostname"] == os.uname().nodename and not _lives(self.about["pid"]))


def _lives(pid: int) -> bool:
    """Whether the process ``pid`` runs. Another user's process counts as alive, since it may not be looked at."""
    try:
        Path(f"/proc/{pid}/exe").stat()  # a process that has ended, but was not waited for, has no program any more
    except OSError as error:
        return not isinstance(error, FileNotFoundError | ProcessLookupError)
    return True


@dataclass(frozen=True)
class Trace:
    """A trace: the events of all ranks, on one clock."""

    ranks: dict[int, RankTrace]
    size: int  # how many ranks there were
    uncertainty: dict[int, float]  # by host, the nanoseconds by which its clock may differ from the first host's

    @property
    def missing(self) -> list[int]:
        """The ranks that have left no ring, which is the file of a rank's events."""
        return [rank for rank in range(self.size) if rank not in self.ranks]

    @property
    def events(self) -> Iterator[Event]:
        """The events of all ranks, one rank after the other."""
        return itertools.chain.from_iterable(of_rank.events for of_rank in self.ranks.values())

    def doubt(self, a: int, b: int) -> float:
        """By how much the clocks of ranks ``a`` and ``b`` may differ, in nanoseconds."""
        first, second = self.ranks[a].host, self.ranks[b].host
        return 0.0 if first == second else self.uncertainty[first] + self.uncertainty[second]

    def arrows(self) -> list[tuple[Event, Event]]:
        """Pairs of events: the last announcement of an operation, and each rank's reduction that waited for it.

        An operation has arrows only if every rank of the trace that has reduced it has also announced it. An arrow that
        is shorter than the uncertainty of the clocks is left out.
        """
        announced = by_operation(self.events, Kind.ANNOUNCED)
        found = []
        for operation, ends in by_operation(self.events, Kind.REDUCED).items():
            begins = announced[operation]
            if {event.rank for event in ends} <= {event.rank for event in begins}:
                last = max(begins, key=lambda event: event.begin)
                found += [(last, end) for end in ends if end.end - last.begin > self.doubt(last.rank, end.rank)]
        return found


def read(directory: str | os.PathLike[str]) -> Trace:
    """The trace in this directory, also while ranks still write it.

    Raises ``InvalidUsage`` if there is no trace, or if another version of syncengine has written it.
    """
    files = {int(match[1]): path for path in Path(directory).glob("*") if (match := _RING.fullmatch(path.name))}
    ranks = {rank: of_rank for rank, path in sorted(files.items()) if (of_rank := _read_ring(path)) is not None}
    if not ranks:
        raise InvalidUsage(f"there is no trace in {directory}: no file rank-0.ring, or none with anything in it")
    newest = max(ranks.values(), key=lambda of_rank: of_rank.about["epoch_ns"])
    size = newest.about["size"]
    ranks = {rank: of_rank for rank, of_rank in ranks.items() if rank < size}  # others: of an earlier run
    offsets, uncertainty = _align(ranks)
    for rank, of_rank in ranks.items():
        if offset := offsets[of_rank.host]:
            events = [event._replace(begin=event.begin + offset, end=event.end + offset) for event in of_rank.events]
            ranks[rank] = replace(of_rank, events=events, offset=offset)
    return Trace(ranks, size, uncertainty)


def is_complete(directory: str | os.PathLike[str], size: int) -> bool:
    """Whether none of ``size`` ranks can record anything more, as far as this machine knows."""
    rings = [_read_ring(Path(directory, f"rank-{rank}.ring"), with_events=False) for rank in range(size)]
    return all(ring is not None and ring.is_over for ring in rings)


def _read_ring(path: Path, with_events: bool = True) -> RankTrace | None:
    """The trace of the rank that writes ``path``; None if the rank has not begun."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES:
            return None
        magic, capacity, text_bytes, recorded, text_used, ended, textless = _HEADER.unpack_from(header)
        if magic == bytes(8) or (magic == _MAGIC and text_used == 0):
            return None
        if magic != _MAGIC:
            raise InvalidUsage(f"{path} is no trace of this version of syncengine: read it with the one that wrote it")
        words = file.read(text_bytes)
        slots = file.read(capacity * _SLOT.size) if with_events else b""
        file.seek(_HEADER_BYTES + text_bytes)
        again = file.read(len(slots))
    texts, at = [""], 0
    while at < text_used:
        (length,) = struct.unpack_from("<I", words, at)
        texts.append(words[at + 4 : at + 4 + length].decode(errors="replace"))
        at += 4 + length
    about = json.loads(texts[1])
    events = []
    for slot, same in zip(_SLOT.iter_unpack(slots), _SLOT.iter_unpack(again), strict=True):
        number, begin, end, group, place, epoch, detail, last = slot
        # A slot whose number is none of the last `capacity` recorded is being written, or was when its rank was killed.
        # A slot that has changed between the two reads may be torn.
        if slot != same or not max(0, recorded - capacity) < number <= recorded:
            continue
        text, kind, lane = last & 0xFFFFFFFF, last >> 32 & 0xFFFF, last >> 48
        said = texts[text] if text < len(texts) else ""
        events.append(Event(about["rank"], Kind(kind), begin, end, group, lane, place, epoch, detail, said))
    events.sort(key=lambda event: (event.begin, -event.end))
    return RankTrace(about["rank"], about["host"], about, bool(ended), recorded, events, textless=textless)


def _align(ranks: dict[int, RankTrace]) -> tuple[dict[int, int], dict[int, float]]:
    """The nanoseconds to add to each host's times, so that all are on the first host's clock; and their uncertainty.

    No rank sees that an operation is scheduled, or reduced, before all ranks have announced it. So an operation that
    one host announces and another one sees scheduled bounds the difference of their clocks from one side. All
    operations together bound it closely from both. Hosts without a common operation are aligned by their own time of
    day, of which nothing is certain.
    """
    hosts: dict[int, list[RankTrace]] = defaultdict(list)
    for of_rank in ranks.values():
        hosts[of_rank.host].append(of_rank)
    first, *others = sorted(hosts)
    offsets, uncertainty = {first: 0}, {first: 0.0}
    if not others:
        return offsets, uncertainty
    passed = {host: _passes(of_ranks) for host, of_ranks in hosts.items()}
    for host in others:
        common = passed[host].keys() & passed[first].keys()
        if not common:
            here, there = hosts[first][0].about, hosts[host][0].about
            offsets[host] = there["epoch_ns"] - there["clock_ns"] - here["epoch_ns"] + here["clock_ns"]
            uncertainty[host] = math.inf
        else:  # bounds of this host's clock less the first's
            most = min(passed[host][operation][1] - passed[first][operation][0] for operation in common)
            least = max(passed[host][operation][0] - passed[first][operation][1] for operation in common)
            offsets[host] = -round((most + least) / 2)
            uncertainty[host] = max((most - least) / 2, 1.0)
    return offsets, uncertainty


def _passes(of_ranks: list[RankTrace]) -> dict[Operation, tuple[int, int]]:
    """For each operation: when the last rank of a host announced it, and when the first saw it scheduled or reduced."""
    events = [event for of_rank in of_ranks for event in of_rank.events]
    announced, past = by_operation(events, Kind.ANNOUNCED), by_operation(events, Kind.SCHEDULED, Kind.REDUCED)
    return {
        operation: (max(event.begin for event in announced[operation]), min(event.end for event in past[operation]))
        for operation in announced.keys() & past.keys()
    }
