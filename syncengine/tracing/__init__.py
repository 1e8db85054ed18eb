"""Traces of what each rank does when: records them, reads them, and makes one file of them for ui.perfetto.dev."""

from syncengine.tracing.events import Bucket, Event, Kind, Phase, RankTrace, Trace, read

__all__ = ["Bucket", "Event", "Kind", "Phase", "RankTrace", "Trace", "read"]
