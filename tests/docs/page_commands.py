"""Shell commands of the pages and the files that they use, found by reading alone.

Commands stand in blocks ```bash, ```sh, ```shell and ```console, in indented blocks
that begin with a program of `PROGRAMS`, and in prose as inline code. A comment before a
block says what its commands are (several may stand below each other):

    <!-- file: train.py -->           the block is a file for the page's commands
    <!-- needs: a Slurm cluster -->   the commands cannot run here
    <!-- takes: minutes -->           they run in the full tier only
    <!-- exits: 1 -->                 they end with this code
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from collections.abc import Iterator

SHELLS = ("bash", "sh", "shell", "console")
OURS = ("tfdp", "python", "python3", "pip", "pip3")
# Programs that are not everywhere, and what one needs to run them.
NEEDS = {
    **dict.fromkeys(
        ("srun", "sbatch", "salloc", "scontrol", "squeue", "sacct", "scancel", "sinfo"),
        "a Slurm cluster",
    ),
    **dict.fromkeys(("kubectl", "helm", "kind", "minikube"), "a Kubernetes cluster"),
    **dict.fromkeys(("mpirun", "mpiexec", "horovodrun"), "MPI"),
    "torchrun": "PyTorch",
    **dict.fromkeys(
        ("ssh", "scp", "rsync", "ssh-copy-id", "parallel-ssh"), "two hosts"
    ),
    **dict.fromkeys(("docker", "podman", "apptainer", "singularity"), "a container"),
    "ray": "Ray",
    "gcloud": "Google Cloud",
    "aws": "Amazon SageMaker",
    **dict.fromkeys(("pip", "pip3", "uv", "conda", "twine"), "a package index"),
    **dict.fromkeys(("apt", "apt-get", "dnf"), "a package index"),
    **dict.fromkeys(("git", "curl", "wget"), "the Internet"),
    **dict.fromkeys(("jupyter", "jupyter-lab"), "Jupyter and a browser"),
    **dict.fromkeys(("tensorboard", "mlflow", "wandb"), "a browser"),
    **dict.fromkeys(("sudo", "unshare", "ip", "tc", "nft", "ufw"), "root"),
    **dict.fromkeys(("nvidia-smi", "nvcc", "nsys"), "an NVIDIA GPU"),
}
# What an indented block of commands may begin with.
PROGRAMS = (*OURS, *NEEDS, "cd", "export", "mkdir", "source")

_MARKER = re.compile(r"^ *<!-- (?P<key>\w+)(?:: (?P<value>.*?))? -->$")
KEYS = ("file", "needs", "takes", "exits")
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,}) *(?P<lang>[\w+-]*)")
_INLINE = re.compile(
    r"(?<!`)(?P<ticks>`+)(?!`)(?P<text>.+?)(?<!`)(?P=ticks)(?!`)", re.S
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# A line up to its comment.
_CODE = re.compile(r"""(?:[^"'#\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*'|(?<=\S)#)*""", re.S)
_OPENS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac"}
_KEYWORDS = ("then", "else", "do", "!", "{", "}", "fi", "done", "esac", *_OPENS)
_OPERATORS = re.compile(r"[|&;()]+")
_REDIRECTION = re.compile(r"[<>]&?|>>|<<<?|&>")
# What changes the shell in which the rest of a block runs.
_KEPT = ("cd", "export", "source", ".", "set", "alias")


@dataclasses.dataclass(frozen=True)
class Command:
    """One command, as a page gives it.

    Args:
        page: Path from the root of the repository.
        line: Number of its first line.
        text: The command on one line, without its comment.
        kind: `"block"`; `"inline"` for code in prose, which may lack arguments.
        needs: What it needs that is not everywhere, as the page says.
        takes: `"minutes"`, or `""` for seconds.
        exits: Exit code that the page promises.
        before: Commands of the same block that change the shell, such as `cd`.
    """

    page: str
    line: int
    text: str
    kind: str = "block"
    needs: str = ""
    takes: str = ""
    exits: int = 0
    before: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclasses.dataclass(frozen=True)
class PageFile:
    """A file that a page gives to its commands."""

    page: str
    line: int
    name: str
    text: str


class PageError(ValueError):
    """A block or a comment of a page that cannot be understood."""


@dataclasses.dataclass(frozen=True)
class _Block:
    line: int
    lines: list[str]
    lang: str = ""


def items_of(page: str, text: str) -> list[Command | PageFile]:
    """Find the commands and files of a page, in its order."""
    return list(_items(page, text.splitlines()))


def _items(page: str, lines: list[str]) -> Iterator[Command | PageFile]:
    markers: dict[str, str] = {}
    at, previous = 0, ""
    while at < len(lines):
        line = lines[at]
        marker = _MARKER.match(line)
        if marker and marker["key"] in KEYS:
            markers[marker["key"]] = marker["value"] or ""
            end = at + 1
        elif not line.strip() or marker:
            end = at + 1
        else:
            block, end = _block_at(lines, at)
            if block.lang or _begins_with_a_program(block, previous):
                yield from _items_of_block(page, block, markers)
            elif markers and not block.lines[0].startswith("    "):
                raise PageError(
                    f"{page}:{at + 1}: the comment <!-- {next(iter(markers))} --> must "
                    "stand before a block of commands or a file"
                )
            else:
                yield from _inline(page, block)
            # A blank line does not end an indented block.
            if block.lang or not _is_indented(_next_text(lines, end)):
                markers = {}
        previous, at = lines[end - 1], end
    if markers:
        raise PageError(f"{page}: <!-- {next(iter(markers))} --> stands before nothing")


def _next_text(lines: list[str], at: int) -> str:
    return next((line for line in lines[at:] if line.strip()), "")


def _is_indented(line: str) -> bool:
    return line.startswith("    ") and not _FENCE.match(line)


def _block_at(lines: list[str], at: int) -> tuple[_Block, int]:
    """The fenced block or the paragraph that begins at a line, and where it ends."""
    fence = _FENCE.match(lines[at])
    end = at + 1
    if fence:
        closing = fence["indent"] + fence["ticks"]
        while end < len(lines) and lines[end].rstrip() != closing:
            end += 1
        content = textwrap.dedent("\n".join(lines[at + 1 : end])).split("\n")
        return _Block(at + 2, content, fence["lang"] or "text"), min(
            end + 1, len(lines)
        )
    while end < len(lines) and lines[end].strip() and not _FENCE.match(lines[end]):
        if _MARKER.match(lines[end]):
            break
        end += 1
    return _Block(at + 1, lines[at:end]), end


def _begins_with_a_program(block: _Block, previous: str) -> bool:
    """Whether an indented paragraph is commands: its first line is, after comments."""
    if not all(line.startswith("    ") for line in block.lines):
        return False
    if previous.strip() and not _MARKER.match(previous):
        return False
    lines = [line.strip() for line in block.lines]
    first = next((line for line in lines if not line.startswith("#")), "")
    return first.startswith("$ ") or is_of_programs(first)


def is_of_programs(text: str) -> bool:
    """Whether a line begins with a program of ours, or one that we know."""
    words = [word for word in text.split() if not _ASSIGNMENT.match(word)]
    assigned = text.split()[:1] != words[:1]
    if assigned and words[1:]:
        return any(is_of_programs(" ".join(words[i:])) for i in range(len(words)))
    first = words[0] if words else ""
    return first in PROGRAMS or first.removeprefix("./").startswith(
        ("tools/", ".ci/", ".venv/bin/")
    )


def _items_of_block(
    page: str, block: _Block, markers: dict[str, str]
) -> Iterator[Command | PageFile]:
    if "file" in markers:
        text = "\n".join(block.lines) + "\n"
        yield PageFile(page, block.line, markers["file"], text)
        return
    if block.lang and block.lang not in SHELLS:
        # What a block of Python needs, its readers may be told too.
        for key in markers.keys() - {"needs"}:
            raise PageError(
                f"{page}:{block.line}: <!-- {key} --> stands before a block of "
                f"{block.lang}, which has no commands"
            )
        return
    lines = textwrap.dedent("\n".join(block.lines)).split("\n")
    before: tuple[str, ...] = ()
    for number, text in logical_lines(lines):
        yield Command(
            page,
            block.line + number,
            text,
            needs=markers.get("needs", ""),
            takes=markers.get("takes", ""),
            exits=int(markers.get("exits") or 0),
            before=before,
        )
        if text.split()[0] in _KEPT:
            before = (*before, text)


def logical_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the commands of a block with the number of the line they begin in.

    Where lines have the prompt `$ `, the others are output.
    """
    if any(line.startswith("$ ") for line in lines):
        lines = list(_prompted(lines))
    at = 0
    while at < len(lines):
        end = at + 1
        while end < len(lines) and _goes_on(lines[at:end]):
            end += 1
        text = "\n".join(lines[at:end])
        text = re.sub(r"[ \t]*\\\n\s*", " ", text)
        text = text if "\n" in text else _without_comment(text)
        if text.strip():
            yield at, text.strip()
        at = end


def _prompted(lines: list[str]) -> Iterator[str]:
    goes_on = False
    for line in lines:
        is_command = goes_on or line.startswith("$ ")
        yield line.removeprefix("$ ") if is_command else ""
        goes_on = is_command and line.endswith("\\")


def _without_comment(line: str) -> str:
    match = _CODE.match(line)
    return line[: match.end()] if match else line


def _goes_on(lines: list[str]) -> bool:
    """Whether a command needs the next line too."""
    if lines[-1].endswith("\\"):
        return True
    text = "\n".join(lines)
    first = text.split()[:1]
    if first and first[0] in _OPENS:
        closing = _OPENS[first[0]]
        return not re.search(rf"(^|[;\s]){closing}\s*($|[;|&])", _without_comment(text))
    if heredoc := re.search(r"<<-?\s*[\"']?(\w+)", lines[0]):
        return len(lines) == 1 or lines[-1].strip() != heredoc[1]
    if first and first[0].startswith("#"):
        return False
    return _has_an_open_quote(text)


def _has_an_open_quote(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def _inline(page: str, block: _Block) -> Iterator[Command]:
    text = "\n".join(block.lines)
    if page == "docs/troubleshooting.md":  # the first line of an item quotes a message
        text = re.sub(r"^- (`+).+?\1(?:, a warning)?:$", "-", text, flags=re.M)
    for match in _INLINE.finditer(text):
        code = " ".join(match["text"].split())
        if " " in code and is_of_programs(code):
            line = block.line + text.count("\n", 0, match.start())
            yield Command(page, line, code, kind="inline")


def simple_commands(text: str) -> list[list[str]]:
    """Split a shell command at its operators; words alone, no redirections.

    Raises:
        ValueError: If a quotation has no end.
    """
    text = text.partition("<<")[0]
    lines = text.split("\n")
    if any(map(_has_an_open_quote, lines)):
        lines = [text]
    return [words for line in lines for words in _simple_commands(line) if words]


def _simple_commands(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    skips = False
    for token in lexer:
        if skips:
            skips = False
        elif _REDIRECTION.fullmatch(token):
            skips = True
            if commands[-1] and commands[-1][-1].isdigit():
                commands[-1].pop()
        elif _OPERATORS.fullmatch(token):
            commands.append([])
        elif commands[-1] or not (token in _KEYWORDS or _ASSIGNMENT.match(token)):
            commands[-1].append(token)
    return commands
