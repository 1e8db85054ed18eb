"""Draws findings from the ranks' facts, each with its one remedy."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from syncengine.doctor.facts import OTHER_PROJECT, Facts
from syncengine.errors import name_ranks

FATAL, WARNING, NOTE = "fatal", "warning", "note"
_MIB, _GIB = 2**20, 2**30
LEAST_MEMORY = 256 * _MIB  # a rank
SPARE_DESCRIPTORS = 64  # for what else a program opens


@dataclass(frozen=True)
class Finding:
    """A finding: `fatal` if training can't run, `warning` if it is slow or not as intended, `note` if good to know."""

    name: str
    severity: str
    ranks: list[int]
    text: str
    remedy: str


def grouped(everyone: Sequence[Facts], key: Callable[[Facts], Any]) -> dict[Any, list[int]]:
    """Maps each value of `key(facts)` to the ranks that have it, in rank order. Ranks with None are left out."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for facts in everyone:
        if (value := key(facts)) is not None:
            groups[value].append(facts["rank"])
    return dict(groups)


def host_of(facts: Facts) -> tuple[str, str]:
    """The key of a host: the same on all ranks that share memory."""
    return facts["host"], facts["extension"].get("host_key", "")


def by_host(everyone: Sequence[Facts]) -> list[list[Facts]]:
    """The facts of all ranks, grouped by host."""
    of_rank = {facts["rank"]: facts for facts in everyone}
    return [[of_rank[rank] for rank in ranks] for ranks in grouped(everyone, host_of).values()]


def find_all(everyone: Sequence[Facts], also: Iterable[Finding] = ()) -> list[Finding]:
    """All findings, the worst first. `also`, about missing ranks, follow equally bad ones, which may be the cause."""
    found = [*(finding for check in _CHECKS for finding in check(everyone)), *also]
    return sorted(found, key=lambda finding: (FATAL, WARNING, NOTE).index(finding.severity))


def missing_ranks(missing: set[int], error: str) -> Finding:
    """The finding for ranks that did not come."""
    remedy = (
        "see whether their processes were started and what they said; if they wait for others, too, check that every "
        "host reaches MASTER_ADDR:MASTER_PORT"
    )
    return Finding("missing ranks", FATAL, sorted(missing), error, remedy)


def _extension(everyone: Sequence[Facts]) -> Iterator[Finding]:
    for error, ranks in grouped(everyone, lambda f: f["extension"].get("error")).items():
        hosts = ", ".join(dict.fromkeys(f["host"] for f in everyone if f["rank"] in ranks))
        what, remedy = split_remedy(error)
        yield Finding("extension", FATAL, ranks, f"{name_ranks(ranks)} on {hosts}: {what}", f"on {hosts}: {remedy}")
    for name, title in (("shared_memory", "shared memory"), ("host_key", "the host"), ("instruction_set", "kernels")):
        for error, ranks in grouped(everyone, lambda f, name=name: f["extension"].get(f"{name}_error")).items():  # type: ignore[misc]
            what, remedy = split_remedy(error)
            if name == "shared_memory" and "): " not in error:  # the kernel's word is the last one there
                what, remedy = error, "see docs/errors.md"
            yield Finding(title, FATAL, ranks, f"{name_ranks(ranks)}: {what}", remedy)


def _versions(everyone: Sequence[Facts]) -> Iterator[Finding]:
    for package in ("syncengine", "torch", "python"):
        groups = grouped(everyone, lambda f, package=package: f["versions"].get(package))  # type: ignore[misc]
        if len(groups) > 1:
            sides = "; ".join(f"{name_ranks(ranks)}: {version}" for version, ranks in groups.items())
            others = sorted(rank for group in list(groups.values())[1:] for rank in group)
            text = f"ranks differ in their version of {package}: {sides}"
            distribution = "syncengine-torch" if package == "syncengine" else package
            remedy = f"install the same {distribution} on all hosts"
            yield Finding(f"versions of {package}", WARNING, others, text, remedy)
    for version, ranks in grouped(everyone, lambda f: f["versions"].get(OTHER_PROJECT)).items():
        text = (
            f"{name_ranks(ranks)}: syncengine {version} is installed beside syncengine-torch: another project, or "
            "ours by its earlier name. Both write into the folder syncengine"
        )
        remedy = "pip uninstall syncengine syncengine-torch, then install syncengine-torch again"
        yield Finding("two distributions", FATAL, ranks, text, remedy)


def _settings(everyone: Sequence[Facts]) -> Iterator[Finding]:
    for error, ranks in grouped(everyone, lambda f: f["settings"].get("error")).items():
        what, remedy = split_remedy(error.removeprefix("InvalidUsage: "))
        yield Finding("settings", FATAL, ranks, f"{name_ranks(ranks)}: {what}", remedy)
    unknown = {pair for facts in everyone for pair in facts["unknown_variables"].items()}
    for name, meant in sorted(unknown):
        ranks = [facts["rank"] for facts in everyone if name in facts["unknown_variables"]]
        remedy = f"set {meant} instead" if meant else f"unset {name}, or see docs/configuration.md for the right name"
        text = f"{name_ranks(ranks)}: {name} is set, and nothing reads it"
        yield Finding("unknown variable", WARNING, ranks, text, remedy)


def _entry_point(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Findings where SYNCENGINE_PATCH has no effect, or the backend's name is not known without an import."""
    for key, why, remedy in (
        ("switched_off", "TORCH_DEVICE_BACKEND_AUTOLOAD switches entry points off", "unset it"),
        ("installed", "this installation lacks its entry point", "install syncengine-torch again, by pip"),
    ):
        lacking = [f for f in everyone if f["entry_point"].get(key) is (key == "switched_off")]
        for patched, ranks in grouped(lacking, lambda f: f["variables"].get("SYNCENGINE_PATCH") == "1").items():
            lost = "SYNCENGINE_PATCH=1 has no effect" if patched else "the backend is not known without an import"
            severity = WARNING if patched or key == "installed" else NOTE
            yield Finding("entry point", severity, ranks, f"{name_ranks(ranks)}: {why}: {lost}", remedy)


def _cpus(everyone: Sequence[Facts]) -> Iterator[Finding]:
    for host in by_host(everyone):
        known = [facts for facts in host if "error" not in facts["cpus"]]
        for ranks in grouped(known, lambda f: tuple(f["cpus"]["affinity"])).values():
            of_group = [facts for facts in known if facts["rank"] in ranks]
            cpus = min(facts["cpus"]["available"] for facts in of_group)
            threads = max(facts["cpus"]["threads"] for facts in of_group)
            count, best = len(ranks), max(1, cpus // len(ranks))
            on = f"on {_plural(cpus, 'CPU')} of {host[0]['host']}"
            if count > cpus:
                bound = cpus < (of_group[0]["cpus"]["of_machine"] or 0)
                unbind = ", or let them have more CPUs (mpirun --bind-to none, a larger quota)" if bound else ""
                remedy = f"start at most {cpus} there{unbind}"
                yield Finding("too many ranks", WARNING, ranks, f"{count} ranks {on}", remedy)
            if threads > best:
                each = " each" if count > 1 else ""
                text = f"{_plural(count, 'rank')} with {_plural(threads, 'thread')}{each} {on}"
                yield Finding("too many threads", WARNING, ranks, text, f"set OMP_NUM_THREADS={best}")


def _memory(everyone: Sequence[Facts]) -> Iterator[Finding]:
    for host in by_host(everyone):
        ranks, memory = [facts["rank"] for facts in host], host[0]["memory"]
        available = memory.get("available")
        if available is not None and available < LEAST_MEMORY * len(ranks):
            text = f"{size_text(available)} of memory are left to {_plural(len(ranks), 'rank')} on {host[0]['host']}"
            remedy = "end what else runs there, raise the limit of the cgroup (of the container), or start fewer ranks"
            yield Finding("little memory", WARNING, ranks, text, remedy)


def needed_descriptors(facts: Facts, everyone: Sequence[Facts]) -> int:
    """The number of descriptors that this rank needs to connect with the others, as csrc/ counts them.

    Each other rank of its host takes 3. Over TCP each rank of another host takes `sockets` + 1, the endpoint 3, and
    `init` wants 16 to be free. Missing ranks count as ranks of other hosts: they may lack descriptors to come.
    """
    here = sum(host_of(other) == host_of(facts) for other in everyone) - 1
    there: int = facts["world_size"] - 1 - here
    settings = facts["settings"]
    over_tcp = there > 0 and settings.get("interhost", "tcp") == "tcp"
    return 3 * here + ((settings.get("sockets", 4) + 1) * there + 3 + 16 if over_tcp else 0)


def _descriptors(everyone: Sequence[Facts]) -> Iterator[Finding]:
    def few(facts: Facts) -> tuple[str, int, int, int] | None:
        limit, now = facts["descriptors"].get("limit"), facts["descriptors"].get("open", 0)
        needed = needed_descriptors(facts, everyone)
        is_short = limit is not None and limit < now + needed + SPARE_DESCRIPTORS
        return (facts["host"], limit, now, needed) if is_short else None

    for (host, limit, now, needed), ranks in grouped(everyone, few).items():
        best = 1024
        while best < 2 * (now + needed + SPARE_DESCRIPTORS):
            best *= 2
        text = f"{name_ranks(ranks)} on {host}: ulimit -n is {limit}; {now} are open, and connecting takes {needed}"
        starved = limit < now + needed or len(everyone) < everyone[0]["world_size"]  # then it may be why none came
        severity = FATAL if starved else WARNING
        yield Finding("file descriptors", severity, ranks, text, f"raise ulimit -n to {best}")


def _hosts(everyone: Sequence[Facts]) -> Iterator[Finding]:
    hosts = by_host(everyone)
    for name in dict.fromkeys(host[0]["host"] for host in hosts):
        apart = [host for host in hosts if host[0]["host"] == name]
        wanted = any("SYNCENGINE_HOST_ID" in facts["variables"] for host in apart for facts in host)
        if len(apart) > 1 and not wanted and all(host_of(host[0])[1] for host in apart):
            ranks = [facts["rank"] for host in apart for facts in host]
            sides = " and ".join(name_ranks(facts["rank"] for facts in host) for host in apart)
            why = "can't share memory (other containers or network namespaces): TCP connects them"
            remedy = "run all ranks of a machine in one container, or give the containers --network=host"
            yield Finding("separate hosts", WARNING, ranks, f"{sides} run on {name}, but {why}", remedy)
    ranks = [facts["rank"] for facts in everyone if not facts["settings"].get("has_secret")]
    if len(hosts) > 1 and ranks:
        text = f"{name_ranks(ranks)}: {len(hosts)} hosts, and no secret by which ranks know each other"
        remedy = "set SYNCENGINE_SECRET on all ranks, if others can reach this network"
        yield Finding("no secret", NOTE, ranks, text, remedy)


# Parts of a rank's facts that may be missing: the name in the report, the part's key, and in it the key of the error.
_PARTS = (
    ("versions", "versions", "error"),
    ("entry point", "entry_point", "error"),
    ("CPUs", "cpus", "error"),
    ("memory", "memory", "error"),
    ("descriptors", "descriptors", "error"),
    ("GPUs", "cuda", "error"),
    ("deaths", "extension", "death_notices_error"),
)


def _unknown(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Findings for facts that are missing, of ranks with an extension."""
    there = [facts for facts in everyone if "error" not in facts["extension"]]
    for title, part, key in _PARTS:
        for error, ranks in grouped(there, lambda f, part=part, key=key: f[part].get(key)).items():  # type: ignore[misc]
            text = f"{name_ranks(ranks)}: {title} could not be examined: {error}"
            yield Finding(title, WARNING, ranks, text, "see that error: it may stop training, too")


def _deaths(everyone: Sequence[Facts]) -> Iterator[Finding]:
    if blind := [f["rank"] for f in everyone if f["extension"].get("death_notices") == []]:
        why = "the kernel or a sandbox refuses both ways to notice a death on the same machine before the deadline"
        remedy = "allow set_robust_list or pidfd_open (seccomp), and use no emulator that lacks both"
        yield Finding("deaths", WARNING, blind, f"{name_ranks(blind)}: {why}", remedy)


def _cuda(everyone: Sequence[Facts]) -> Iterator[Finding]:
    lacks = [f["rank"] for f in everyone if f["cuda"].get("devices") and f["extension"].get("has_cuda") is False]
    if lacks:
        why = "torch sees GPUs, but this syncengine was built without CUDA: it trains on CPUs only"
        remedy = "build it in a checkout, where nvcc is: pip install --no-build-isolation --force-reinstall --no-deps ."
        yield Finding("no CUDA", WARNING, lacks, f"{name_ranks(lacks)}: {why}", remedy)
    if tests := [f["rank"] for f in everyone if f["extension"].get("has_test_hooks")]:
        text = f"{name_ranks(tests)}: this build is for syncengine's own tests, with fault injection, and slower"
        yield Finding("test build", NOTE, tests, text, "build without SYNCENGINE_TEST_HOOKS")


_CHECKS = (
    _extension,
    _versions,
    _settings,
    _entry_point,
    _cpus,
    _memory,
    _descriptors,
    _hosts,
    _unknown,
    _deaths,
    _cuda,
)


def split_remedy(error: str) -> tuple[str, str]:
    """Splits a text at its last colon or semicolon: syncengine's errors say what is wrong, and behind it what to do."""
    colon, semicolon = error.rfind(": "), error.rfind("; ")
    at = max(colon, semicolon)
    return (error[:at], error[at + 2 :]) if at > 0 else (error, "see docs/errors.md")


def size_text(count: float) -> str:
    """Bytes as a text in MiB or GiB."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
