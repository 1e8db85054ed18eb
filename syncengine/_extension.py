"""The first module that the package imports: if the compiled extension is missing or can't be loaded, it says what to
do.
"""

import importlib.metadata
import importlib.util
from pathlib import Path


def check_extension() -> None:
    """Raises ``ModuleNotFoundError``, with where Python looks for it and what to do, if the extension is missing;
    ``ImportError``, if it can't be loaded. torch has been imported.
    """
    found = importlib.util.find_spec("syncengine._C")
    if found is not None:
        try:
            importlib.import_module("syncengine._C")
        except ImportError as error:
            raise ImportError(
                f"{found.origin} can't be loaded: {error}. It was built against another PyTorch than the one here "
                f"({importlib.metadata.version('torch')}), or is damaged: install syncengine again, with "
                "--no-build-isolation",
                name="syncengine._C",
            ) from error
        return
    package = Path(__file__).resolve().parent
    others = sorted(path.name for path in package.glob("_C.*.so"))
    if others:
        advice = f"{package / others[0]} is for another Python: install syncengine again, with this one"
    elif (package.parent / "pyproject.toml").exists():
        advice = (
            f"{package.parent} is the source folder, and Python looks there first: leave it, to import the syncengine "
            "that is installed, or build the extension in it with `make build`"
        )
    else:
        advice = f"{package} is not complete: install syncengine again"
    raise ModuleNotFoundError(f"No module named 'syncengine._C': {advice}", name="syncengine._C")


check_extension()
