"""A private function of the package has a caller, or overrides a function of torch or of a framework."""

import ast
import re
from collections import Counter

import torch.distributed as dist
from repository import ROOT
from torch.nn.parallel import DistributedDataParallel

# Modules whose classes extend those of a framework, which need not be installed here.
OF_FRAMEWORKS = {"_lightning.py", "torchft.py"}


def uncalled(texts: dict[str, str]) -> list[str]:
    """Private functions whose name occurs only where each is defined."""
    words = Counter(word for text in texts.values() for word in re.findall(r"\w+", text))
    found = []
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and re.match("_[^_]", node.name) and words[node.name] == 1:
                found.append(f"{name}: {node.name}")
    return found


def test_private_functions_have_callers():
    package = ROOT / "syncengine"
    texts = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    overridden = {*dir(DistributedDataParallel), *dir(dist.Reducer)}
    found = [one for one in uncalled(texts) if one.split(": ")[1] not in overridden]
    assert [one for one in found if one.split(":")[0] not in OF_FRAMEWORKS] == []


def test_a_function_that_nobody_calls_is_found():
    texts = {"a.py": "class A:\n  def _pack(self): ...\n  def _keep(self): self._keep()\n", "b.py": "def _other(): ..."}
    assert uncalled(texts) == ["a.py: _pack", "b.py: _other"]
