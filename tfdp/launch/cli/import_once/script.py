"""Analysis of a script: which modules can be imported before it runs."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

_PACKAGES = frozenset(["tensorflow", "keras", "tfdp"])
# These functions change environment variables without `os.environ`. An import may read
# a variable that they change, so a script that uses one gets no early imports.
_CHANGES_ENVIRONMENT = frozenset(["putenv", "unsetenv", "load_dotenv"])
# These methods only read `os.environ`, so a script may call them before its imports.
_READS_ENVIRONMENT = frozenset(["get", "copy", "items", "keys", "values"])


class Imports(NamedTuple):
    """Packages that can be imported before a script runs.

    Args:
        packages: List of strings, names of the packages.
        variables: Dict of environment variables that the script sets before it imports
            the packages: TensorFlow reads some variables only at its import.
    """

    packages: list[str]
    variables: dict[str, str]


def imports_of(script: str) -> Imports | None:
    """Find the packages that can be imported before a script runs.

    The script, and modules in its folder, may set environment variables to constants at
    their top level. Any other change of the environment prevents early imports.

    Args:
        script: String, path of a Python file.

    Returns:
        `Imports`, or `None` if the script does not import TensorFlow, changes the
        environment in another way before that, selects another backend of Keras, or
        cannot be read or parsed.
    """
    variables: dict[str, str] = {}
    imported: set[str] = set()
    folder = os.path.dirname(os.path.abspath(script))
    try:
        for statement in _statements(script, folder, imported, set(), set()):
            if statement is None:
                break
            if (constant := _constant_set(statement)) is not None:
                name, value, is_default = constant
                if not (is_default and name in os.environ):
                    variables[name] = value
            elif any(map(_changes_environment, ast.walk(statement))):
                return None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    is_other_backend = variables.get("KERAS_BACKEND", "tensorflow") != "tensorflow"
    if is_other_backend or not imported & _PACKAGES:
        return None
    return Imports(["tensorflow", "keras", *imported & {"tfdp"}], variables)


def _statements(
    path: str, folder: str, imported: set[str], seen: set[str], lazy: set[str]
) -> Iterator[ast.stmt | None]:
    """Yield the statements of a file and of imported modules, in order of execution.

    Args:
        path: String, path of the file.
        folder: String, folder of the script, whose modules are included.
        imported: Set of strings, to which the names of the packages are added that the
            files import, at the top level or in a function.
        seen: Set of the files that were visited.
        lazy: Set of the files that were visited as imports of functions. A function may
            run at any time, or never, so their statements are yielded within one.

    Yields:
        Each statement, and `None` after one that imports TensorFlow, Keras or tfdp.
    """
    if path in seen:
        return
    seen.add(path)
    with open(path, "rb") as file:
        tree = ast.parse(file.read())
    imported.update(map(_package, _imported(tree)))
    for statement in tree.body:
        yield statement
        is_definition = isinstance(
            statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        )
        for name in _imported(statement):
            if _package(name) in _PACKAGES:
                if not is_definition:
                    yield None
                continue
            for module in _files_of(name, folder):
                if is_definition:
                    inner = _statements(module, folder, imported, lazy, lazy)
                    body = [nested for nested in inner if nested is not None]
                    yield ast.With(items=[], body=body)
                else:
                    yield from _statements(module, folder, imported, seen, lazy)


def _files_of(name: str, folder: str) -> Iterator[str]:
    """Yield those files of a folder that define a module and its parent packages."""
    place = folder
    for part in name.split("."):
        place = os.path.join(place, part)
        paths = (f"{place}.py", os.path.join(place, "__init__.py"))
        yield from filter(os.path.isfile, paths)


def _constant_set(statement: ast.stmt) -> tuple[str, str, bool] | None:
    """Parse a statement that sets an environment variable to a constant.

    Returns:
        Tuple of the name, the value, and whether the statement is a `setdefault`; or
        `None` for any other statement.
    """
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
        constants = ast.literal_eval(name), ast.literal_eval(value)
        if all(isinstance(text, str) for text in constants):
            return (*constants, is_default)
    return None


def _is_environment(node: ast.AST) -> bool:
    """Return whether a node is `os.environ`, or `environ` imported from `os`."""
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _changes_environment(node: ast.AST) -> bool:
    """Return whether a node of a script may change the environment variables.

    A function that receives `os.environ` may change it.
    """
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
    """Return the top-level package of the name of a module."""
    return name.partition(".")[0]


def _imported(code: ast.AST) -> Iterator[str]:
    """Yield the names of the modules that some code imports, also in functions."""
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
