"""The figures of the README and of docs/ are those of benchmarks/results, measured at commits of main."""

import json
import re

import pytest

from benchmarks import figures, readme

DOCUMENTS = readme.DOCUMENTS
COMMITS = {
    (path.name, commit)
    for path in DOCUMENTS
    for commit in re.findall(r"\b[0-9a-f]{12}\b", "".join(re.findall(r"Measured\s+at[^.]*\.", path.read_text())))
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_what_the_results_say(document):
    text = document.read_text()
    assert "<!-- measured:" in text
    assert readme.fill(text) == text, "run `python -m benchmarks.readme`"


def test_a_changed_figure_is_noticed(tmp_path, monkeypatch, capsys):
    text = readme.FIGURES.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| 25 MiB"))
    changed = tmp_path / "results.md"
    changed.write_text(text.replace(row, row.replace("25 MiB | ", "25 MiB | 1", 1)))
    monkeypatch.setattr(readme, "DOCUMENTS", (changed,))
    assert readme.main(["--check"]) == 1
    assert "benchmarks.readme" in capsys.readouterr().err
    readme.main([])
    assert changed.read_text() == text


@pytest.mark.parametrize(("document", "commit"), sorted(COMMITS))
def test_tables_name_commits_of_main(document, commit):
    if not readme.knows_history():
        pytest.skip("a shallow clone, or no git: nobody knows the ancestors of this commit")
    readme.check_commit(commit, document)


def test_there_are_tables_with_commits():
    assert {name for name, _ in COMMITS} >= {"README.md", "results.md", "numerics.md"}


@pytest.mark.parametrize(
    ("commit", "why"), [("6c8f53c3e804-dirty", "not committed"), ("cde4d2c6dca9", "none of main"), ("", "no commit")]
)
def test_a_result_of_no_commit_of_main_is_refused(commit, why, tmp_path, monkeypatch):
    if not (readme.knows_history() or commit.endswith("-dirty")):
        pytest.skip("a shallow clone, or no git: any commit will do")
    document = readme.load("micro_batches-4ranks")
    (tmp_path / "micro_batches-4ranks.json").write_text(json.dumps({**document, "commit": commit}))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    with pytest.raises(readme.RefusedError, match=why):
        readme.load("micro_batches-4ranks")
    monkeypatch.setattr(readme, "refused", [])
    text = readme.fill("<!-- measured:micro_batches -->\n<!-- /measured:micro_batches -->\n")
    assert "Not measured" in text
    assert len(readme.refused) == 1


def test_figures_are_refused_on_a_busy_machine(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text("cpu 10 0 10 80 0 0 0 0 0 0\n")
    monkeypatch.setattr(figures.time, "sleep", lambda _: stat.write_text("cpu 16 0 10 170 4 0 0 0 0 0\n"))
    assert figures.others(stat, 0) == pytest.approx(0.06)
    monkeypatch.setattr(figures, "commit", lambda: "6c8f53c3e804")
    monkeypatch.setattr(figures, "others", lambda: 0.06)
    with pytest.raises(SystemExit, match=r"other processes use 6% of the processors' time, and 5% are allowed"):
        figures.main([])
    monkeypatch.setattr(figures, "commit", lambda: "6c8f53c3e804-dirty")
    with pytest.raises(SystemExit, match="not committed"):
        figures.main([])


def test_every_table_is_measured_by_make_figures(capsys):
    measured = {name for name, _, _ in figures.COMMANDS}
    assert measured == {name.split("-")[0] for name in readme.used()} | {"sharded_memory"}
    assert sum(minutes for _, _, minutes in figures.COMMANDS) * 60 <= figures.LIMIT
    assert figures.main(["--ages"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(readme.used())


def test_the_readme_is_short():
    assert len(readme.README.read_text().splitlines()) <= 150
