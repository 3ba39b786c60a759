"""Nothing that is read can run code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.harness.commands import ROOT

UNPICKLERS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# Arguments of NumPy and Keras that let what is read run code.
UNSAFE_ARGUMENTS = {"allow_pickle": "True", "safe_mode": "False"}


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [a.name for a in node.names] if isinstance(node, ast.Import) else []


def unsafe_uses(root: Path = ROOT) -> list[str]:
    found = []
    for path in sorted((root / "tfdp").rglob("*.py")):
        module = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            found += [
                f"{module} imports {name}"
                for name in imported(node)
                if name.partition(".")[0] in UNPICKLERS
            ]
            if isinstance(node, ast.keyword):
                value = ast.unparse(node.value)
                if UNSAFE_ARGUMENTS.get(node.arg or "") == value:
                    found.append(f"{module} sets {node.arg}={value}")
    return found


def test_nothing_in_tfdp_unpickles_or_leaves_kerass_safe_mode():
    assert unsafe_uses() == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "np.load(path, allow_pickle=True)",
        "keras.saving.load_model(path, safe_mode=False)",
    ],
)
def test_the_check_finds_what_is_unsafe(tmp_path, line):
    (tmp_path / "tfdp").mkdir()
    (tmp_path / "tfdp" / "data.py").write_text(line + "\n")
    assert len(unsafe_uses(tmp_path)) == 1
