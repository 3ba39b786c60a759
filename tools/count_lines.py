"""Count lines of code, without docstrings, comments and blank lines.

    python tools/count_lines.py [DIRECTORY]

Prints the lines of each package of a directory and of those in it, by default of tfdp,
and of all.
"""

from __future__ import annotations

import ast
import collections
import io
import sys
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(source: str) -> int:
    """Count the lines of a file that hold code.

    Args:
        source: String, its text.
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code: set[int] = set()
    for token in tokens:
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            code -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(code)


def main(root: Path) -> None:
    """Print a table."""
    counts: collections.Counter[str] = collections.Counter()
    for path in root.rglob("*.py"):
        lines = lines_of_code(path.read_text(encoding="utf-8"))
        *folders, _ = path.relative_to(root).parts[:3]
        for end in range(len(folders) + 1):
            counts["/".join([str(root), *folders[:end]])] += lines
    for package in sorted(counts):
        print(f"{counts[package]:7,}  {package}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tfdp"))
