"""CONTRIBUTING.md has the parts of `make nightly`, and their minutes."""

from __future__ import annotations

import re
import sys

from repository import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from nightly import PARTS


def test_the_table_of_parts_is_the_scripts():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("### Each night")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", table, re.MULTILINE)
    assert rows == [(name, str(part.minutes)) for name, part in PARTS.items()]
    assert sum(part.minutes for part in PARTS.values()) <= 150
