"""The type stubs syncengine/_C.pyi say what the built extension has: names, parameters, defaults."""

import ast
from typing import Any

from repository import ROOT

import syncengine._C as extension

STUB = ROOT / "syncengine" / "_C.pyi"

Signature = list[tuple[str, str | None]]  # (parameter, default as source), without self


def signature(function: ast.FunctionDef) -> Signature:
    parameters = [*function.args.posonlyargs, *function.args.args]
    defaults = [None] * (len(parameters) - len(function.args.defaults)) + [
        ast.unparse(default) for default in function.args.defaults
    ]
    return [(parameter.arg, default) for parameter, default in zip(parameters, defaults, strict=True)][
        bool(parameters and parameters[0].arg == "self") :
    ]


def built_signature(function: Any) -> Signature:
    """From the first line of pybind11's docstring, which is Python unless a type is unknown to it."""
    line = function.__doc__.splitlines()[0]
    return signature(ast.parse(f"def {line}: ...").body[0])


def in_stub(body: list[ast.stmt], variable: str = "attribute") -> dict[str, Any]:
    """Name to: a signature, "property", "attribute", or for a class the same of its body, whose variables are
    properties."""
    found: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = in_stub(node.body, "property")
        elif isinstance(node, ast.FunctionDef):
            is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
            found[node.name] = "property" if is_property else signature(node)
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = variable
    return found


def in_module(names: dict[str, Any]) -> dict[str, Any]:
    """The same of the built module."""
    found: dict[str, Any] = {}
    for name, value in names.items():
        if name.startswith("_") and not (name == "__init__" and value.__doc__.startswith(name)):
            continue
        if isinstance(value, type):
            found[name] = in_module(dict(vars(value)))
        elif isinstance(value, property):
            found[name] = "property"
        elif callable(value):
            found[name] = built_signature(value)
        else:
            found[name] = "attribute"
    return found


def test_stub_equals_the_built_module():
    built, stub = in_module(vars(extension)), in_stub(ast.parse(STUB.read_text()).body)
    assert built.keys() == stub.keys()
    for name in built:
        assert built[name] == stub[name], f"_C.{name}"


def test_everything_has_a_docstring():
    """Users see these in their editors. Of overloads the last has it, the one whose parameters are the extension's."""
    for scope in ast.walk(ast.parse(STUB.read_text())):
        if isinstance(scope, (ast.Module, ast.ClassDef)):
            named = {node.name: node for node in scope.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
            for name in named.keys() - {"__init__"}:
                assert ast.get_docstring(named[name]), name
