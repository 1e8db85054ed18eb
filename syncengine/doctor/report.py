"""One report for all ranks, which names ranks where they differ: text, or JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from syncengine.doctor.checks import NOTE, Finding, by_host, grouped, size_text
from syncengine.doctor.facts import Facts
from syncengine.errors import name_ranks
from syncengine.launch import Launch

_STATUS = {0: "fine", 1: "findings", 2: "can't run"}
HOW_TO_START = (
    "this is one process. To examine several ranks, start it as you start training:\n"
    "  torchrun --nproc-per-node 2 -m syncengine doctor\n"
    "  mpirun -n 2 python -m syncengine doctor\n"
    "  syncengine doctor --ranks 2        starts them itself, on this machine"
)


def print_report(
    everyone: Sequence[Facts],
    outcomes: dict[int, Any],
    findings: Sequence[Finding],
    code: int,
    launch: Launch,
    starter: str,
    as_json: bool,
) -> None:
    """Prints the report on stdout. `starter`: the program that has started the ranks, if no launcher has."""
    if as_json:
        whole = {
            "status": _STATUS[code],
            "exit_code": code,
            "launcher": launch.kind,
            "world_size": launch.world_size,
            "findings": [asdict(finding) for finding in findings],
            "ranks": list(everyone),
            "self_test": {str(rank): outcome for rank, outcome in outcomes.items()},
        }
        print(json.dumps(whole, indent=2), flush=True)
        return
    print("\n".join(_lines(everyone, outcomes, findings, launch, starter)), flush=True)


def _lines(
    everyone: Sequence[Facts], outcomes: dict[int, Any], findings: Sequence[Finding], launch: Launch, starter: str
) -> list[str]:
    hosts = by_host(everyone)
    ranks = f"{launch.world_size} rank{'' if launch.world_size == 1 else 's'}"
    by = "" if launch.kind == "single" else f", started by {starter or launch.kind}"
    where = f" on {len(hosts)} host{'' if len(hosts) == 1 else 's'}" if len(everyone) == launch.world_size else ""
    lines = [f"syncengine doctor: {ranks}{where}{by}", ""]
    for title, of_rank in _ROWS:
        lines += _row(title, everyone, of_rank)
    for title, of_host in _HOST_ROWS:
        texts = [(facts["host"], of_host(facts)) for facts, *_ in hosts]
        lines += _titled(title, [f"{host}: {text}" if len(hosts) > 1 else text for host, text in texts if text])
    lines += _titled("self-test", [_self_test(outcomes)])
    notes = [finding for finding in findings if finding.severity == NOTE]
    real = [finding for finding in findings if finding.severity != NOTE]
    lines += ["", f"{len(real)} finding{'' if len(real) == 1 else 's'}{':' if real else ''}"]
    for number, finding in enumerate(real, 1):
        fatal = " (training can't run)" if finding.severity == "fatal" else ""
        lines += [f"{number}. {finding.text}{fatal}", f"   remedy: {finding.remedy}"]
    for finding in notes:
        lines += ["", f"note: {finding.text}", f"   {finding.remedy}"]
    if launch.kind == "single":
        lines += ["", HOW_TO_START]
    return lines


def _row(title: str, everyone: Sequence[Facts], of_rank: Callable[[Facts], str]) -> list[str]:
    """One line if the ranks are alike, else a line for each group of ranks that are."""
    kinds = grouped(everyone, lambda facts: of_rank(facts) or None)
    if any(len(ranks) == len(everyone) for ranks in kinds.values()):
        return _titled(title, list(kinds))
    return _titled(title, [f"{name_ranks(ranks)}: {text}" for text, ranks in kinds.items()])


def _titled(title: str, texts: list[str]) -> list[str]:
    return [f"  {title if i == 0 else '':<12} {text}" for i, text in enumerate(texts)]


def _versions(facts: Facts) -> str:
    versions, build = facts["versions"], facts["extension"].get("build")
    if "error" in versions:
        return str(versions["error"])
    named = [f"{name} {versions[name]}" for name in ("syncengine", "torch", "mpi4py") if name in versions]
    if build:
        named[0] += f" (build {build})"
    return ", ".join([*named, f"Python {versions['python']}"])


def _cpus(facts: Facts) -> str:
    cpus, kernels = facts["cpus"], facts["extension"].get("instruction_set")
    if "error" in cpus:
        return str(cpus["error"])
    text = f"{cpus['available']} of {cpus['of_machine']}, {cpus['threads']} thread{'' if cpus['threads'] == 1 else 's'}"
    return f"{text}, kernels {kernels}" if kernels else text


def _gpus(facts: Facts) -> str:
    cuda = facts["cuda"]
    if "error" in cuda:
        return str(cuda["error"])
    if cuda["version"] is None:
        return "torch without CUDA"
    built = "built with CUDA" if facts["extension"].get("has_cuda") else "built without CUDA"
    return f"torch with CUDA {cuda['version']}, {len(cuda['devices'])} devices; syncengine {built}"


def _settings(facts: Facts) -> str:
    given = [f"{name}={value}" for name, value in facts["variables"].items() if not name.startswith("MASTER_")]
    return ", ".join(given) or "none set"


def _deaths(facts: Facts) -> str:
    ways = facts["extension"].get("death_notices")
    return "" if ways is None else f"noticed by {' and '.join(ways) or 'deadlines alone'}"


def _memory(facts: Facts) -> str:
    memory, parts = facts["memory"], []
    if "available" in memory:
        parts.append(f"{size_text(memory['available'])} available of {size_text(memory['total'])}")
    if memory.get("address_space"):
        parts.append(f"ulimit -v {size_text(memory['address_space'])}")
    return "; ".join(parts)


def _descriptors(facts: Facts) -> str:
    found = facts["descriptors"]
    return f"{found.get('open', '?')} open, ulimit -n {found.get('limit', '?')}"


_ROWS: tuple[tuple[str, Callable[[Facts], str]], ...] = (
    ("versions", _versions),
    ("extension", lambda facts: str(facts["extension"].get("file", ""))),
    ("CPUs", _cpus),
    ("GPUs", _gpus),
    ("variables", _settings),
    ("deaths", _deaths),
)
_HOST_ROWS: tuple[tuple[str, Callable[[Facts], str]], ...] = (
    ("memory", _memory),
    ("descriptors", _descriptors),
    ("interfaces", lambda facts: ", ".join(map(" ".join, facts["extension"].get("interfaces", [])))),
)


def _self_test(outcomes: dict[int, Any]) -> str:
    if not outcomes:
        return "not run: see the findings"
    if any("error" in outcome or outcome["wrong"] for outcome in outcomes.values()):
        return "failed: see the findings"
    first = next(iter(outcomes.values()))
    links = f"; between hosts: {first['links']}" if first["links"] else ""
    if len(outcomes) == 1:
        return f"passed: {first['collectives']} collectives of one rank, which cross no process"
    return (
        f"passed: {first['collectives']} collectives in {first['seconds']:.1f} s, every result verified; barrier "
        f"{first['barrier_us']:.1f} us, all-reduce of {size_text(first['all_reduce_bytes'])} "
        f"{first['all_reduce_us']:.0f} us{links}"
    )
