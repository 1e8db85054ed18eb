"""How much memory a rank takes."""

from pathlib import Path


def resident() -> int:
    """Bytes of this process without program files; of what ranks share, each has its part (Pss)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))
