"""Advice on how to make a traced run faster, with the gain to expect; and the changes between two traces."""

from collections.abc import Iterator
from dataclasses import dataclass

from syncengine.report.analysis import PHASES_SHOWN, Analysis, ms_text
from syncengine.stragglers import WHERE


@dataclass(frozen=True)
class Advice:
    """A change to try, with the time of a step that it should save."""

    text: str
    gain: float  # of a step, estimated
    percent: float


def advise(of: Analysis) -> list[Advice]:
    """The changes to try that may gain a percent of a step or more, most gain first."""
    advice = [Advice(text, gain, 100 * gain / of.step_ms) for gain, text in sorted(_gains(of), reverse=True)]
    return [one for one in advice if one.percent >= 1]


def _gains(of: Analysis) -> Iterator[tuple[float, str]]:
    if of.late is None and of.steps:
        yield (
            of.waiting_ms,
            "Let ranks wait less for each other: give each as much to do, and take no more ranks (and threads, "
            "OMP_NUM_THREADS) on a host than it has processor cores, since they take turns.",
        )
    elif of.late is not None:
        remedy = WHERE[of.late["phase"]].partition(": ")[2]
        yield of.late["late_ms"], f"Make rank {of.late['rank']} as fast as the others: {remedy}."
    if of.overlap:
        worst = max(of.overlap.values(), key=lambda o: o.exposed)
        last = min(1.0, (1 << 20) / max(1, of.reduced_bytes)) * worst.reducing  # of a bucket of 1 MiB
        yield (
            worst.exposed - worst.least_exposed,
            "Leave the engine a processor core beside each rank's own threads (OMP_NUM_THREADS, or fewer ranks a "
            "host): with these buckets, more of the reductions could be hidden behind backward.",
        )
        yield (
            worst.least_exposed - last,
            "Take smaller buckets (bucket_cap_mb=1): the last one can begin only when backward has ended.",
        )
        yield (
            worst.exposed / 2,
            "Send gradients in 16 bits (model.register_comm_hook(None, syncengine.hooks.bf16_compress)): half the "
            "bytes, but the averages are rounded.",
        )
    if (ranks := len(of.ranks)) > 1:
        optimizer = max(of_rank.phases_ms["optimizer"] for of_rank in of.ranks.values())
        yield (
            optimizer * (1 - 1 / ranks),
            f"Let each rank update one part of the parameters (syncengine.ShardedOptimizer): 1/{ranks} of the "
            "optimizer's work, if the ranks share a host.",
        )


@dataclass(frozen=True)
class Change:
    """One number in two traces."""

    what: str
    before: float
    after: float
    unit: str  # "ms", "%", "bytes"

    @property
    def ratio(self) -> float:
        """How much larger the number is after than before: 0.1 is a tenth more."""
        return (self.after - self.before) / self.before if self.before else 0.0


def changes(before: Analysis, after: Analysis) -> list[Change]:
    """The changes between two traces, that of a step's time first."""

    def numbers(of: Analysis) -> dict[tuple[str, str], float]:
        ranks = of.ranks.values()
        return {
            ("a step", "ms"): of.step_ms,
            **{
                (shown, "ms"): max((of_rank.phases_ms[phase] for of_rank in ranks), default=0.0)
                for phase, shown in PHASES_SHOWN.items()
            },
            ("exposed synchronization", "ms"): of.exposed_ms,
            ("of the reductions hidden", "%"): 100 * min((o.achieved for o in of.overlap.values()), default=1.0),
            ("the latest rank's lateness", "ms"): max((of_rank.late_ms for of_rank in ranks), default=0.0),
            ("reduced a step", "bytes"): of.reduced_bytes,
            ("copied a step", "bytes"): sum(of.copied_bytes.values()),
        }

    then, now = numbers(before), numbers(after)
    return [Change(what, then[what, unit], now[what, unit], unit) for what, unit in then]


def compare_verdict(before: Analysis, after: Analysis) -> str:
    """Sentences: whether models or ranks differ in two traces, who is late now, and how a step's time has changed."""
    if not before.steps or not after.steps:
        return "One of the traces has no step that all of its ranks have recorded."
    said = ""
    if (before.model, before.ranks.keys()) != (after.model, after.ranks.keys()):
        models = [f"{of.model} on {len(of.ranks)} rank{'s' * (len(of.ranks) > 1)}" for of in (before, after)]
        said = f"Not the same is compared: {models[0]}, then {models[1]}. "
    if after.missing or (after.late and (before.late is None or before.late["rank"] != after.late["rank"])):
        said += f"{after.verdict} "
    step, *others = changes(before, after)
    if abs(step.ratio) < 0.02:
        return f"{said}A step takes as long as before: {ms_text(step.before)}, then {ms_text(step.after)}."
    phases = [change for change in others if change.what in PHASES_SHOWN.values()]
    moved = max(phases, key=lambda c: (c.after - c.before) * (1 if step.ratio > 0 else -1))
    much = f"{100 * abs(step.ratio):.0f} % {'longer' if step.ratio > 0 else 'less'}"
    times = f"{ms_text(step.before)}, then {ms_text(step.after)}"
    return f"{said}A step takes {much} than before ({times}), mostly in {moved.what}: " + (
        f"{ms_text(moved.before)}, then {ms_text(moved.after)}."
    )
