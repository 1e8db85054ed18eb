"""What happens when on each rank: records it, reads it, and makes one file of it for ui.perfetto.dev.

events.py    what is recorded: reads the rings of all ranks, and puts them on one clock
perfetto.py  one file of it; the command `syncengine trace`
session.py   a trace begins and ends on this rank
"""

from syncengine.tracing.events import Bucket, Event, Kind, Phase, RankTrace, Trace, read

__all__ = ["Bucket", "Event", "Kind", "Phase", "RankTrace", "Trace", "read"]
