"""MkDocs hooks of the docs site: repository files, public names, checks.

`mkdocs.yml` names this file as a hook of MkDocs and as an extension of Griffe,
which reads the docstrings. Pages link to files of the repository as they do on
GitHub (`../tfdp/training/step/path.py`); each such file becomes a page under `source/`,
so that the site is whole by itself and a dead link ends the build. Of these pages only
CONTRIBUTING and the changelog are searched. `llms.txt` lists the pages for programs.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from tools import docs_llms, docs_names

ROOT = Path(__file__).resolve().parents[1]
# A fenced block is left as it is.
LINK = re.compile(
    r"(?ms)^ *```.*?^ *```"
    r"|(?<!!)\[(?P<text>[^\]]*)\]\((?P<to>[^)#\s]+)(?P<at>#[^)\s]*)?\)"
)
# Searched with the pages of docs/: these are prose, and in the navigation.
PROSE = (
    *("source/CONTRIBUTING.md", "source/CHANGELOG.md"),
    "source/examples/tfdp_in_a_notebook.ipynb.md",
)
# What people search for; one of the pages has each.
SEARCHED = (
    *("ssh", "jupyter", "docker", "multi-node", "multi-gpu", "horovod", "ddp", "slurm"),
    *("kubernetes", "nccl", "zero", "windows", "tpu", "elastic", "preemption", "fsdp"),
    *(
        "colab",
        "mlflow",
        "out of memory",
        "oom",
        "tensorboard",
        "checkpoint",
        "sagemaker",
    ),
)
# The members of public classes that users call or read; the rest is for tfdp and Keras.
STRATEGY_MEMBERS = (
    *("scope", "num_replicas_in_sync", "run", "experimental_distribute_dataset"),
    "communication_plan",
)
MEMBERS = {
    "tfdp.MirroredStrategy": STRATEGY_MEMBERS,
    "tfdp.MultiWorkerMirroredStrategy": STRATEGY_MEMBERS,
    "tfdp.DistributedOptimizer": (
        *("accumulation_steps", "loss_scale", "skipped_steps", "accumulated_steps"),
        *("iterations", "learning_rate", "is_sharded", "sharding", "inner_optimizer"),
        *("build", "scale_loss", "apply", "flush", "check_progress"),
        *("exclude_from_weight_decay", "memory_report"),
    ),
    "tfdp.optimizers.LARS": ("exclude_from_layer_adaptation",),
    "tfdp.callbacks.CommunicationMonitor": ("recent",),
    "tfdp.ElasticState": ("commit", "delete"),
    "tfdp.checkpoint.PendingSave": ("wait", "is_done"),
    "tfdp.compression.Compressor": (
        *("state", "reduce", "reduce_scatter", "all_gather"),
        *("wire_ratio", "cuts_buckets"),
    ),
    "tfdp.compression.ReplicaGroup": (
        *("size", "position"),
        *("all_reduce", "all_gather", "all_to_all", "reduce_scatter"),
    ),
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".cfg": "ini"}
SECTION = re.compile(r"^[A-Z][a-z]+:")
# What a browser fetches by itself. Links to other sites are none, nor is a page's own
# address, which `mkdocs serve` writes into it.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|link(?![^>]*rel=.?(?:canonical|prev|next)))\b[^>]*?"
    r"""\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:url\(|@import )["']?((?:https?:)?//[^"')\s]+)"""
)


# Links to files of the repository.


def on_config(config: Any) -> Any:
    """Give headings the anchors that GitHub gives them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = _anchor
    return config


def _anchor(heading: str, separator: str) -> str:
    """Compute an anchor as tools/docs_check.py does, which checks links earlier."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", separator)


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file of the repository that a page links to."""
    missing = docs_names.missing_names()
    if missing:
        raise PluginError(f"docs/api.md has no entry for {', '.join(missing)}")
    linked = sorted({path for file in list(files) for path in _linked_by(file)})
    for path in linked:
        text = (ROOT / path).read_text("utf-8")
        content = text if path.endswith(".md") else _as_page(path, text)
        files.append(File.generated(config, _page_of(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links to pages of the site, and public names to their definitions."""
    uri = page.file.src_uri
    if uri.startswith("source/") and uri not in PROSE:
        page.meta["search"] = {"exclude": True}
        # HTML is not a link of MkDocs: README's pictures lie beside the other pages.
        markdown = markdown.replace('src="docs/', 'src="../')
    known = {file.src_uri for file in files}
    markdown = LINK.sub(lambda match: _relink(match, uri, known), markdown)
    return docs_names.ENTRY.sub(lambda match: _reference(match[1]), markdown)


def _linked_by(file: Any) -> Iterator[str]:
    """Find the files outside of docs/ that a page links to."""
    if not file.is_documentation_page():
        return
    for match in LINK.finditer(file.content_string):
        path = _target(match, file.src_uri)
        is_outside = path is not None and not path.startswith(("docs/", ".."))
        if path and is_outside and (ROOT / path).is_file():
            yield path


def _target(match: re.Match[str], uri: str) -> str | None:
    """Resolve a link to a path in the repository."""
    to = match["to"]
    if to is None or re.match(r"[a-z]+:|/", to):
        return None
    source = "docs/" + uri
    if uri.startswith("source/"):
        # A page of the repository links as it does where it stands.
        source = "./" + uri.removeprefix("source/")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), to))


def _page_of(path: str) -> str:
    """Name the page that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _relink(match: re.Match[str], uri: str, known: set[str]) -> str:
    path = _target(match, uri)
    if path is None:
        return match[0]
    page = _page_of(path)
    if page in known:
        relative = posixpath.relpath(page, posixpath.dirname(uri) or ".")
        return f"[{match['text']}]({relative}{match['at'] or ''})"
    # README links to files that are no pages of the site: these stay words.
    is_file = uri.startswith("source/") and (ROOT / path).exists()
    return match["text"] if is_file else match[0]


def _as_page(path: str, text: str) -> str:
    if path.endswith(".ipynb"):
        return _notebook_page(path, text)
    language = LANGUAGES.get(Path(path).suffix, "")
    if not language and text.startswith("#!"):
        language = "python" if "python" in text.partition("\n")[0] else "bash"
    return f"# {path}\n\n`````{language}\n{text}\n`````\n"


def _notebook_page(path: str, text: str) -> str:
    """Show the cells of a notebook, which is kept without outputs."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if is_code else source)
    return "\n\n".join([*parts, f"(This is `{path}`.)"]) + "\n"


# Public names.


def _reference(name: str) -> str:
    """Write mkdocstrings' blocks for a name: definition, options, heading."""
    found = docs_names.entries(name)
    if not found:
        raise PluginError(f"docs/api.md: {name} is no public name of tfdp")
    for public, home in found.items():
        if not docs_names.docstring_of(public, home):
            raise PluginError(f"{public}: no docstring")
    return "\n".join(_block(public, home) for public, home in found.items())


def _block(public: str, home: str) -> str:
    # Without a list mkdocstrings shows what is inherited, whatever `members` says.
    members = json.dumps(MEMBERS.get(public, False))
    return (
        f"::: {home}.{public.rpartition('.')[2]}\n    options:\n"
        f"      heading: {public}\n      toc_label: {public}\n"
        f"      members: {members}\n      inherited_members: {members}\n"
    )


# Docstrings in Keras's style.


class KerasDocstrings(griffe.Extension):
    """Griffe extension that shows Keras's unindented examples as a section."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of each object that is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = with_sections(obj.docstring.value)


def with_sections(docstring: str) -> str:
    """Indent what follows `Example:`, up to the next section.

    Args:
        docstring: String, without the indentation of the code.

    Returns:
        String, in Google's style.
    """
    lines, in_example = [], False
    for line in docstring.splitlines():
        if re.fullmatch(r"Examples?:", line):
            in_example = True
            lines += ["Examples:"]
        elif in_example and SECTION.match(line):
            in_example = False
            lines.append(line)
        else:
            lines.append(f"    {line}" if in_example and line else line)
    return "\n".join(lines)


# The finished site.


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Add llms.txt, the list of the pages for programs."""
    head = f"# {config.site_name}\n\n> {config.site_description}\n"
    content = head + docs_llms.list_of(nav.pages)
    files.append(File.generated(config, "llms.txt", content=content))
    return nav


def on_post_build(config: Any) -> None:
    """End the build where a page or the search is not as it must be."""
    site = Path(config.site_dir)
    found = [*_fetched(site), *_wrong_members(site), *_search_problems(site)]
    if found:
        raise PluginError("\n".join(found))


def _fetched(site: Path) -> Iterator[str]:
    """Find what a browser would ask another host for."""
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            for match in FETCHED.finditer(path.read_text("utf-8")):
                addresses = " ".join(filter(None, match.groups()))
                yield f"{path.relative_to(site)}: fetches {addresses}"


def _wrong_members(site: Path) -> Iterator[str]:
    """Compare the entries of the API reference with the public names and MEMBERS."""
    wanted = set()
    for public, module in docs_names.documented_names().items():
        home = f"{module}.{public.rpartition('.')[2]}"
        wanted |= {home, *(f"{home}.{name}" for name in MEMBERS.get(public, ()))}
    page = (site / "api.html").read_text("utf-8")
    shown = set(re.findall(r'<h\d id="(tfdp\.[^"]+)"', page))
    for name in sorted(wanted - shown):
        yield f"tools/docs_hooks.py: the API reference has no {name}"
    for name in sorted(shown - wanted):
        yield f"tools/docs_hooks.py: the API reference shows {name}, which is internal"


def _search_problems(site: Path) -> Iterator[str]:
    """Look for source files in the search, and for words that nobody would find."""
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    for entry in index["docs"]:
        page = entry["location"].partition("#")[0].replace(".html", ".md")
        if page.startswith("source/") and page not in PROSE:
            yield f"{page}: is found by the search"
    text = " ".join(f"{entry['title']} {entry['text']}" for entry in index["docs"])
    for word in SEARCHED:
        if not re.search(rf"\b{word}", text, re.IGNORECASE):
            yield f"the search finds no {word}"
