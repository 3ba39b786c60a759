"""What becomes of each command of the pages: executed here, elsewhere, or why not."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path

from tests.docs.page_commands import (
    NEEDS,
    Command,
    PageFile,
    is_of_programs,
    items_of,
    simple_commands,
)
from tests.harness.commands import ROOT

LIST = "docs/reports/commands.md"

# What commands of ours need that is not everywhere.
_NEEDS_OF_OURS = {
    r"^TF_CONFIG=|--nnodes|\btfdp run .*--nodes\b|\$\{?(SLURM|OMPI|PMI)_": "two hosts",
    r"\btfdp run .*--host(s|file)\b": "two hosts with ssh",
    r"\btools/(two_hosts|host_faults)\b|tools\.bench hosts": (
        "root, for network namespaces"
    ),
    r"--torch-python": "PyTorch",
    r"cifar_resnet\.py --data|serve_latency\.py": "the CIFAR-10 files",
    r"tools\.bench buckets|examples/cifar_resnet\.py": "an hour or more",
    r"^tools/pictures\b": "Chromium",
    r"^tools/test_(matrix|dist)\b": "a package index",
    r"^tools/(exactness|faults|fuzz|storm|keras_suite --full)\b": "an hour or more",
    r"^tools/test --full\b": "an hour or more",
    r"^tools/docs --serve\b": "a browser",
    r"\bpre-commit install\b": "a checkout whose hooks may change",
    r"^python3? -m (build|venv|pip|twine)\b": "a package index",
    r"--jit|--gpus|\bNCCL_\w+=": "an NVIDIA GPU",
}

# By command: the file of the repository that executes it, and the words that do.
EXECUTED_BY = {
    ".ci/run": (".ci/run", "step tools/test"),
    "tools/test": (".ci/run", "step tools/test\n"),
    "tools/test -n 0 tests/step": (".ci/run", "step tools/test\n"),
    "tools/needed": (".ci/run", "tools/needed"),
    "tools/lint": (".ci/run", "step tools/lint"),
    "tools/lint --fix": (".ci/run", "step tools/lint"),
    "tools/docs": ("tools/lint", "&& tools/docs"),
    "python tools/docs_check.py": ("tools/lint", "python tools/docs_check.py"),
    "tools/demo": ("tests/docs/test_examples.py", '"digits": "examples/digits_cnn.py"'),
    "tfdp run -n 2 examples/digits_cnn.py": (
        "tests/docs/test_examples.py",
        '"digits": "examples/digits_cnn.py"',
    ),
    "tfdp run -n 2 examples/char_transformer.py": (
        "tests/docs/test_examples.py",
        '"characters": "examples/char_transformer.py"',
    ),
    "tfdp run -n 2 examples/large_model.py": (
        "tests/docs/test_examples.py",
        '"large": "examples/large_model.py"',
    ),
    "tfdp run -n 2 examples/multi_worker_with_keras/main.py": (
        "tests/docs/test_examples.py",
        '"tutorial": "examples/multi_worker_with_keras/main.py"',
    ),
    "tfdp run -n 2 examples/cifar_resnet.py": (
        "tests/bench/test_bucket_study.py",
        '"-m", "tfdp", "run"',
    ),
    "python examples/serve_latency.py cifar-output/checkpoints": (
        "tests/bench/test_bucket_study.py",
        '"examples/serve_latency.py"',
    ),
    "tools/keras_suite": (
        "tests/keras_hooks/test_keras_suite.py",
        'run_python("tools/keras_suite", "--verbose"',
    ),
    "tools/keras_suite --full": (
        "tests/keras_hooks/test_keras_suite.py",
        'run_python("tools/keras_suite", "--full"',
    ),
    "python -m tests.docs.command_list": (
        "tests/docs/test_commands.py",
        "command_list.page()",
    ),
}

# What takes minutes, whatever the page.
_TAKES_MINUTES = re.compile(r"\btfdp bench (collectives|compare)|-m tools\.bench ")
# What only changes the shell for the commands after it.
_SHELL = re.compile(r"^(cd|export|source|\.|set|alias|exit|[A-Za-z_]\w*=\S*$)")


@dataclasses.dataclass(frozen=True)
class Account:
    """What becomes of a command.

    Args:
        how: `"runs"`, `"elsewhere"`, `"needs"`, or `"shell"` for what is part of the
            commands after it.
        text: `"minutes"` for what takes so long, the file that executes it, or what it
            needs.
    """

    how: str
    text: str = ""


def account_of(command: Command) -> Account:
    """Say what becomes of a command of a block."""
    text = command.text
    if text in EXECUTED_BY:
        return Account("elsewhere", EXECUTED_BY[text][0])
    if command.needs:
        return Account("needs", command.needs)
    if _SHELL.match(text) and "\n" not in text:
        return Account("shell")
    programs = [words[0] for words in simple_commands(text)]
    needs = [NEEDS[program] for program in programs if program in NEEDS]
    needs += [need for found, need in _NEEDS_OF_OURS.items() if re.search(found, text)]
    if needs:
        return Account("needs", needs[0])
    minutes = command.takes == "minutes" or _TAKES_MINUTES.search(text)
    return Account("runs", "minutes" if minutes else "")


@functools.cache
def pages() -> tuple[str, ...]:
    """The pages whose commands count, README and CONTRIBUTING among them."""
    found = ["README.md", "CONTRIBUTING.md", *_files("docs", ".md")]
    return tuple(page for page in found if page != LIST)


def _files(folder: str, suffix: str = "") -> list[str]:
    """List the files of a folder; those of an sdist, too, which git does not know."""
    found = [path for path in (ROOT / folder).rglob(f"*{suffix}") if path.is_file()]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return sorted(name for name in names if "__pycache__" not in name)


@functools.cache
def items(page: str) -> tuple[Command | PageFile, ...]:
    """The commands and files of a page, in its order."""
    return tuple(items_of(page, (ROOT / page).read_text("utf-8")))


def commands_to_account() -> list[Command]:
    """All commands of blocks, and those with which the examples open."""
    found = [item for page in pages() for item in items(page)]
    commands = [item for item in found if isinstance(item, Command)]
    return [c for c in commands if c.kind == "block"] + commands_of_examples()


def commands_of_examples() -> list[Command]:
    """The commands in the first lines of the examples."""
    return [
        item
        for path in _files("examples", ".py")
        for item in items_of(path, _docstring(ROOT / path))
        if isinstance(item, Command) and item.kind == "block"
    ]


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


def usage_of_tools() -> list[Command]:
    """The lines of usage in the first lines of tools, without their brackets."""
    found = []
    for path in _files("tools"):
        text = (ROOT / path).read_text("utf-8")
        if "python" not in text.partition("\n")[0] and not path.endswith(".py"):
            continue
        docstring = re.sub(r"\n {8,}(?=[\[-])", " ", _docstring(ROOT / path))
        found += [
            dataclasses.replace(
                item, kind="usage", text=re.sub(r"[][]| \.\.\.", "", item.text)
            )
            for item in items_of(path, docstring)
            if isinstance(item, Command) and is_of_programs(item.text)
        ]
    return found
