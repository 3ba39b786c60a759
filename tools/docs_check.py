"""Checks that README, docs and docstrings agree with the code; --write mends the map.

    python tools/docs_check.py [--write]

The file map in the README gives every file of tfdp/, tools/ and examples/ the
line that the file itself opens with, so there is one place to change it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("tfdp", "tools", "examples")
# Files without a first line of their own.
SKIPPED = ("py.typed",)

MAP_HEADING = "## File map"
MAP_ROW = re.compile(
    r"^\| \[`(?P<path>[^`]+)`\]\((?P<link>[^)]+)\) \| (?P<text>.*) \|$"
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^( *)```(?P<lang>\w*)[^\n]*\n(?P<code>.*?)^\1```", re.M | re.S)


def tracked_files(*folders: str) -> list[str]:
    """Paths that git tracks or would track, where they still exist."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(
        [*command, "--", *folders], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return sorted({path for path in output.splitlines() if (ROOT / path).is_file()})


def first_line(path: str) -> str:
    """The line that says what a file is: of its docstring, or its first comment."""
    text = (ROOT / path).read_text("utf-8")
    if path.endswith(".py") or "python" in text.partition("\n")[0]:
        docstring = ast.get_docstring(ast.parse(text)) or ""
        # Wrapped first sentences are allowed: the first paragraph is the line.
        return " ".join(docstring.split("\n\n")[0].split())
    for line in text.splitlines():
        if line.startswith("#") and not line.startswith("#!"):
            return line.lstrip("# ").strip()
    return ""


def wanted_map() -> dict[str, str]:
    return {
        path: first_line(path)
        for path in tracked_files(*MAPPED)
        if Path(path).name not in SKIPPED
    }


def map_rows(readme: str) -> dict[str, str]:
    section = readme.partition(MAP_HEADING)[2].partition("\n## ")[0]
    rows = (MAP_ROW.match(line) for line in section.splitlines())
    return {row["path"]: row["text"] for row in rows if row}


def check_map() -> Iterator[str]:
    rows = map_rows((ROOT / "README.md").read_text("utf-8"))
    wanted = wanted_map()
    for path, line in wanted.items():
        if not line:
            yield f"{path}: opens with no line that says what it is"
        elif path not in rows:
            yield f"README.md: the file map lacks {path}"
        elif rows[path] != line:
            yield f"README.md: the file map's line for {path} is not its first line"
    for path in rows:
        if path not in wanted:
            yield f"README.md: the file map lists {path}, which is not there"


def write_map() -> None:
    """Rewrites the rows of the file map: old order kept, new files at the end."""
    path = ROOT / "README.md"
    before, _, rest = path.read_text("utf-8").partition(MAP_HEADING)
    section, separator, after = rest.partition("\n## ")
    wanted = wanted_map()
    kept = [name for name in map_rows(MAP_HEADING + section) if name in wanted]
    # A folder's files stay together, folders in the order of MAPPED.
    order = sorted(
        [*kept, *(name for name in wanted if name not in kept)],
        key=lambda name: MAPPED.index(name.split("/")[0]),
    )
    intro = section.partition("\n| ")[0].rstrip("\n")
    table = ["| file | what it does |", "| --- | --- |"]
    table += [f"| [`{name}`]({name}) | {wanted[name]} |" for name in order]
    section = intro + "\n\n" + "\n".join(table) + "\n"
    path.write_text(before + MAP_HEADING + section + separator + after, "utf-8")


def check_links() -> Iterator[str]:
    for page in markdown_pages():
        text = FENCE.sub("", (ROOT / page).read_text("utf-8"))
        for match in LINK.finditer(text):
            target, _, anchor = match["target"].partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (ROOT / page).parent / target if target else ROOT / page
            if not file.exists():
                yield f"{page}: link to {match['target']}, which is not there"
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                yield f"{page}: link to {match['target']}: no such heading"


def markdown_pages() -> list[str]:
    return [path for path in tracked_files() if path.endswith(".md")]


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.strip().replace(" ", "-") for text in plain}


def check_code_blocks() -> Iterator[str]:
    for page in markdown_pages():
        for match in FENCE.finditer((ROOT / page).read_text("utf-8")):
            if match["lang"] != "python":
                continue
            code = textwrap.dedent(match["code"])
            try:
                ast.parse(code)
            except SyntaxError as error:
                yield f"{page}: a python block does not parse: {error}\n{code}"


def public_names() -> Iterator[tuple[str, Any]]:
    """What `tfdp.__all__` names, and what the public modules among it name."""
    tfdp = importlib.import_module("tfdp")
    for name in tfdp.__all__:
        value = getattr(tfdp, name)
        yield f"tfdp.{name}", value
        if inspect.ismodule(value):
            for member in getattr(value, "__all__", ()):
                yield f"tfdp.{name}.{member}", getattr(value, member)


def check_public_names() -> Iterator[str]:
    try:
        names = list(public_names())
    except (ImportError, AttributeError) as error:
        yield f"a public name cannot be imported: {error}"
        return
    pages = "\n".join((ROOT / page).read_text("utf-8") for page in markdown_pages())
    for name, value in names:
        if not (callable(value) or inspect.ismodule(value)):
            continue
        # A subclass does not inherit its documentation.
        docstring = inspect.cleandoc(value.__doc__ or "")
        if not docstring:
            yield f"{name}: no docstring"
        elif callable(value):
            yield from check_sections(name, value, docstring)
            yield from check_methods(name, value)
        if not re.search(rf"\b{re.escape(name)}\b", pages):
            yield f"{name}: not mentioned in README.md or docs/"


def check_methods(name: str, value: Any) -> Iterator[str]:
    """Public methods of our own; what overrides another's is documented there."""
    bases = inspect.getmro(value) if inspect.isclass(value) else ()
    ours = [base for base in bases if base.__module__.startswith("tfdp")]
    others = [base for base in bases if base not in ours]
    for base in ours:
        for member, method in vars(base).items():
            if member.startswith("_") or not inspect.isfunction(method):
                continue
            if not method.__doc__ and not any(hasattr(o, member) for o in others):
                yield f"{name}.{member}: no docstring"


def check_sections(
    name: str, value: Callable[..., Any], docstring: str
) -> Iterator[str]:
    parameters = [p for p in inspect.signature(value).parameters if p[0] != "_"]
    parameters = [p for p in parameters if p not in ("args", "kwargs")]
    if parameters and "Args:" not in docstring:
        yield f"{name}: docstring has no Args section"
    for parameter in parameters:
        if not re.search(rf"\b{parameter}\b", docstring):
            yield f"{name}: docstring says nothing about {parameter}"
    if inspect.isclass(value) or dataclasses.is_dataclass(value):
        return
    returns = inspect.signature(value).return_annotation
    silent = (None, "None", inspect.Signature.empty)
    if returns not in silent and not re.search(r"^(Returns|Yields):", docstring, re.M):
        yield f"{name}: docstring has no Returns section"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite the file map")
    if parser.parse_args().write:
        write_map()
    sys.path.insert(0, str(ROOT))
    checks = (check_map, check_links, check_code_blocks, check_public_names)
    problems = [problem for check in checks for problem in check()]
    for problem in problems:
        print(problem)
    print(f"docs check: {len(problems)} problem(s)")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
