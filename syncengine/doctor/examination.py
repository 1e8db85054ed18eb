"""The course of an examination: facts, the ranks' meeting, checks, the self-test, one report."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from syncengine.doctor.checks import FATAL, WARNING, Finding, by_host, find_all, missing_ranks, split_remedy
from syncengine.errors import name_ranks


def examine(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Examines the ranks of this launch. Returns the exit code: see __init__.py."""
    try:
        import torch.distributed  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library of torch's
        return _without_torch(options, error)
    from syncengine.errors import SyncError
    from syncengine.launch import Launch, find_launch
    from syncengine.launch.local import check_ranks, run_local_ranks

    findings: list[Finding] = []
    try:
        launch = find_launch()
        if launch.kind == "single" and options.ranks is not None:
            return run_local_ranks(options.ranks, arguments)
        check_ranks(options.ranks, launch)
    except SyncError as error:
        what, remedy = split_remedy(str(error))
        findings.append(Finding("launch", FATAL, [], what, remedy))
        launch = Launch("unknown", 0, 1)
    return _examine_rank(options, launch, findings)


def _examine_rank(options: argparse.Namespace, launch: Any, findings: list[Finding]) -> int:
    from syncengine.doctor.facts import collect_facts
    from syncengine.doctor.meeting import Meeting
    from syncengine.doctor.report import print_report

    facts = collect_facts(launch, getattr(options, "import_error", ""))
    meeting = Meeting(launch, options.timeout)
    come = meeting.gather(facts)
    everyone = list(come.words.values())
    missing = come.missing(launch.world_size)
    findings += find_all(everyone, [missing_ranks(missing, come.error)] if missing else [])
    outcomes: dict[int, Any] = {}
    if not any(finding.severity == FATAL for finding in findings):  # the same on all ranks
        told = meeting.gather(_self_test(options.timeout))
        outcomes = told.words
        findings += _failures(outcomes, told.missing(launch.world_size), several_hosts=len(by_host(everyone)) > 1)
    code = 0  # also of ranks that do not report, so that a launcher reports one failure
    if launch.rank == min(come.words):
        severities = {finding.severity for finding in findings}
        code = 2 if FATAL in severities else 1 if WARNING in severities else 0
        starter = "itself" if options.ranks is not None else ""
        print_report(everyone, outcomes, findings, code, launch, starter, options.json)
    meeting.leave()
    return code


def _self_test(timeout: float) -> dict[str, Any]:
    from syncengine.doctor.self_test import run_self_test

    try:
        return run_self_test(timeout)
    except Exception as error:  # whatever it is, the others are told
        return {"error": str(error), "kind": type(error).__name__}


_REMEDIES = {
    "PeerLost": "see what that rank said before it ended",
    "Timeout": "see what those ranks are doing",
    "Aborted": "mend what that rank names",
}
_PORTS = "open all ports between the hosts, in both directions, or name the network by SYNCENGINE_INTERFACE"


def _failures(outcomes: dict[int, Any], missing: set[int], several_hosts: bool) -> list[Finding]:
    found = []
    errors: dict[tuple[str, str], list[int]] = {}
    for rank, outcome in outcomes.items():
        if "error" in outcome:
            errors.setdefault((outcome["kind"], outcome["error"]), []).append(rank)
        elif outcome["wrong"]:
            text = ", ".join(f"{count} of {name}" for name, count in outcome["wrong"].items())
            remedy = "test this host's memory and network; on healthy ones it is a bug of syncengine: report it"
            found.append(Finding("wrong results", FATAL, [rank], f"rank {rank} got wrong elements: {text}", remedy))
    for (kind, error), ranks in errors.items():
        what, remedy = (error, _REMEDIES[kind]) if kind in _REMEDIES else split_remedy(error)
        if several_hosts and kind in ("Timeout", "PeerLost"):
            remedy = _PORTS
        found.append(Finding("self-test", FATAL, ranks, f"{name_ranks(ranks)}: {kind}: {what}", remedy))
    if missing:
        text = f"{name_ranks(missing)} did not come back from the self-test"
        found.append(Finding("self-test", FATAL, sorted(missing), text, _REMEDIES["PeerLost"]))
    return found


def _without_torch(options: argparse.Namespace, error: Exception) -> int:
    finding = Finding("torch", FATAL, [], f"PyTorch can't be imported: {error}", "install PyTorch: pip install torch")
    if options.json:
        print(json.dumps({"status": "can't run", "exit_code": 2, "findings": [asdict(finding)]}))
    else:
        print(f"syncengine doctor, {sys.executable}\n\n1. {finding.text}\n   {finding.remedy}", flush=True)
    return 2
