"""Whether a script can be given a TensorFlow that was imported before it runs."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

_PACKAGES = frozenset(["tensorflow", "keras", "tfdp"])
# What changes the environment by other names than `os.environ`.
_CHANGES_ENVIRONMENT = frozenset(["putenv", "unsetenv", "load_dotenv"])
_READS_ENVIRONMENT = frozenset(["get", "copy", "items", "keys", "values"])


class _Unclear(Exception):
    """The environment in which the script imports TensorFlow cannot be told."""


class _Found(Exception):
    """The script imports TensorFlow here."""


class Imports(NamedTuple):
    """What can be imported before a script runs.

    Args:
        packages: List of strings.
        variables: Dict of what the script sets in the environment before it imports
            them: TensorFlow reads some variables once, when it is imported.
    """

    packages: list[str]
    variables: dict[str, str]


def imports_of(script: str) -> Imports | None:
    """Find what can be imported before a script runs.

    Of the environment only constants are known that the script, or modules in its
    folder, set at their top level.

    Args:
        script: String, path of a Python file.

    Returns:
        `Imports`, or `None` where the script imports no TensorFlow, or changes the
        environment in another way before.
    """
    scan = _Scan(os.path.dirname(os.path.abspath(script)))
    try:
        scan.read(script)
    except _Found:
        pass
    except (_Unclear, OSError, SyntaxError, ValueError, RecursionError):
        return None
    is_other = scan.variables.get("KERAS_BACKEND", "tensorflow") != "tensorflow"
    if is_other or not scan.imported & _PACKAGES:
        return None
    packages = ["tensorflow", "keras", *scan.imported & {"tfdp"}]
    return Imports(packages, scan.variables)


class _Scan:
    """Reading of a script and of the modules in its folder, as Python would run them.

    Args:
        folder: String, the script's.

    Attributes:
        variables: Dict of what they set in the environment.
        imported: Set of the packages that they import, at once or in a function.
    """

    def __init__(self, folder: str) -> None:
        self.variables: dict[str, str] = {}
        self.imported: set[str] = set()
        self._folder = folder
        self._seen: set[str] = set()

    def read(self, path: str) -> None:
        """Follow a file from its top; raise `_Found` or `_Unclear`."""
        if path in self._seen:
            return
        self._seen.add(path)
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
        self.imported.update(map(_package, _imported(tree)))
        for statement in tree.body:
            self._follow(statement)

    def _follow(self, statement: ast.stmt) -> None:
        if (variable := _constant_set(statement)) is not None:
            name, value, is_default = variable
            if not (is_default and name in os.environ):
                self.variables[name] = value
            return
        if any(_changes_environment(node) for node in ast.walk(statement)):
            raise _Unclear
        is_definition = isinstance(
            statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        )
        for name in _imported(statement):
            if _package(name) not in _PACKAGES:
                self._read_module(name)
            elif not is_definition:
                raise _Found

    def _read_module(self, name: str) -> None:
        """Follow a module of the script's folder, and the packages that it is in."""
        place = self._folder
        for part in name.split("."):
            place = os.path.join(place, part)
            for path in (f"{place}.py", os.path.join(place, "__init__.py")):
                if os.path.isfile(path):
                    self.read(path)


def _constant_set(statement: ast.stmt) -> tuple[str, str, bool] | None:
    """Return name and value of `os.environ["NAME"] = "value"`, or of a `setdefault`."""
    name: ast.expr
    value: ast.expr
    match statement:
        case ast.Assign(targets=[ast.Subscript(value=place, slice=name)], value=value):
            is_default = False
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=place, attr="setdefault"),
                args=[name, value],
                keywords=[],
            )
        ):
            is_default = True
        case _:
            return None
    if not _is_environment(place):
        return None
    with contextlib.suppress(ValueError):
        found = ast.literal_eval(name), ast.literal_eval(value)
        if all(isinstance(text, str) for text in found):
            return (*found, is_default)
    return None


def _is_environment(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _changes_environment(node: ast.AST) -> bool:
    """Return whether a node changes the environment, or may pass it to what does."""
    for child in ast.iter_child_nodes(node):
        if not _is_environment(child):
            continue
        is_read = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        is_read |= isinstance(node, ast.Attribute) and node.attr in _READS_ENVIRONMENT
        is_read |= isinstance(node, ast.Compare)
        if not is_read:
            return True
    if isinstance(node, ast.Attribute):
        return node.attr in _CHANGES_ENVIRONMENT
    return isinstance(node, ast.Name) and node.id in _CHANGES_ENVIRONMENT


def _package(name: str) -> str:
    return name.partition(".")[0]


def _imported(code: ast.AST) -> Iterator[str]:
    """Yield the names of the modules that some code imports, also inside of it."""
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
