"""Makes one file of a trace, for ui.perfetto.dev, by the protobuf classes of Perfetto's own package."""

import argparse
import importlib
import itertools
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from syncengine.errors import InvalidUsage, name_ranks
from syncengine.tracing.events import Event, Kind, Operation, Phase, RankTrace, Trace, read

_NOTHING = (1 << 64) - 1  # trace::kNobody

# The rows of a rank, in the order in which they are shown. Events of all other kinds are in one more row below.
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
}


def write(directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> str:
    """Makes the file ``path`` of the trace in ``directory``; returns a text that says where it is, and what it lacks.

    Raises ``InvalidUsage`` without a trace, without Perfetto's package, and if the file can't be written.
    """
    _import_package()
    trace = read(directory)
    try:
        # Writes a file of this process alone, which replaces `path` when it is whole: another process may write the
        # same trace, and nobody else may read a part of it, or put something else in its place.
        with tempfile.NamedTemporaryFile(dir=Path(path).parent, prefix=f"{Path(path).name}.", delete=False) as partial:
            try:
                partial.write(serialize(trace))
                partial.flush()
                Path(partial.name).replace(path)
            except BaseException:
                Path(partial.name).unlink()
                raise
    except OSError as error:
        raise InvalidUsage(f"{path} can't be written: {error.strerror}: make room, or give another path") from error
    return ". ".join([f"{path}: open it in https://ui.perfetto.dev", *caveats(trace)])


def caveats(trace: Trace) -> list[str]:
    """Sentences for a reader of the trace: which events are missing, and how certain the clocks are."""
    said = []
    for rank, of_rank in trace.ranks.items():
        if of_rank.dropped:
            said.append(f"Rank {rank} dropped its first {of_rank.dropped} of {of_rank.recorded} events")
        if of_rank.textless:
            said.append(f"Rank {rank} recorded {of_rank.textless} events without their text, for lack of room")
        if not of_rank.ended:
            said.append(f"Rank {rank} has not ended its trace")
    if trace.missing:
        said.append(f"There is nothing of {name_ranks(trace.missing)}")
    for host, doubt in trace.uncertainty.items():
        if math.isinf(doubt):
            said.append(f"No operation aligns the clock of host {host}: its times are by its own clock")
        elif doubt:
            said.append(f"The clock of host {host} is aligned to {doubt / 1e3:.0f} us")
    return said


def serialize(trace: Trace) -> bytes:
    """The bytes of the trace as Perfetto's protobuf ``Trace``."""
    return bytes(_Writer(_import_package(), trace).file.SerializeToString())


def _import_package() -> Any:
    try:
        return importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except ModuleNotFoundError as error:
        raise InvalidUsage("this needs the package perfetto: pip install perfetto") from error


class _Writer:
    def __init__(self, proto: Any, trace: Trace) -> None:
        self._proto = proto
        self.file = proto.Trace()
        self._track_ids = itertools.count(1)
        self._operations: dict[Operation, str] = {}
        for event in trace.events:
            if event.kind == Kind.BUCKET:
                self._operations[event.operation] = f"bucket {event.bucket.number} of {event.bucket.model}"
            elif event.kind == Kind.ANNOUNCED and event.text:
                self._operations[event.operation] = f"{event.text} {event.place}"
        self._flows: dict[Event, list[int]] = defaultdict(list)
        for number, ends in enumerate(trace.arrows(), 1):
            for event in ends:
                self._flows[event].append(number)
        packets = [packet for of_rank in trace.ranks.values() for packet in self._rank(of_rank, trace.uncertainty)]
        self.file.packet.extend(sorted(packets, key=lambda packet: packet.timestamp))  # those of a track stay in order
        self.file.packet[0].sequence_flags = proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED

    def _rank(self, of_rank: RankTrace, uncertainty: dict[int, float]) -> Iterator[Any]:
        rank, host, about = of_rank.rank, of_rank.host, of_rank.about
        process = {
            "pid": rank + 1,  # processes of several hosts may have the same number
            "process_name": f"rank {rank} (host {host}, {about['hostname']}, process {about['pid']})",
            "process_labels": [
                *caveats(Trace({rank: of_rank}, 0, {host: 0.0})),
                f"clock aligned to {uncertainty[host] / 1e3:.0f} us",
            ],
        }
        parent = self._track(process=process, child_ordering=self._proto.TrackDescriptor.EXPLICIT)
        rows: dict[str, list[Event]] = defaultdict(list)
        for event in of_rank.events:
            rows[_ROWS.get(event.kind, "notes")].append(event)
        for order, name in enumerate(dict.fromkeys([*_ROWS.values(), "notes"])):
            yield from self._row(rows[name], name=name, parent_uuid=parent, sibling_order_rank=order)

    def _row(self, events: Sequence[Event], **about: Any) -> Iterator[Any]:
        """Packets for these events. Events on a track are nested or follow each other; overlapping ones get another."""
        types = self._proto.TrackEvent
        tracks: dict[int, list[int]] = {}  # with the ends of what an event would lie in
        for event in events:
            for track, ends in tracks.items():
                while ends and ends[-1] <= event.begin:
                    yield self._packet(ends.pop(), track_uuid=track, type=types.TYPE_SLICE_END)
                if not ends or event.end <= ends[-1]:
                    break
            else:
                track, ends = self._track(**about), []
                tracks[track] = ends
            lasts = event.end > event.begin
            flows = "terminating_flow_ids" if event.kind == Kind.REDUCED else "flow_ids"
            yield self._packet(
                event.begin,
                track_uuid=track,
                name=self._name(event),
                categories=[event.kind.name.lower()],
                type=types.TYPE_SLICE_BEGIN if lasts else types.TYPE_INSTANT,
                debug_annotations=[
                    {"name": key, "int_value" if isinstance(value, int) else "string_value": value}
                    for key, value in _annotations(event).items()
                ],
                **{flows: self._flows.get(event, ())},
            )
            if lasts:
                ends.append(event.end)
        for track, ends in tracks.items():
            for end in reversed(ends):
                yield self._packet(end, track_uuid=track, type=types.TYPE_SLICE_END)

    def _packet(self, at: int, **event: Any) -> Any:
        return self._proto.TracePacket(timestamp=at, trusted_packet_sequence_id=1, track_event=event)

    def _track(self, **about: Any) -> int:
        uuid = next(self._track_ids)
        self.file.packet.add(trusted_packet_sequence_id=1, track_descriptor={"uuid": uuid, **about})
        return uuid

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
            return f"waits for {name_ranks(ranks)}" if ranks else "waits"
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


def add_trace(commands: Any) -> None:
    """Adds the command ``syncengine trace`` to those of the parser."""
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
    print(write(options.directory, options.out or Path(options.directory, "trace.pftrace")))
    return 0
