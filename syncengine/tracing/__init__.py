"""Traces of what each rank does when: records them, reads them, and makes one file of them for ui.perfetto.dev.

events.py    reads the rings of all ranks, and puts their events on one clock
perfetto.py  makes one file of a trace; the command `syncengine trace`
session.py   begins and ends a trace on this rank
"""

from syncengine.tracing.events import Bucket, Event, Kind, Phase, RankTrace, Trace, read

__all__ = ["Bucket", "Event", "Kind", "Phase", "RankTrace", "Trace", "read"]
