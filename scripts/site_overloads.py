"""An extension of griffe: functions of which a stub has only overloads appear on the site.

griffe keeps overloads beside the function that follows them. In a stub none follows, so griffe would drop
`Communicator.all_reduce` without a warning. The last overload is the general one here, and has the docstring.
"""

from typing import Any

import griffe


class Overloads(griffe.Extension):
    """Makes the last overload of each name into its function."""

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Adds a module's functions."""
        _add_functions(mod)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Adds a class's methods."""
        _add_functions(cls)


def _add_functions(scope: griffe.Module | griffe.Class) -> None:
    for name, variants in scope.overloads.items():
        if variants and name not in scope.members:
            function = variants[-1]
            function.overloads = None
            scope.set_member(name, function)
