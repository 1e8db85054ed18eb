"""One file of a trace, for ui.perfetto.dev, by the protobuf classes of Perfetto's own package."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from syncengine.errors import SyncError
from syncengine.tracing.events import Event, Kind, Phase, Trace, read

_PACKAGE = "perfetto.protos.perfetto.trace.perfetto_trace_pb2"
_NOTHING = (1 << 64) - 1  # trace::kNobody

# The rows of a rank, in the order in which they are shown.
_ROWS = {
    Kind.STEP: "steps",
    Kind.PHASE: "steps",
    Kind.BUCKET: "gradients of a bucket",
    Kind.ANNOUNCED: "announcements",
    Kind.SCHEDULED: "announcements",
    Kind.REDUCED: "reductions",
    Kind.DELIVERED: "delivery",
    Kind.WAIT: "waits",
    Kind.MESSAGE: "messages",
    Kind.TRANSFER: "between hosts",
    Kind.COPY: "notes",
    Kind.ERROR: "notes",
    Kind.NOTE: "notes",
}


def is_installed() -> bool:
    """Whether the package is."""
    return importlib.util.find_spec("perfetto") is not None


def write(directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> str:
    """Makes the file ``path`` of the trace in ``directory``; returns what there is to say of it."""
    trace = read(directory)
    partial = Path(f"{path}.{os.getpid()}")
    partial.write_bytes(serialize(trace))
    partial.replace(path)  # another rank may do the same
    return ". ".join([f"{path}: open it in https://ui.perfetto.dev", *caveats(trace)])


def caveats(trace: Trace) -> list[str]:
    """What a reader should know of it, a sentence each: what is missing, and how certain the clocks are."""
    said = []
    for rank, of_rank in trace.ranks.items():
        if of_rank.dropped:
            said.append(f"Rank {rank} dropped its first {of_rank.dropped} of {of_rank.recorded} events")
        if not of_rank.ended:
            said.append(f"Rank {rank} has not ended its trace")
    if trace.missing:
        said.append(f"There is nothing of rank{'s' if len(trace.missing) > 1 else ''} {_listed(trace.missing)}")
    for host, doubt in trace.uncertainty.items():
        if math.isinf(doubt):
            said.append(f"No operation aligns the clock of host {host}: its times are by its own clock")
        elif doubt:
            said.append(f"The clock of host {host} is aligned to {doubt / 1e3:.0f} us")
    return said


def serialize(trace: Trace) -> bytes:
    """As Perfetto's protobuf ``Trace``."""
    proto: Any = importlib.import_module(_PACKAGE)
    data: bytes = _Writer(proto, trace).file.SerializeToString()
    return data


class _Writer:
    def __init__(self, proto: Any, trace: Trace) -> None:
        self._proto = proto
        self.file = proto.Trace()
        self._tracks = 0
        self._operations: dict[tuple[int, ...], str] = {}
        for event in trace.events:
            if event.kind == Kind.BUCKET:
                self._operations[event.operation] = f"bucket {event.bucket.number} of {event.bucket.model}"
            elif event.kind == Kind.ANNOUNCED and event.text:
                self._operations[event.operation] = f"{event.text} {event.place}"
        self._flows: dict[Event, list[int]] = defaultdict(list)
        for number, ends in enumerate(trace.arrows(), 1):
            for event in ends:
                self._flows[event].append(number)
        packets: list[tuple[int, int, Any]] = []
        for rank in trace.ranks:
            packets += self._rank(trace, rank)
        packets.sort(key=lambda packet: packet[:2])  # nested ones stay in their order
        for at, _, packet in packets:
            packet.timestamp = at
            packet.trusted_packet_sequence_id = 1
            self.file.packet.append(packet)
        if self.file.packet:
            self.file.packet[0].sequence_flags = proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED

    def _rank(self, trace: Trace, rank: int) -> list[tuple[int, int, Any]]:
        of_rank = trace.ranks[rank]
        about = of_rank.about
        process = self._track()
        process.process.pid = rank + 1  # processes of several hosts may have the same number
        process.process.process_name = f"rank {rank} (host {of_rank.host}, {about['hostname']}, process {about['pid']})"
        process.child_ordering = self._proto.TrackDescriptor.EXPLICIT
        process.process.process_labels.extend(caveats(Trace({rank: of_rank}, 0, {of_rank.host: 0.0})))
        process.process.process_labels.append(f"clock aligned to {trace.uncertainty[of_rank.host] / 1e3:.0f} us")
        rows: dict[str, list[Event]] = defaultdict(list)
        for event in of_rank.events:
            rows[_ROWS[event.kind]].append(event)
        packets: list[tuple[int, int, Any]] = []
        for order, name in enumerate(dict.fromkeys(_ROWS.values())):
            for nested in _rows_of(rows[name]):
                track = self._track()
                track.name, track.parent_uuid, track.sibling_order_rank = name, process.uuid, order
                packets += self._slices(nested, track.uuid)
        return packets

    def _track(self) -> Any:
        packet = self.file.packet.add()
        packet.trusted_packet_sequence_id = 1
        self._tracks += 1
        packet.track_descriptor.uuid = self._tracks
        return packet.track_descriptor

    def _slices(self, events: Sequence[Event], track: int) -> Iterable[tuple[int, int, Any]]:
        """Packets with their times, and the order among those of one time: what is around others begins before them."""
        types = self._proto.TrackEvent
        for depth, event in enumerate(events):
            packet = self._proto.TracePacket()
            content = packet.track_event
            content.track_uuid, content.name = track, self._name(event)
            content.categories.append(event.kind.name.lower())
            content.type = types.TYPE_SLICE_BEGIN if event.end > event.begin else types.TYPE_INSTANT
            (content.terminating_flow_ids if event.kind == Kind.REDUCED else content.flow_ids).extend(
                self._flows.get(event, ())
            )
            for key, value in _annotations(event).items():
                annotation = content.debug_annotations.add()
                annotation.name = key
                if isinstance(value, int):
                    annotation.int_value = value
                else:
                    annotation.string_value = value
            yield event.begin, depth + 1, packet
            if event.end > event.begin:
                last = self._proto.TracePacket()
                last.track_event.track_uuid, last.track_event.type = track, types.TYPE_SLICE_END
                yield event.end, -depth, last

    def _name(self, event: Event) -> str:
        if event.kind == Kind.PHASE:
            return Phase(event.lane).name.lower()
        if event.kind == Kind.STEP:
            return f"step {event.place} of {event.text}"
        if event.kind == Kind.BUCKET:
            return f"bucket {event.bucket.number} of {event.bucket.model}"
        if event.kind in (Kind.ANNOUNCED, Kind.SCHEDULED, Kind.REDUCED):
            what = self._operations.get(event.operation, f"operation {event.place}")
            return {Kind.SCHEDULED: "all have announced ", Kind.ANNOUNCED: "announces "}.get(event.kind, "") + what
        if event.kind == Kind.WAIT:
            ranks = [rank for rank in range(64) if event.detail >> rank & 1]
            return f"waits for rank {_listed(ranks)}" if ranks else "waits"
        if event.kind in (Kind.MESSAGE, Kind.TRANSFER):
            other = "any rank" if event.place == _NOTHING else f"rank {event.place}"
            return f"{event.text} {'from' if event.text == 'receive' else 'to'} {other}"
        return event.text or event.kind.name.lower()


def _annotations(event: Event) -> dict[str, int | str]:
    if event.kind == Kind.PHASE:
        return {"not this rank's own (ns)": event.detail}
    if event.kind == Kind.BUCKET:
        return {"bytes": event.detail, "parameters": "\n".join(event.bucket.parameters)}
    if event.kind in (Kind.STEP, Kind.ANNOUNCED, Kind.REDUCED, Kind.MESSAGE, Kind.TRANSFER, Kind.COPY):
        return {"bytes": event.detail}
    return {}


def _rows_of(events: Sequence[Event]) -> list[list[Event]]:
    """The same events, in as many rows as it takes that those of a row follow, or lie within, each other."""
    rows: list[list[Event]] = []
    open_ends: list[list[int]] = []  # of each row: ends of what an event would lie in
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        for row, ends in zip(rows, open_ends, strict=True):
            while ends and ends[-1] <= event.begin:
                ends.pop()
            if not ends or event.end <= ends[-1]:
                row.append(event)
                ends.append(event.end)
                break
        else:
            rows.append([event])
            open_ends.append([event.end])
    return rows


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def add_trace(commands: Any) -> None:
    """Adds the command to argparse's."""
    parser = commands.add_parser(
        "trace",
        help="one file of the ranks' traces, for ui.perfetto.dev",
        description="Makes one file of what syncengine.trace() or SYNCENGINE_TRACE has recorded on all ranks. Exit "
        "code: 0 fine, 2 it can't be done.",
    )
    parser.add_argument("directory", help="where the files rank-N.ring are")
    parser.add_argument("--out", help="the file to make (DIRECTORY/trace.pftrace)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, _arguments: Sequence[str]) -> int:
    if not is_installed():
        print("syncengine trace: this needs the package perfetto: pip install perfetto", file=sys.stderr)
        return 2
    try:
        print(write(options.directory, options.out or Path(options.directory, "trace.pftrace")))
    except SyncError as error:
        print(f"syncengine trace: {error}", file=sys.stderr)
        return 2
    return 0
