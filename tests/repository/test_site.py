"""The site of the documentation: every page is in the navigation, and every public name on a page."""

import inspect
import re
import subprocess

import pytest
from repository import ROOT

import syncengine

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
MKDOCS = ROOT / ".venv-site" / "bin" / "mkdocs"


def public_names() -> set[str]:
    """Names of __all__, and the public methods and properties of those that are classes of the extension."""
    found = {f"syncengine.{name}" for name in syncengine.__all__}
    classes = [value for name in syncengine.__all__ if inspect.isclass(value := getattr(syncengine, name))]
    for of_extension in (each for each in classes if not inspect.isfunction(each.__init__)):
        members = (name for name in vars(of_extension) if not name.startswith("_"))
        found |= {f"syncengine.{of_extension.__name__}.{name}" for name in members}
    return found


def test_the_extensions_classes_are_looked_at():
    names = public_names()
    assert {"syncengine.Communicator.all_reduce", "syncengine.Work.wait", "syncengine.Parallel"} <= names
    assert "syncengine.Parallel.forward" not in names


def test_every_page_is_in_the_navigation_once():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert sorted(re.findall(r"[\w./-]+\.md", navigation)) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_no_link_leaves_the_site(page):
    depth = page.count("/")
    for target in re.findall(r"\]\(([^)#\s]+)", (DOCS / page).read_text()):
        assert target.startswith("https://") or target.count("../") <= depth, target


@pytest.mark.nightly
def test_every_public_name_is_on_the_site(tmp_path):
    if not MKDOCS.exists():
        pytest.skip("no .venv-site: `make docs` installs it")
    subprocess.run([MKDOCS, "build", "--strict", "--quiet", "--site-dir", tmp_path], cwd=ROOT, check=True)
    built = "".join(page.read_text() for page in tmp_path.glob("api*/index.html"))
    assert public_names() - set(re.findall(r'id="([\w.]+)"', built)) == set()


def test_messages_that_the_page_explains_exist():
    """Parts of messages in the first column of docs/messages.md are in the sources, or among the examples of errors."""
    sources = [
        path for folder in ("csrc", "syncengine", "syncengine_autoload") for path in (ROOT / folder).rglob("*.*")
    ]
    code = "".join(path.read_text() for path in sources if path.suffix in (".cpp", ".h", ".cu", ".py"))
    code = re.sub(r'"\s*f?"', "", code)  # a literal over several lines
    code += re.sub(r"\s+", " ", (DOCS / "errors.md").read_text())
    rows = re.findall(r"^\| (`[^|]*) \|", (DOCS / "messages.md").read_text(), re.MULTILINE)
    parts = {part for row in rows for text in re.findall(r"`([^`]+)`", row) for part in text.split(" ... ")}
    assert len(parts) > 30
    assert {part for part in parts if part.strip(" .") not in code} == set()
