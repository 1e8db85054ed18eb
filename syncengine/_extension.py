"""The first module that the package imports: this module loads the extension for this torch as ``syncengine._C``.

The version of torch decides which file that is, before anything is loaded. No extension for another minor release is
ever tried: the file might load, and then calls other functions of torch than it means to. An import compiles nothing.
"""

import importlib.util
import sys

import torch

from syncengine import _build


def load_extension() -> None:
    """Imports the compiled extension as ``syncengine._C``.

    Raises ``ImportError`` if it can't be loaded: the error says where it is, and what to do. Raises
    ``ModuleNotFoundError`` if there is none for this torch.
    """
    if "syncengine._C" in sys.modules:  # a test has put its own there
        return
    version = str(torch.__version__)
    path, remedy = _build.packaged(version), "install syncengine-torch again, for this torch"
    if is_own := not path.exists():
        own = _build.own(version)
        if own is None or not own.exists():
            raise ModuleNotFoundError(f"No module named 'syncengine._C': {_advice(version)}", name="syncengine._C")
        path, remedy = own, f"remove {own.parent} and run `python -m syncengine build`"
    try:
        if is_own:
            _build.check_owner(path.parent)
        spec = importlib.util.spec_from_file_location("syncengine._C", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["syncengine._C"] = module
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        sys.modules.pop("syncengine._C", None)
        raise ImportError(
            f"syncengine's extension {path} can't be loaded: {error}. It was built for {path.parent.name}, and this is "
            f"torch {version}: {remedy}",
            name="syncengine._C",
            path=str(path),
        ) from error
    sys.modules["syncengine"]._C = module  # type: ignore[attr-defined] # as an import does


def _advice(version: str) -> str:
    folder = _build.BUILT.parent
    found = sorted(_build.BUILT.glob("*/_C.*.so"))
    here = [path.parent.name for path in found if path.name == _build.NAME]
    if (folder.parent / "pyproject.toml").exists():
        return (
            f"{folder.parent} is the source folder, and Python looks there first: leave it, to import the syncengine "
            f"that is installed, or build the extension in it for torch {version} with `make build`"
        )
    if here and _build.own(version) is not None:
        return (
            f"this is torch {version}, and syncengine has been built for {', '.join(here)}: compile it for this one, "
            "once, by `python -m syncengine build`, which needs g++ and some minutes"
        )
    if found and not here:
        return f"{found[0]} is for another Python: install syncengine-torch again, with this one"
    return f"{folder} has no extension for torch {version}: install syncengine-torch again"


load_extension()
