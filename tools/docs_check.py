"""Check that README, CONTRIBUTING, the docs and docstrings agree with the code.

    python tools/docs_check.py

Each floor of tfdp/ has a line in CONTRIBUTING, and a docstring in its `__init__` that
names its rooms from top to bottom, as the docstring of each room names its files; the
walks of docs/step.md name what is there; links and Python blocks of all pages hold;
public names have docstrings and stand on a page.
"""

from __future__ import annotations

import ast
import configparser
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
# A docstring of fewer words does not say what a package is for.
MIN_WORDS = 4

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
# A floor's line in CONTRIBUTING: its name, linked to its `__init__`.
PACKAGE_LINE = re.compile(
    r"^- \[`(?P<name>\w+)`\]\(tfdp/(?P=name)/__init__\.py\): \S", re.M
)
# A room's line in the docstring of its floor.
ROOM_LINE = re.compile(r"^- `(?P<name>\w+)`: \S", re.M)
# A line of the walks in docs/step.md: a file, and names that are defined in it.
WALK = ROOT / "docs" / "step.md"
WALK_LINE = re.compile(
    r"^\d+\. \[`(?P<path>[\w/.]+)`\]\(\.\./(?P=path)\)\s+(?P<names>`[^:]+`):\s", re.M
)
# The end of a link or a picture: either may stand in the other.
LINK = re.compile(r"\]\((?P<target>[^)\s]+)(?: \"[^\"\n]*\")?\)")
INLINE_CODE = re.compile(r"(`+)[^`]+\1")
FENCE = re.compile(r"^( *)```(?P<lang>\w*)[^\n]*\n(?P<code>.*?)^\1```", re.M | re.S)


def tracked_files(*folders: str) -> list[str]:
    """List the paths that git tracks or would track, where they still exist."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(
        [*command, "--", *folders], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return sorted({path for path in output.splitlines() if (ROOT / path).is_file()})


def layers() -> dict[str, list[str]]:
    """Read the layers of each contract of setup.cfg, from top to bottom."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return {
        name.rpartition(":")[2]: re.findall(r"\w+", section["layers"])
        for name, section in config.items()
        if section.get("type") == "layers"
    }


def packages() -> list[str]:
    """List the packages of tfdp/ and of its floors, from top to bottom."""
    names = [
        f"{'' if floor == 'floors' else floor + '/'}{name}"
        for floor, rooms in layers().items()
        for name in rooms
    ]
    return [name for name in names if (ROOT / "tfdp" / name / "__init__.py").is_file()]


def check_packages() -> Iterator[str]:
    """Compare CONTRIBUTING's lines, and the docstrings, with the packages there are."""
    floors = [name for name in packages() if "/" not in name]
    listed = [
        match["name"]
        for match in PACKAGE_LINE.finditer(CONTRIBUTING.read_text("utf-8"))
    ]
    yield from compare_lists("CONTRIBUTING.md", floors, listed)
    for name in packages():
        path = f"tfdp/{name}/__init__.py"
        docstring = ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8"))) or ""
        if len(docstring.split()) < MIN_WORDS:
            yield f"{path}: no docstring that says what the package is for"
        if name in layers():
            listed = [match["name"] for match in ROOM_LINE.finditer(docstring)]
            yield from compare_lists(path, layers()[name], listed)
        for module in modules_of(ROOT / "tfdp" / name):
            if not re.search(rf"\b{module}\b", docstring):
                yield f"{path}: the docstring does not name {module}"


def compare_lists(path: str, names: list[str], listed: list[str]) -> Iterator[str]:
    if listed != names:
        yield (
            f"{path}: the lines of the packages should be those of "
            f"{', '.join(names)}, in this order; they are {', '.join(listed)}"
        )


def modules_of(package: Path) -> list[str]:
    """List the modules and packages that are in a package, without private ones."""
    files = [file.stem for file in package.glob("*.py")]
    folders = [init.parent.name for init in package.glob("*/__init__.py")]
    return sorted(name for name in files + folders if not name.startswith("_"))


def check_walk() -> Iterator[str]:
    """Look for the names of docs/step.md in the files that it says they are in."""
    text = WALK.read_text("utf-8")
    lines = list(WALK_LINE.finditer(text))
    if len(lines) != len(re.findall(r"^\d+\. ", text, re.M)):
        yield "docs/step.md: a line of a walk has not the form of the others"
    for line in lines:
        file = ROOT / line["path"]
        defined = names_in(file) if file.is_file() else set()
        for name in re.findall(r"`([\w.]+)`", line["names"]):
            if name not in defined:
                yield f"docs/step.md: {line['path']} defines no {name}"


def names_in(file: Path) -> set[str]:
    """Find the functions, classes and methods of a file, these with their class too."""
    tree = ast.parse(file.read_text("utf-8"))
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    methods = {
        f"{node.name}.{item.name}"
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.FunctionDef)
    }
    return methods | {node.name for node in nodes}


def check_links() -> Iterator[str]:
    for page in markdown_pages():
        text = FENCE.sub("", (ROOT / page).read_text("utf-8"))
        text = INLINE_CODE.sub("", text)
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
    """Compute the anchors that GitHub gives to a page's headings."""
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
    """Yield the names of `tfdp.__all__`, and of the public modules in it."""
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
    """Look for docstrings of public methods, overrides of other packages' excepted."""
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
    sys.path.insert(0, str(ROOT))
    checks = (
        check_packages,
        check_walk,
        check_links,
        check_code_blocks,
        check_public_names,
    )
    problems = [problem for check in checks for problem in check()]
    for problem in problems:
        print(problem)
    print(f"docs check: {len(problems)} problem(s)")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
