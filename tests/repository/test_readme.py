"""The figures in the README and in docs/sharding.md are those of benchmarks/results."""

import pytest

from benchmarks import readme


@pytest.mark.parametrize("document", [readme.README, readme.SHARDING], ids=lambda path: path.name)
def test_tables_are_what_the_results_say(document):
    text = document.read_text()
    assert "<!-- measured:sharded" in text
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
