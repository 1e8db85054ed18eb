"""The first module that the package imports: it says what to do if the extension is missing or can't be loaded."""

import importlib.util
from pathlib import Path

import torch


def check_extension() -> None:
    """Raises ``ImportError`` with where the extension is and what to do if it can't be loaded.

    If it is missing, that is a ``ModuleNotFoundError``.
    """
    found = importlib.util.find_spec("syncengine._C")
    if found is not None:
        try:
            importlib.import_module("syncengine._C")
        except (ImportError, OSError) as error:
            raise ImportError(
                f"syncengine's extension {found.origin} can't be loaded: {error}. It works only with the torch that it "
                f"was built with, and this is {torch.__version__}: install syncengine again with this one, by `pip "
                "install --no-build-isolation`",
                name="syncengine._C",
                path=found.origin,
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
