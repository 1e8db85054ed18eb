"""The README's figures are those of benchmarks/results."""

from benchmarks import readme


def test_tables_are_what_the_results_say():
    text = readme.README.read_text()
    assert readme.fill(text) == text, "run `python -m benchmarks.readme`"


def test_a_changed_figure_is_noticed(tmp_path, monkeypatch, capsys):
    text = readme.README.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| 25 MiB"))
    changed = tmp_path / "README.md"
    changed.write_text(text.replace(row, row.replace("25 MiB | ", "25 MiB | 1", 1)))
    monkeypatch.setattr(readme, "README", changed)
    assert readme.main(["--check"]) == 1
    assert "benchmarks.readme" in capsys.readouterr().err
    assert readme.main([]) == 0
    assert changed.read_text() == text
