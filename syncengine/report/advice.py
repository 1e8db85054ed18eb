"""What to try, with the gain that a trace lets expect, and what has changed between two traces."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from syncengine.report.analysis import Analysis
from syncengine.report.steps import PHASE_NAMES, ms_text, size_text
from syncengine.tracing import Phase


@dataclass(frozen=True)
class Advice:
    """Something to try."""

    text: str
    gain: float  # of a step, estimated
    percent: float


def advise(of: Analysis) -> list[Advice]:
    """What to try, most gain first. Each says what its estimate assumes."""
    if not of.steps:
        return []
    found: list[tuple[str, float]] = []
    if of.late is not None:
        what = {
            Phase.INPUT: "give it more DataLoader workers, prefetch, or put its data where the others have theirs",
            Phase.FORWARD: "deal batches by their length, or take what else runs off its processor",
            Phase.BACKWARD: "deal batches by their length, or take what else runs off its processor",
            Phase.OPTIMIZER: "do on all ranks in turn, or beside training, what it does between steps",
        }[of.late.phase]
        found.append((f"Make rank {of.late.rank} as fast as the others: {what}.", of.late.ms))
    worst = max(of.overlap.values(), key=lambda o: o.exposed, default=None)
    if worst is not None:
        if worst.exposed > worst.least_exposed:
            found.append(
                (
                    "Leave the engine a processor core beside each rank's own threads (OMP_NUM_THREADS, or fewer ranks "
                    "a host): with these buckets, more of the reductions could be hidden behind backward.",
                    worst.exposed - worst.least_exposed,
                )
            )
        last = of.buckets[0].bytes if of.buckets else 0
        if last > 1 << 20 and of.reduced_bytes:
            rest = worst.reducing * (1 << 20) / of.reduced_bytes
            found.append(
                (
                    f"Take smaller buckets (bucket_cap_mb=1): the last one, of {size_text(last)}, can begin only when "
                    "backward has ended.",
                    worst.least_exposed - rest,
                )
            )
        found.append(
            (
                "Send gradients in 16 bits (model.register_comm_hook(None, syncengine.hooks.bf16_compress)): half the "
                "bytes, but the averages are rounded.",
                worst.exposed / 2,
            )
        )
        found.append(
            (
                "Synchronize every second backward (no_sync() in the other one): a batch twice as large, half the "
                "synchronization.",
                worst.exposed / 2,
            )
        )
    optimizer = max(phases[Phase.OPTIMIZER] for phases in of.phases.values())
    ranks = len(of.phases)
    if ranks > 1:
        found.append(
            (
                f"Let each rank update one part of the parameters (syncengine.ShardedOptimizer): 1/{ranks} of the "
                "optimizer's work, if the ranks share a host.",
                optimizer * (1 - 1 / ranks),
            )
        )
    staged = sum(size for reason, size in of.copies.items() if reason.startswith("staged"))
    if staged and worst is not None and of.reduced_bytes:
        found.append(
            (
                "Let gradients lie where all ranks reach them (docs/memory.md says what keeps them out): these are "
                f"copied, {size_text(staged)} a step.",
                min(worst.exposed, worst.reducing * staged / of.reduced_bytes / 2),
            )
        )
    advice = [Advice(text, gain, 100 * gain / of.step_ms) for text, gain in found]
    return sorted((one for one in advice if one.percent >= 1), key=lambda one: -one.gain)


@dataclass(frozen=True)
class Change:
    """One number of two traces."""

    what: str
    before: float
    after: float
    unit: str  # "ms", "%", "bytes"

    @property
    def ratio(self) -> float:
        """How much more it is; 0.1 is a tenth more."""
        return (self.after - self.before) / self.before if self.before else 0.0


def changes(before: Analysis, after: Analysis) -> list[Change]:
    """What has changed between two traces, the step first."""

    def phase(of: Analysis, which: Phase) -> float:
        return max((phases[which] for phases in of.phases.values()), default=0.0)

    def exposed(of: Analysis) -> float:
        return max((o.exposed for o in of.overlap.values()), default=0.0)

    def hidden(of: Analysis) -> float:
        return 100 * min((o.achieved for o in of.overlap.values()), default=1.0)

    made = [Change("a step", before.step_ms, after.step_ms, "ms")]
    made += [Change(PHASE_NAMES[p], phase(before, p), phase(after, p), "ms") for p in Phase]
    made += [
        Change("synchronization that nothing hides", exposed(before), exposed(after), "ms"),
        Change("of the reductions hidden", hidden(before), hidden(after), "%"),
        Change("the latest rank's lateness", _latest(before), _latest(after), "ms"),
        Change("reduced a step", before.reduced_bytes, after.reduced_bytes, "bytes"),
        Change("copied a step", sum(before.copies.values()), sum(after.copies.values()), "bytes"),
    ]
    return made


def compare_verdict(before: Analysis, after: Analysis) -> str:
    """One sentence about what has become of a step."""
    if not before.steps or not after.steps:
        return "One of the traces has no step that all of its ranks have recorded."
    step, *others = changes(before, after)
    if abs(step.ratio) < 0.02:
        return f"A step takes as long as before: {ms_text(step.before)}, then {ms_text(step.after)}."
    phases = [c for c in others if c.unit == "ms"][: len(Phase)]
    moved = max(phases, key=lambda c: (c.after - c.before) * (1 if step.ratio > 0 else -1))
    much = f"{100 * abs(step.ratio):.0f} % {'longer' if step.ratio > 0 else 'less'}"
    times = f"{ms_text(step.before)}, then {ms_text(step.after)}"
    return f"A step takes {much} than before ({times}), mostly in {moved.what}: " + (
        f"{ms_text(moved.before)}, then {ms_text(moved.after)}."
    )


def _latest(of: Analysis) -> float:
    return max((median(late) for late in of.lateness.values() if late), default=0.0)
