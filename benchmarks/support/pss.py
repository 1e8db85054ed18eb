"""How much of the machine's memory this process holds."""

import threading
import time
from pathlib import Path

MIB = 2**20


class PeakPss:
    """The largest Pss of this process that a thread sees while it looks again and again."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="peak-pss")

    def __enter__(self) -> "PeakPss":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _keep_looking(self) -> None:
        while not self._ended.is_set():
            self.look()
            time.sleep(0.001)

    def look(self) -> None:
        """One look, also for the main thread at a moment that it knows to be a peak."""
        self.bytes = max(self.bytes, pss())


def pss() -> int:
    """This process's proportional share of anonymous and shared memory, in bytes.

    Without mapped files: all processes that use torch share its libraries, so that the start or end of any of them, of
    other jobs too, would change our part by megabytes.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))
