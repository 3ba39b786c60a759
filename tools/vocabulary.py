"""Check comments, docstrings and pages for phrases that have a plainer word.

    python tools/vocabulary.py [FILE_OR_DIRECTORY ...]

Prints each place with what to write instead, and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("tfdp", "docs", "README.md", "CONTRIBUTING.md")
# Of a page: blocks of code, and what is quoted from the program.
_QUOTED = re.compile(r"^ *```.*?^ *```|^    .*?$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
# What to write, by a regular expression of the phrase.
PLAINER = {
    r"\bgo(?:es)? on\b|\bwent on\b|\bgoing on\b": "continue",
    r"\bfor ever\b": "indefinitely, or without a timeout",
    r"\bso (?:many|much)\b(?! (?:\w+ )?that)": "the number of, or that many",
    r"\bin force\b": "active",
    r"\bin turn\b": "one after another",
    r"\b(?:that|which|what|who) (?:is|are) there\b": "existing, or present",
    r"\bst(?:and|ands|ood) still\b": "is suspended, or is idle",
    r"(?:^|[.:;,] )who(?:ever)? (?:has|is|runs|does|reads|waits|wants)\b": (
        "a noun: a worker that, a caller that, users that"
    ),
    r"\bmay yet\b": "may still",
    r"\bin vain\b": "without result, or until it times out",
    r"\b(?:is|are|be|was|were|been) told\b": "receives, or is notified",
    r"\b(?:nobody|everybody|anybody|somebody)\b": "no worker, every replica, a caller",
    r"\bequally many\b": "the same number of",
    r"\bwithout a word\b": "silently",
    r"\bof which (?:each|every|all|one|a|the|any|no|only)\b": (
        "a sentence with its own subject"
    ),
    r"\bhas to (?:go|do with)\b": "must be removed, or concerns",
    r"\bwhat (?:it|they) (?:is|are) (?:given|told)\b": "its arguments, its input",
    r"\bas long as it likes\b": "indefinitely",
    r"\bnothing of its own\b": "a plain noun: no local updates, no settings",
    r"\bsays nothing\b": "is silent, or is noise",
}


class Finding(NamedTuple):
    """A phrase and its place.

    Args:
        path: `Path` of the file.
        line: Int, from 1.
        phrase: String, as it stands there.
        plainer: String, what to write instead.
    """

    path: Path
    line: int
    phrase: str
    plainer: str


def findings(path: Path) -> Iterator[Finding]:
    """Yield the phrases of a Python file or of a page, in order."""
    text = path.read_text()
    if path.suffix == ".py":
        parts = sorted({*_comments(path), *_docstrings(text)})
    else:
        parts = [(1, _QUOTED.sub(_blank_lines, text))]
    for line, prose in parts:
        for pattern, plainer in PLAINER.items():
            # A phrase may be broken between two lines, also of a comment.
            broken = pattern.replace(" ", r"\s+(?:#\s+)?")
            for found in re.finditer(broken, prose, re.IGNORECASE):
                offset = prose[: found.start()].count("\n")
                words = found.group().replace("#", " ").split()
                phrase = " ".join(words).lstrip(".:;, ")
                yield Finding(path, line + offset, phrase, plainer)


def _blank_lines(quoted: re.Match) -> str:
    """Keep the line numbers of what follows."""
    return "\n" * quoted.group().count("\n")


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield comments; lines of one that follow each other are one text."""
    begin = 0
    lines: list[str] = []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type != tokenize.COMMENT:
                continue
            line = token.start[0]
            if lines and line == begin + len(lines):
                lines.append(token.string)
                continue
            if lines:
                yield begin, "\n".join(lines)
            begin, lines = line, [token.string]
    if lines:
        yield begin, "\n".join(lines)


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            value = first.value.value
            if isinstance(value, str):
                yield first.lineno, value


def _files(arguments: list[str]) -> Iterator[Path]:
    for each in arguments or [str(ROOT / name) for name in CHECKED]:
        path = Path(each)
        suffixes = (".py", ".md")
        inside = (f for f in path.rglob("*") if f.suffix in suffixes)
        yield from sorted(inside) if path.is_dir() else [path]


def main() -> int:
    """Print all findings, and return the exit code."""
    found = [each for path in _files(sys.argv[1:]) for each in findings(path)]
    for each in found:
        print(f"{each.path}:{each.line}: {each.phrase!r}: write {each.plainer}")
    print(f"vocabulary: {len(found)} phrases", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
