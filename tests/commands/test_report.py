"""`syncengine report`: who is late, what nothing hides, what to try; and the page of it."""

import base64
import contextlib
import dataclasses
import json
import math
import re
import shutil
import subprocess
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from command import alone
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import MODEL, MS, Job, make
from marks import mostly_nightly
from pool import RankPool
from torch import nn

import syncengine
from syncengine.errors import NotFinite
from syncengine.report.advice import advise, changes, compare_verdict
from syncengine.report.analysis import Analysis, analyze, finish
from syncengine.report.page import page_of
from syncengine.stragglers import PHASES
from syncengine.tracing import Event, Kind, Phase, Trace

SECTIONS = ("verdict", "time", "overlap", "buckets", "copies", "try")


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    world=st.sampled_from([2, 3, 4]),
    who=st.integers(0, 3),
    phase=st.sampled_from(PHASES),
    ms=st.floats(6, 200),
    share=st.floats(0.86, 1.0),
    noise=st.floats(0, 0.5),
    seed=st.integers(0, 1000),
)
def test_a_delay_is_named_with_rank_phase_and_time(
    world: int, who: int, phase: str, ms: float, share: float, noise: float, seed: int
):
    who %= world
    steps = 40
    delayed = {s for s in range(1, steps + 1) if (s * 7919 + seed) % steps < share * steps}

    def delay(rank: int, of: Phase, step: int) -> float:
        jitter = noise * ((rank * 31 + of * 17 + step * 13 + seed) % 10) / 10
        return jitter + (ms if (rank, of) == (who, Phase[phase.upper()]) and step in delayed else 0.0)

    late = analyze(make(Job(ranks=world, steps=steps, delay=delay))).late
    assert late is not None
    assert (late["rank"], late["phase"]) == (who, phase)
    assert abs(late["late_ms"] - ms) <= 4 * noise + 0.01  # of four phases, each
    assert abs(late["late_percent"] - 100 * len(delayed - {1}) / (steps - 1)) < 0.01


@settings(max_examples=60, deadline=None)
@given(world=st.sampled_from([1, 2, 4]), noise=st.floats(0, 0.7), seed=st.integers(0, 1000), spikes=st.integers(0, 8))
def test_without_one_nobody_is_named(world: int, noise: float, seed: int, spikes: int):
    """Not for noise, nor for a few slow steps."""

    def delay(rank: int, of: Phase, step: int) -> float:
        jitter = noise * ((rank * 31 + of * 17 + step * 13 + seed) % 10) / 10
        return jitter + (50.0 if (rank, of) == (0, Phase.INPUT) and step <= spikes else 0.0)

    analysis = analyze(make(Job(ranks=world, delay=delay)))
    assert analysis.late is None
    assert analysis.verdict.startswith("No rank is late")


def test_who_waits_for_somebody_is_not_late():
    """Within a forward that ranks make together (SyncBatchNorm), all are as slow as the slowest."""
    trace = make(Job(delay=lambda rank, phase, step: 30.0 if phase == Phase.FORWARD else 0.0))
    waits = [
        e._replace(detail=30 * MS) if e.kind == Kind.PHASE and e.lane == Phase.FORWARD else e
        for e in trace.ranks[0].events
    ]
    ranks = {0: dataclasses.replace(trace.ranks[0], events=waits), 1: trace.ranks[1]}
    late = analyze(dataclasses.replace(trace, ranks=ranks)).late
    assert late is not None
    assert (late["rank"], late["phase"], round(late["late_ms"])) == (1, "forward", 30)


def test_the_verdict_is_a_sentence():
    job = Job(ranks=4, steps=31, delay=lambda rank, phase, step: 41.0 if (rank, phase) == (1, Phase.INPUT) else 0.0)
    analysis = analyze(make(job))
    assert analysis.verdict == (
        "Rank 1 is late in 100 % of the steps, by 41 ms, before forward begins: look at its input (DataLoader workers, "
        "prefetching, where its data lies), at logging and checkpoints, and at hooks on gradients, such as an "
        "optimizer in backward."
    )
    first = advise(analysis)[0]
    assert first.text.startswith("Make rank 1 as fast as the others")
    assert first.gain == pytest.approx(41)
    as_json = json.loads(json.dumps(analysis.as_dict()))
    assert as_json["late"] == {"rank": 1, "phase": "input", "late_ms": pytest.approx(41), "late_percent": 100}
    assert as_json["ranks"]["1"]["phases_ms"]["input"] == pytest.approx(43)
    assert (as_json["steps"], as_json["model"]) == (30, MODEL)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=12), st.randoms())
def test_when_the_last_of_some_buckets_is_reduced(buckets: list[tuple[float, float]], random):
    """Against a loop over time, and whatever order they are given in."""
    at = min(ready for ready, _ in buckets)
    left = sorted(buckets)
    while left:
        ready, took = left.pop(0)
        at = max(at, ready)
        at += took
    shuffled = list(buckets)
    random.shuffle(shuffled)
    assert math.isclose(finish(*zip(*buckets, strict=True)), at)
    assert finish(*zip(*shuffled, strict=True)) >= max(ready + took for ready, took in buckets) - 1e-9


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.1, 15), min_size=1, max_size=6), st.floats(1, 40))
def test_what_nothing_hides(reductions: list[float], backward: float):
    """Balanced ranks whose engine takes each bucket at once achieve what is possible; the rest is what they wait."""
    analysis = analyze(make(Job(reductions=reductions, backward=backward)))
    ready = [backward * (i + 1) / len(reductions) for i in range(len(reductions))]
    exposed = finish(ready, reductions) - backward
    for overlap in analysis.overlap.values():
        assert overlap.reducing == pytest.approx(sum(reductions), abs=1e-4)
        assert overlap.exposed == pytest.approx(exposed, abs=1e-4)
        assert overlap.least_exposed == pytest.approx(exposed, abs=1e-4)
        assert overlap.achieved == pytest.approx(1 - exposed / sum(reductions), abs=1e-4)
    buckets = analysis.exposed_buckets
    assert buckets[0].ms > 0
    assert sum(bucket.ms for bucket in buckets) == pytest.approx(exposed, abs=1e-3)
    assert any(b.parameters == [f"layers.{b.index}.weight", f"layers.{b.index}.bias"] for b in buckets)
    assert analysis.reduced_bytes == len(reductions) * 4 << 20


def test_an_engine_that_begins_late_could_hide_more():
    analysis = analyze(make(Job(reductions=[2.0, 2.0, 2.0], backward=30.0, lazy=True)))
    for overlap in analysis.overlap.values():
        assert overlap.achieved == pytest.approx(0, abs=0.01)
        assert overlap.possible == pytest.approx(2 / 3, abs=0.01)
    gains = {advice.text.split()[0]: advice.gain for advice in advise(analysis)}
    assert gains["Leave"] == pytest.approx(4, abs=0.01)


def test_copies_are_those_of_a_step():
    analysis = analyze(make(Job(copies={"copied small": 1000, "staged elsewhere": 8 << 20})))
    assert analysis.copied_bytes == {"staged elsewhere": 8 << 20, "copied small": 1000}


def test_what_a_trace_has_not_and_what_went_wrong_is_said():
    trace = make(Job())
    wrong = Event(1, Kind.ERROR, 1, 1, 0, 0, 0, 0, 0, "rank 0 died")
    noted = Event(0, Kind.NOTE, 1, 1, 0, 0, 0, 0, 0, "nonfinite: rank 1 brought NaN into a.weight in step 3")
    ranks = {
        0: dataclasses.replace(trace.ranks[0], events=[noted, *trace.ranks[0].events], ended=False),
        1: dataclasses.replace(trace.ranks[1], events=[wrong, *trace.ranks[1].events], recorded=10_000),
    }
    analysis = analyze(Trace(ranks, 3, {0: 0.0, 1: 2e6}))
    assert set(analysis.went_wrong) == {wrong.text, noted.text}
    said = ". ".join(analysis.incomplete)
    for part in ("nothing of rank 2", "Rank 0 has not ended", "Rank 1 dropped its first", "aligned to 2000 us"):
        assert part in said
    page = page_of([analysis], [Path("t")])
    assert "rank 0 died" in page
    assert "brought NaN into a.weight" in page


def test_two_traces_say_what_has_changed():
    before = analyze(make(Job(reductions=[1.0, 1.0, 9.0])))
    after = analyze(make(Job(reductions=[1.0, 1.0, 1.0])))
    assert compare_verdict(before, after) == (
        "A step takes 18 % less than before (44 ms, then 36 ms), mostly in waiting for averages: 9 ms, then 1 ms."
    )
    assert compare_verdict(after, before).startswith("A step takes 22 % longer than before")
    assert compare_verdict(before, before).startswith("A step takes as long as before")
    by_name = {change.what: change for change in changes(before, after)}
    assert by_name["exposed synchronization"].before == pytest.approx(9)
    assert by_name["of the reductions hidden"].after == pytest.approx(100 * 2 / 3)


def test_who_is_late_now_and_what_is_not_the_same_is_in_the_headline():
    def slow(rank: int, phase: Phase, step: int) -> float:
        return 30.0 if (rank, phase) == (1, Phase.FORWARD) else 0.0

    before, after = analyze(make(Job())), analyze(make(Job(delay=slow)))
    assert compare_verdict(before, after).startswith("Rank 1 is late in 100 % of the steps, by 30 ms, in forward")
    for same in (compare_verdict(after, after), compare_verdict(after, before), compare_verdict(before, before)):
        assert same.startswith("A step takes ")
    more = analyze(make(Job(ranks=3)))
    assert compare_verdict(before, more).startswith(
        f"Not the same is compared: {MODEL} on 2 ranks, then {MODEL} on 3 ranks. A step takes as long as before"
    )
    other = dataclasses.replace(before, model="Parallel(Other)")
    assert compare_verdict(other, before).startswith("Not the same is compared: Parallel(Other) on 2 ranks, then ")


@pytest.mark.parametrize("late", [0.0, 30.0])
def test_without_a_ranks_trace_nobody_can_tell_who_is_late(late: float):
    job = Job(ranks=3, delay=lambda rank, phase, step: late if (rank, phase) == (2, Phase.BACKWARD) else 0.0)
    trace = make(job)
    del trace.ranks[2]
    verdict = analyze(trace).verdict
    assert verdict.startswith(
        "There is no trace of rank 2, so who is late can't be told. Exposed synchronization takes "
    )
    assert "No rank is late" not in verdict and "mostly" not in verdict


def test_ranks_that_wait_for_each_other_are_told_so():
    """Each of three ranks is late in every third step: none is late, and the first waits in most steps."""
    trace = make(Job(ranks=3, delay=lambda rank, phase, step: 20.0 * (phase == Phase.FORWARD and step % 3 == rank)))
    analysis = analyze(trace)
    waits = [e.end - e.begin for e in trace.ranks[0].events if (e.kind, e.lane) == (Kind.PHASE, Phase.WAIT)]
    assert analysis.exposed_ms == pytest.approx(median(waits[1:]) / MS)  # without the first step
    assert analysis.waiting_ms == pytest.approx(20, abs=2.5)
    assert re.match(
        r"No rank is late. Exposed .* of which ranks wait for each other (18|19|20|21) ms.", analysis.verdict
    )
    assert advise(analysis)[0].text.endswith("since they take turns.")


def test_pictures_of_two_traces_have_the_same_axes(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    from syncengine.report import pictures

    ends = []
    monkeypatch.setattr(pictures, "_draw_one", lambda title, axis, rows, until: ends.append((title, until)) or "")
    drawn = pictures.draw([analyze(make(Job())), analyze(make(Job(backward=200.0))), analyze(make(Job(steps=0)))])
    assert [len(each) for each in drawn] == [2, 2, 0]
    assert len(ends) == 4 and len(set(ends)) == 2
    assert min(until for _, until in ends) > 200


def test_nothing_recorded_is_said_too():
    trace = make(Job(steps=0))
    analysis = analyze(trace)
    assert analysis.verdict.startswith("There is no step")
    assert set(SECTIONS) <= set(re.findall(r'section id="([a-z]+)"', page_of([analysis], [Path("t")])))


class Outline(HTMLParser):
    """Ids, pictures, and whether all elements are closed."""

    VOID = ("meta", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.open: list[str] = []
        self.pictures: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        self.pictures += [given["src"]] if tag == "img" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def check_page(page: str) -> Outline:
    """Needs nothing else, and is in order."""
    outline = Outline()
    outline.feed(page)
    assert not outline.open
    assert len(set(outline.ids)) == len(outline.ids)
    assert not re.search(r'(src|href)="(?!data:)', page)
    for picture in outline.pictures:
        kind, _, data = picture.partition(",")
        svg = base64.b64decode(data)
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(rb'href="(?!#)', svg)
    assert "<script" not in page
    return outline


def example() -> Analysis:
    job = Job(
        ranks=4,
        reductions=[1.0, 2.0, 6.0],
        delay=lambda rank, phase, step: 5.0 if (rank, phase) == (1, Phase.INPUT) else 0.3 * ((rank + step) % 3),
        copies={"copied small": 9000, "staged elsewhere": 4 << 20},
    )
    return analyze(make(job))


@pytest.mark.thorough
def test_the_page_is_whole():
    pytest.importorskip("matplotlib")
    one = example()
    outline = check_page(page_of([one], [Path("traces/a <b>")]))
    assert set(SECTIONS) <= set(outline.ids)
    assert len(outline.pictures) == 2
    two = check_page(page_of([one, analyze(make(Job()))], [Path("a"), Path("b")]))
    assert {"changes", *(f"{section}-{half}" for section in SECTIONS for half in ("before", "after"))} <= set(two.ids)


def train(directory: str, who: int, where: str, delay: float) -> None:
    """Rank `who` sleeps in one phase of each step that is traced."""
    torch.set_num_threads(1)

    def sleep_in(place: str) -> None:
        if (syncengine.rank(), where) == (who, place):
            time.sleep(delay)

    class Sleepy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sleep_in("forward")
            y = super().forward(x)
            y.register_hook(lambda _: sleep_in("backward"))
            return y

    model = syncengine.Parallel(nn.Sequential(nn.Linear(100, 100), Sleepy(100, 100), nn.Linear(100, 100)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: sleep_in("optimizer"))
    with syncengine.trace(directory):
        for _ in range(12):
            sleep_in("input")
            optimizer.zero_grad()
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()


@pytest.mark.alone
@pytest.mark.thorough
@pytest.mark.parametrize("where", mostly_nightly(["input", "forward", "backward", "optimizer"], 0))
def test_a_delay_in_a_run_is_named(pool: RankPool, programs: RankPool, tmp_path: Path, where: str):
    """By the command, as users run it."""
    delay = 0.3  # of a step of some milliseconds: the machine's noise is less
    pool.run(train, str(tmp_path), 1, where, delay, world=2)
    done = alone(programs, "report", "--json", str(tmp_path))
    said = json.loads(done.stdout)
    assert (done.returncode, said["late"]["rank"], said["late"]["phase"]) == (0, 1, where)
    assert said["late"]["late_ms"] > 0.8 * 1000 * delay
    assert (said["model"], said["went_wrong"], said["incomplete"]) == ("Parallel(Sequential)", [], [])
    assert said["reduced_bytes"] == 3 * (100 * 100 + 100) * 4


@pytest.mark.nightly
def test_the_command_writes_pages(pool: RankPool, programs: RankPool, tmp_path: Path):
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        pool.run(train, str(tmp_path / name), 0, "", 0.0)
    one = alone(programs, "report", str(tmp_path / "a"))
    two = alone(programs, "report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "two.html"))
    assert (one.returncode, two.returncode) == (0, 0)
    verdict, path = one.stdout.splitlines()
    assert path == str(tmp_path / "a" / "report.html")
    page = Path(path).read_text()
    check_page(page)
    assert verdict in unescape(page)
    check_page((tmp_path / "two.html").read_text())
    alone(programs, "report", str(tmp_path / "b"), str(tmp_path / "a"))
    assert Path(path).read_text() == page
    check_page((tmp_path / "a" / "compared.html").read_text())


def train_with_nan(directory: str) -> None:
    model = syncengine.Parallel(nn.Linear(3, 3), nonfinite="raise")
    with syncengine.trace(directory):
        for i in range(3):
            model.zero_grad()
            x = torch.ones(2, 3) * (float("nan") if (i, syncengine.rank()) == (1, 1) else 1.0)
            with contextlib.suppress(NotFinite):
                model(x).sum().backward()


@pytest.mark.thorough
def test_who_has_brought_nan_is_on_the_page(pool: RankPool, programs: RankPool, tmp_path: Path):
    pool.run(train_with_nan, str(tmp_path))
    said = json.loads(alone(programs, "report", "--json", str(tmp_path)).stdout)
    (text,) = said["went_wrong"]
    assert text.startswith("nonfinite: rank 1 brought NaN into weight in step 2 of Parallel(Linear): ")


def test_without_a_trace_the_command_says_so(programs: RankPool, tmp_path: Path):
    folder = str(tmp_path)
    for folders, text in (([folder], "there is no trace in"), ([f"{folder}/nowhere"], ""), ([folder] * 3, "")):
        done = alone(programs, "report", *folders)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("syncengine report: ") and text in done.stderr


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs chromium (Debian: chromium, fonts-dejavu-core)")

_MEASURE = """<script>addEventListener("load", () => {
  const height = box => box.getBoundingClientRect().height;
  const sections = [...document.querySelectorAll("section")].map(section => [section.id, height(section)]);
  const letters = [...document.querySelectorAll("td, th, li")].map(height);
  const scales = [...document.querySelectorAll("img")].map(image => image.clientWidth / image.naturalWidth);
  parent.postMessage(JSON.stringify({width: document.documentElement.scrollWidth, sections, letters, scales}), "*");
});</script></body>"""


def opened(page: str, width: int, directory: Path) -> tuple[dict[str, Any], list[str]]:
    """What Chromium makes of a page of this width, in pixels, and what it writes to the console.

    In a frame, since windows have at least 500 pixels.
    """
    (directory / "page.html").write_text(page.replace("</body>", _MEASURE), encoding="utf-8")
    frame = directory / "frame.html"
    frame.write_text(
        "<body><script>onmessage = event => { document.body.dataset.measured = event.data; };</script>"
        f'<iframe src="page.html" style="width: {width}px; height: 3000px; border: 0"></iframe></body>'
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--user-data-dir={directory}/profile", "--window-size=1400,900", "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    measured = re.search(r"data-measured=\"([^\"]*)\"", done.stdout)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(measured[1])) if measured else {}, console


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("count", [1, 2])
def test_the_page_in_a_browser(width: int, count: int, tmp_path: Path):
    pytest.importorskip("matplotlib")
    one = example()
    page = page_of([one] * count, [Path("a"), Path("b")][:count])
    measured, console = opened(page, width, tmp_path)
    assert not console
    assert measured["width"] == width  # nothing to be scrolled to sideways
    heights = dict(measured["sections"])
    wanted = SECTIONS if count == 1 else [f"{s}-{half}" for s in SECTIONS for half in ("before", "after")]
    assert set(wanted) <= set(heights)
    assert all(heights[section] > 40 for section in wanted)
    assert len(measured["letters"]) > 50 * count
    assert min(measured["letters"]) > 9  # pixels, of a line of the smallest ones
    assert len(measured["scales"]) == 2 * count
    assert min(measured["scales"]) * 8.5 * 96 / 72 > 9  # the pictures' smallest letters, of 8.5 points


@needs_chromium
def test_an_error_in_the_console_would_be_seen(tmp_path: Path):
    _, console = opened("<html><body><script>nosuch()</script></body></html>", 800, tmp_path)
    assert any("nosuch is not defined" in line for line in console)
