"""Public names of tfdp, and the modules that define them, without importing it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
API_PAGE = ROOT / "docs" / "api.md"
# An entry of the API reference: a name, or a module for all names in it.
ENTRY = re.compile(r"^::: (tfdp[\w.]*)$", re.M)


def public_names() -> dict[str, str]:
    """Find the module that defines each public name.

    Returns:
        Dict from names such as `"tfdp.callbacks.LossScaling"` to modules. Of a
        module without `__all__`, the functions whose docstring has an example.
    """
    names = {}
    for name, home in _homes("tfdp"):
        if home != f"tfdp.{name}":
            names[f"tfdp.{name}"] = home
            continue
        for member in _literal(home, "__all__") or _with_examples(home):
            names[f"{home}.{member}"] = _imports(home).get(member, home)
    return names


def documented_names() -> dict[str, str]:
    """Find the names of the API reference: the public ones, and those of `tfdp.ray`.

    Returns:
        Dict as of `public_names`. `tfdp.ray` is imported by its own name, with Ray.
    """
    return public_names() | {
        f"tfdp.ray.{name}": home for name, home in _homes("tfdp.ray")
    }


def entries(name: str) -> dict[str, str]:
    """Find the public names that an entry of the API reference stands for.

    Args:
        name: String, a public name or a public module.

    Returns:
        Part of `documented_names()`.
    """
    return {
        public: home
        for public, home in documented_names().items()
        if public == name or public.startswith(f"{name}.")
    }


def missing_names() -> list[str]:
    """List the names that docs/api.md has no entry for."""
    given = ENTRY.findall(API_PAGE.read_text("utf-8"))
    found = {public for name in given for public in entries(name)}
    return sorted(set(documented_names()) - found)


def docstring_of(name: str, home: str) -> str | None:
    """Read the docstring of a public name.

    Args:
        name: String, such as `"tfdp.MirroredStrategy"`.
        home: String, the module that defines it.

    Returns:
        String, or `None` if it has none.
    """
    node = _definitions(home).get(name.rpartition(".")[2])
    return None if node is None else ast.get_docstring(node)


@functools.cache
def _body(module: str) -> list[ast.stmt]:
    path = ROOT / module.replace(".", "/")
    file = path.with_suffix(".py")
    if path.is_dir():
        file = path / "__init__.py"
    return ast.parse(file.read_text("utf-8")).body


def _literal(module: str, name: str) -> Any:
    """Read the literal that a module assigns to a name."""
    for node in _body(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def _homes(package: str) -> list[tuple[str, str]]:
    """Public names of a package that loads them late, and the modules of each."""
    return list(_literal(package, "_HOMES").items())


def _imports(module: str) -> dict[str, str]:
    """Map names that a module imports, type checkers' too, to their modules."""
    return {
        alias.asname or alias.name: node.module
        for statement in _body(module)
        for node in ast.walk(statement)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _definitions(module: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: node for node in _body(module) if isinstance(node, kinds)}


def _with_examples(module: str) -> list[str]:
    return [
        name
        for name, node in _definitions(module).items()
        if name[0] != "_" and ">>> " in (ast.get_docstring(node) or "")
    ]
