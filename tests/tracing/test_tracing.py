"""What a trace records: read back by its own reader, and Perfetto's file by Perfetto's classes."""

import io
import json
import os
import signal
import struct
import time
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command import alone
from hypothesis import given
from hypothesis import strategies as st
from marks import mostly_nightly
from parallel_models import average
from pool import RankPool
from torch import nn

import syncengine
from syncengine.errors import InvalidUsage, SyncError
from syncengine.tracing import Event, Kind, Phase, RankTrace, Trace, events, read
from syncengine.tracing.events import _align
from syncengine.tracing.perfetto import caveats, serialize

STEPS = 6


def train(directory: str, options: dict[str, Any], hosts: str = "") -> list[str]:
    """Traces some steps of a model of several buckets; returns its parameters' names."""
    if hosts:
        os.environ["SYNCENGINE_HOST_ID"] = hosts[int(os.environ["RANK"])]
        syncengine.init(timeout=60.0)
    model = syncengine.Parallel(nn.Sequential(*[nn.Linear(100, 100) for _ in range(4)]), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in range(2 * STEPS):  # as many before, in which buckets are planned
        if i == STEPS:
            syncengine.barrier()
            tracing = syncengine.trace(directory, **options)
            tracing.__enter__()
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    syncengine.all_reduce(torch.ones(3))
    tracing.__exit__(None, None, None)
    return [name for name, _ in model.module.named_parameters()]


def of_kind(events: list[Event], *kinds: Kind) -> list[Event]:
    return [event for event in events if event.kind in kinds]


def check_order(trace: Trace) -> None:
    """No rank knows that all have announced an operation before all have, or reduces it before that."""
    announced: dict[tuple, int] = {}
    for event in trace.events:
        if event.kind == Kind.ANNOUNCED:
            announced[event.operation] = max(announced.get(event.operation, 0), event.begin)
    scheduled = of_kind(list(trace.events), Kind.SCHEDULED)
    assert len(scheduled) > 0
    for event in scheduled:
        assert event.begin + trace.doubt(event.rank, min(trace.ranks)) * 2 >= announced[event.operation]


@pytest.mark.parametrize("world", mostly_nightly([2, 4], 0))
def test_what_is_recorded(pool: RankPool, tmp_path: Path, world: int):
    names = pool.run(train, str(tmp_path), {}, world=world)[0]
    trace = read(tmp_path)
    assert (trace.size, trace.missing, trace.uncertainty) == (world, [], {0: 0.0})
    check_order(trace)
    for rank, of_rank in trace.ranks.items():
        events = of_rank.events
        assert of_rank.ended and of_rank.dropped == 0 and of_rank.rank == rank
        assert all(event.begin <= event.end for event in events)
        steps = of_kind(events, Kind.STEP)
        assert [step.place for step in steps] == list(range(STEPS + 1, 2 * STEPS + 1))
        assert {step.text for step in steps} == {"Parallel(Sequential)"}
        assert [step.begin for step in steps[1:]] == [step.end for step in steps[:-1]]
        phases = of_kind(events, Kind.PHASE)
        for step in steps[1:]:  # the first began before the trace
            within = [phase for phase in phases if step.begin <= phase.begin and phase.end <= step.end]
            expected = [Phase.INPUT, Phase.OPTIMIZER, Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.WAIT]
            assert [phase.lane for phase in within if phase.end > phase.begin] == expected
            assert sum(phase.end - phase.begin for phase in within) == step.end - step.begin
            buckets = [
                event for event in of_kind(events, Kind.BUCKET) if step.begin <= event.begin and event.end <= step.end
            ]
            assert sorted(name for event in buckets for name in event.bucket.parameters) == sorted(names)
            assert [event.bucket.number for event in buckets] == list(range(len(buckets))) and len(buckets) > 1
            assert sum(event.detail for event in buckets) == 4 * (100 * 100 + 100) * 4 == step.detail
            reduced = {event.operation: event for event in of_kind(events, Kind.REDUCED)}
            for event in buckets:
                end = reduced[event.operation]
                assert event.begin <= end.begin <= end.end <= step.end
                assert end.detail == event.detail
        assert Counter(event.kind for event in events)[Kind.DELIVERED] == STEPS
        (call,) = [event for event in of_kind(events, Kind.ANNOUNCED) if event.text == "all_reduce"]
        assert call.detail == 12
    arrows = trace.arrows()
    operations = {event.operation for event in of_kind(list(trace.events), Kind.REDUCED)}
    assert len(arrows) == world * len(operations)
    for last, reduced in arrows:
        assert last.operation == reduced.operation and last.begin <= reduced.end


def send_a_message(directory: str) -> None:
    syncengine.init(torch_group=True)
    with syncengine.trace(directory):
        if syncengine.rank() == 0:
            dist.send(torch.ones(7), 1)
        else:
            time.sleep(0.05)
            dist.recv(torch.ones(7), 0)


def test_messages(pool: RankPool, tmp_path: Path):
    pool.run(send_a_message, str(tmp_path), settings=None)
    (sent,), (received,) = [of_kind(of_rank.events, Kind.MESSAGE) for of_rank in read(tmp_path).ranks.values()]
    assert (sent.place, sent.text, sent.detail) == (1, "send", 28)
    assert (received.place, received.text, received.detail) == (0, "receive", 28)
    assert sent.begin <= received.end


def train_with_a_hook(directory: str) -> None:
    with syncengine.trace(directory):
        syncengine.all_reduce(torch.ones(3))  # the communicator's first call, whose number is 0
        model = syncengine.Parallel(nn.Linear(10, 10))
        model.register_comm_hook(None, average)
        model(torch.ones(2, 10)).sum().backward()


def test_buckets_that_a_hook_averages_are_no_operations(pool: RankPool, tmp_path: Path):
    pool.run(train_with_a_hook, str(tmp_path))
    for of_rank in read(tmp_path).ranks.values():
        buckets = of_kind(of_rank.events, Kind.BUCKET)
        reduced = of_kind(of_rank.events, Kind.REDUCED)
        assert len(buckets) == 1 and len(reduced) > 1
        assert not {event.operation for event in buckets} & {event.operation for event in reduced}


def test_an_event_that_is_overwritten_while_it_is_read_is_left_out(tmp_path: Path):
    about = json.dumps({"rank": 0, "host": 0}).encode()
    texts = struct.pack("<I", len(about)) + about
    head = events._HEADER.pack(events._MAGIC, 2, len(texts), 2, len(texts), 0, 0).ljust(events._HEADER_BYTES, b"\0")
    whole, torn, next_one = ((n, n * 10, n * 10 + 1, 0, 0, 0, 0, Kind.NOTE << 32) for n in (1, 2, 4))
    torn = (*torn[:2], *next_one[2:])  # the writer has stored one word less

    class Ring(io.BytesIO):
        def __init__(self) -> None:
            super().__init__(head + texts + events._SLOT.pack(*whole) + events._SLOT.pack(*torn))

        def seek(self, offset: int, whence: int = 0) -> int:  # by then the writer is done
            self.getbuffer()[-events._SLOT.size :] = events._SLOT.pack(*next_one)
            return super().seek(offset, whence)

    class RingPath(type(tmp_path)):  # type: ignore[misc]
        def open(self, *_: object) -> Ring:
            return Ring()

    found = events._read_ring(RingPath(tmp_path))
    assert found is not None and [event.begin for event in found.events] == [10]


def test_events_without_their_text_are_told(tmp_path: Path):
    about = json.dumps({"rank": 0, "host": 0, "size": 1, "epoch_ns": 0}).encode()
    texts = struct.pack("<I", len(about)) + about
    head = events._HEADER.pack(events._MAGIC, 1, len(texts), 0, len(texts), 1, 3).ljust(events._HEADER_BYTES, b"\0")
    (tmp_path / "rank-0.ring").write_bytes(head + texts + bytes(events._SLOT.size))
    assert caveats(read(tmp_path)) == ["Rank 0 recorded 3 events without their text, for lack of room"]


def test_the_ring_drops_the_first_events_and_counts_them(pool: RankPool, tmp_path: Path):
    pool.run(train, str(tmp_path / "whole"), {})
    pool.run(train, str(tmp_path / "short"), {"events": 50})
    whole, short = read(tmp_path / "whole"), read(tmp_path / "short")
    for rank in range(2):
        assert len(short.ranks[rank].events) == 50
        assert short.ranks[rank].dropped == short.ranks[rank].recorded - 50 > 0
        assert short.ranks[rank].events[-1].kind == whole.ranks[rank].events[-1].kind
        assert f"Rank {rank} dropped its first {short.ranks[rank].dropped} of " in ". ".join(caveats(short))
    assert caveats(whole) == []


def test_it_stops_after_its_steps(pool: RankPool, tmp_path: Path):
    pool.run(train, str(tmp_path), {"steps": 2})
    for of_rank in read(tmp_path).ranks.values():
        last = of_kind(of_rank.events, Kind.STEP)[1:]
        assert [step.place for step in last] == [STEPS + 2]
        assert max(event.begin for event in of_rank.events) <= last[0].end


def test_hosts_are_aligned_as_far_as_is_said(pool: RankPool, tmp_path: Path):
    """These share a clock, so what they are moved by is the error."""
    pool.run(train, str(tmp_path), {}, "aab", world=3, settings=None)
    trace = read(tmp_path)
    assert [of_rank.host for of_rank in trace.ranks.values()] == [0, 0, 1]
    raw = trace.ranks[2].about["clock_ns"]
    moved = trace.ranks[2].offset
    assert raw > 0 and abs(moved) <= trace.uncertainty[1] < 60e9
    assert trace.uncertainty[0] == 0
    assert f"The clock of host 1 is aligned to {trace.uncertainty[1] / 1e3:.0f} us" in caveats(trace)
    check_order(trace)
    assert {event.place for event in of_kind(trace.ranks[2].events, Kind.TRANSFER)} <= {0, 1}
    assert len(of_kind(trace.ranks[2].events, Kind.TRANSFER)) > 0
    for last, reduced in trace.arrows():
        assert reduced.end - last.begin > trace.doubt(last.rank, reduced.rank)


def of_host(rank: int, events: list[Event]) -> RankTrace:
    about = {"epoch_ns": 10_000, "clock_ns": 4_000 * rank}
    return RankTrace(rank, rank, about, True, len(events), events)


@given(
    st.integers(-(10**12), 10**12),
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.tuples(*[st.integers(0, 10**4)] * 2)), min_size=1
    ),
)
def test_a_clock_is_never_further_off_than_is_said(skew: int, operations: list):
    """Against the true one: each rank announces at its time, and hears that all have some time after the last has."""
    events: list[list[Event]] = [[], []]
    for number, (*announced, delays) in enumerate(operations):
        for rank in range(2):
            times = announced[rank] + skew * rank, max(announced) + delays[rank] + skew * rank
            for kind, at in zip((Kind.ANNOUNCED, Kind.SCHEDULED), times, strict=True):
                events[rank].append(Event(rank, kind, at, at, 0, 1, number, 0, 0, ""))
    offsets, uncertainty = _align({rank: of_host(rank, events[rank]) for rank in range(2)})
    assert offsets[0] == uncertainty[0] == 0
    assert abs(offsets[1] + skew) <= uncertainty[1] + 1  # half a nanosecond is rounded


def test_without_a_common_operation_the_machines_times_count():
    offsets, uncertainty = _align({rank: of_host(rank, []) for rank in range(2)})
    assert offsets == {0: 0, 1: -4000}
    assert uncertainty == {0: 0, 1: float("inf")}


def die_in_a_step(directory: str) -> str:
    with syncengine.trace(directory):
        model = syncengine.Parallel(nn.Linear(10, 10))
        for i in range(5):
            try:
                loss = model(torch.ones(2, 10)).sum()
                if i == 3 and syncengine.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
            except SyncError as error:
                return str(error)
    return ""


def test_a_rank_that_is_killed_leaves_its_last_events(pool: RankPool, tmp_path: Path):
    with pool.spawn_ranks(die_in_a_step, str(tmp_path)) as ranks:
        text = ranks[0].result()
        assert ranks[1].exit_code() == -signal.SIGKILL
        assert "rank 1 died" in text
        assert f"(the last events of each rank are in {tmp_path})" in text
        trace = read(tmp_path)
    (error,) = of_kind(trace.ranks[0].events, Kind.ERROR)
    assert "rank 1 died" in error.text
    dead = trace.ranks[1]
    assert not dead.ended and dead.is_over
    # Three steps, of which the first has no beginning; then a forward.
    assert [event.place for event in of_kind(dead.events, Kind.STEP)] == [2, 3]
    reduced = {event.operation for event in of_kind(dead.events, Kind.REDUCED)}
    waiting = [event for event in of_kind(trace.ranks[0].events, Kind.ANNOUNCED) if event.operation not in reduced]
    assert len(waiting) <= 1  # for the dead one, unless its death was noticed before


def train_as_the_variable_says() -> None:
    model = syncengine.Parallel(nn.Linear(10, 10))
    for _ in range(3):
        model(torch.ones(2, 10)).sum().backward()


def test_by_variable(pool: RankPool, tmp_path: Path):
    environ = {"SYNCENGINE_TRACE": str(tmp_path)}
    with pool.spawn_ranks(train_as_the_variable_says, environ=environ) as ranks:
        assert [rank.exit_code(timeout=120) for rank in ranks] == [0, 0]  # importing Perfetto's classes takes seconds
        said = [rank.output() for rank in ranks]
    trace = read(tmp_path)
    assert all(of_rank.ended for of_rank in trace.ranks.values())
    assert [event.kind for event in trace.ranks[1].events].count(Kind.STEP) == 2
    assert sum("the trace of 2 ranks is in" in text for text in said) == 1
    assert (tmp_path / "trace.pftrace").exists() == (find_spec("perfetto") is not None)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def trace_often(directory: str, traces: int) -> None:
    communicator = syncengine.init()
    for i in range(traces):
        with syncengine.trace(f"{directory}/{i}"):
            communicator.barrier()


def test_one_rank_makes_the_file(pool: RankPool, tmp_path: Path):
    """Though all ranks end at the same time."""
    with pool.spawn_ranks(trace_often, str(tmp_path), 5) as ranks:
        assert [rank.exit_code(timeout=120) for rank in ranks] == [0, 0]
        said = "".join(rank.output() for rank in ranks)
    assert said.count("the trace of 2 ranks is in") == 5


def misuse(directory: str) -> None:
    for wrong, said in (({"steps": 0}, "steps=0"), ({"events": 0}, "events=0")):
        with pytest.raises(InvalidUsage, match=said), syncengine.trace(directory, **wrong):
            pass
    with pytest.raises(InvalidUsage, match="give another directory"), syncengine.trace("/proc/nowhere"):
        pass
    with syncengine.trace(directory):
        refused = pytest.raises(InvalidUsage, match="traced already, into .*rank-0")
        with refused, syncengine.trace(directory):
            pass


def test_misuse(pool: RankPool, tmp_path: Path):
    pool.run(misuse, str(tmp_path), world=1)
    with pytest.raises(InvalidUsage, match="there is no trace in"):
        read(tmp_path / "nowhere")
    (tmp_path / "rank-0.ring").write_bytes(b"SSTrace9" + bytes(8191))
    with pytest.raises(InvalidUsage, match="is no trace of this version"):
        read(tmp_path)


# --- One recorder


def numbers_of(directory: str) -> dict[str, Any]:
    """What everything says that has numbers of the same steps, of a model with a layer that it does not use."""
    module = nn.ModuleList([nn.Linear(100, 100), nn.Linear(9, 9)])
    module.forward = module[0].forward
    model = syncengine.Parallel(module, find_unused_parameters=True)
    with syncengine.trace(directory):
        for _ in range(STEPS):
            model.zero_grad()
            model(torch.ones(2, 100)).sum().backward()
    logged = model.logger._get_ddp_logging_data().ints_map
    return {"stats": model.stats(), "sync_stats": model.sync_stats(), "logged": logged}


def test_all_numbers_are_those_of_one_recorder(pool: RankPool, tmp_path: Path):
    """To the nanosecond, and to the byte: stats(), sync_stats(), DDP's logging data and the trace."""
    said = pool.run(numbers_of, str(tmp_path))
    trace = read(tmp_path)
    for rank, numbers in enumerate(said):
        stats, moved, logged = numbers["stats"], numbers["sync_stats"], numbers["logged"]
        events = trace.ranks[rank].events
        steps, phases = of_kind(events, Kind.STEP), of_kind(events, Kind.PHASE)
        lasted = {each: [event.end - event.begin for event in phases if event.lane == each] for each in Phase}
        assert stats["steps"] == moved["backwards"] == STEPS == len(steps) + 1  # the first has no beginning
        assert stats["step_ms"] == median(step.end - step.begin for step in steps) / 1e6
        assert stats["exposed_sync_ms"] == median(lasted[Phase.WAIT][1:]) / 1e6  # the first is as long as nobody knows
        assert logged["forward_compute_time"] == lasted[Phase.FORWARD][-1]
        assert logged["avg_backward_compute_time"] == sum(lasted[Phase.BACKWARD]) // STEPS
        assert stats["reduced_bytes"] == moved["reduced_bytes"] == steps[-1].detail
        copies = {event.text: event.detail for event in of_kind(events, Kind.COPY) if event.place == STEPS}
        for how in ("copied", "staged"):
            by_reason = {f"{how} {why}": size for why, size in moved[f"{how}_bytes"].items() if size}
            assert by_reason == {text: size for text, size in copies.items() if text.startswith(how)}
            assert stats[f"{how}_bytes"] == sum(by_reason.values())
        assert copies["copied unused"] == logged["unused_parameter_size"] == 4 * (9 * 9 + 9)


# --- Perfetto's file


def parsed(data: bytes) -> Any:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as PerfettoTrace

    return PerfettoTrace.FromString(data)


def test_perfettos_file(pool: RankPool, tmp_path: Path):
    pytest.importorskip("perfetto")
    pool.run(train, str(tmp_path), {})
    trace = read(tmp_path)
    file = parsed((tmp_path / "trace.pftrace").read_bytes())
    assert file == parsed(serialize(trace))
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in file.packet if p.HasField("track_descriptor")}
    processes = {uuid: track.process for uuid, track in tracks.items() if track.HasField("process")}
    assert [process.process_name.partition(" (")[0] for process in processes.values()] == ["rank 0", "rank 1"]
    assert len({process.pid for process in processes.values()}) == 2
    events = [packet for packet in file.packet if packet.HasField("track_event")]
    assert [packet.timestamp for packet in events] == sorted(packet.timestamp for packet in events)
    open_slices: dict[int, list[str]] = defaultdict(list)
    found: Counter[str] = Counter()
    begins: dict[int, tuple[int, str]] = {}
    ends: dict[int, tuple[int, str]] = {}
    for packet in events:
        event = packet.track_event
        assert event.track_uuid in tracks and tracks[event.track_uuid].parent_uuid in processes
        if event.type == event.TYPE_SLICE_END:
            open_slices[event.track_uuid].pop()
            continue
        found[event.categories[0]] += 1
        if event.categories[0] == "phase" and open_slices[event.track_uuid]:
            assert open_slices[event.track_uuid][0].startswith("step ")
        if event.type == event.TYPE_SLICE_BEGIN:
            open_slices[event.track_uuid].append(event.name)
        begins.update((flow, (packet.timestamp, event.name)) for flow in event.flow_ids)
        ends.update((flow, (packet.timestamp, event.name)) for flow in event.terminating_flow_ids)
    assert not any(open_slices.values())
    assert found == Counter(event.kind.name.lower() for event in trace.events)
    assert begins.keys() == ends.keys() and len(begins) == len(trace.arrows()) > 0
    for flow, (_, name) in begins.items():
        assert name == f"announces {ends[flow][1]}"
    assert "bucket 1 of Parallel(Sequential)" in {name for _, name in ends.values()}


@pytest.mark.thorough
def test_the_command(pool: RankPool, programs: RankPool, tmp_path: Path):
    pytest.importorskip("perfetto")
    pool.run(train, str(tmp_path), {})
    (tmp_path / "trace.pftrace").unlink()
    done = alone(programs, "trace", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/trace.pftrace: open it in https://ui.perfetto.dev")
    assert parsed((tmp_path / "trace.pftrace").read_bytes()) == parsed(serialize(read(tmp_path)))
    done = alone(programs, "trace", str(tmp_path / "nowhere"))
    assert done.returncode == 2 and "there is no trace in" in done.stderr
