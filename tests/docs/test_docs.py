"""The pages of docs/ say what the source says."""

from __future__ import annotations

import ast
import functools
import re
import xml.etree.ElementTree

import pytest

from tests.harness.commands import ROOT
from tools import docs_llms, docs_names

DOCS = ROOT / "docs"
PAGE = DOCS / "troubleshooting.md"
# What stands for the parts of a message that vary.
VARIES = "\0"
# A quoted message: the first line of an item, whose text below is its cause and remedy.
QUOTE = re.compile(r"^- (?P<ticks>`+)(?P<text>.+?)(?P=ticks)(?:, a warning)?:$", re.M)


def text_of(node: ast.expr) -> str | None:
    """The text of a string in the source, with `VARIES` for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or VARIES for part in node.values)
    return None


@functools.cache
def sources() -> dict[str, ast.Module]:
    paths = sorted((ROOT / "tfdp").rglob("*.py"))
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in paths
    }


@functools.cache
def strings() -> list[str]:
    """All strings of the source that could be messages."""
    expressions = (
        node
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.expr)
    )
    texts = (text_of(node) for node in expressions)
    return sorted({text for text in texts if text and " " in text})


@functools.cache
def quotes() -> list[str]:
    return [match["text"] for match in QUOTE.finditer(PAGE.read_text("utf-8"))]


def stands_in(quote: str, text: str) -> bool:
    """Whether a text is the quoted message; `...` stands for anything."""
    position = 0
    for fragment in quote.strip().split("..."):
        position = text.find(fragment, position)
        if position < 0:
            return False
        position += len(fragment)
    return True


def test_troubleshooting_quotes_many_messages_and_none_twice():
    found = quotes()
    assert len(found) >= 25
    # None is left out since its line has another form.
    assert len(re.findall(r"^- `", PAGE.read_text("utf-8"), re.M)) == len(found)
    assert len(set(found)) == len(found)
    # A message that begins with a name begins with its backtick, too.
    assert [quote for quote in found if quote.count("`") % 2] == []


@pytest.mark.parametrize("quote", quotes())
def test_each_message_in_troubleshooting_still_stands_in_the_source(quote):
    assert len(quote.replace("...", "")) > 12, "this would fit any message"
    assert any(stands_in(quote, text) for text in strings())


LIMITS = DOCS / "limits.md"
# Code of several words in the second cell of the table of limits: a message.
CELL = re.compile(r"^\| [^|]* \| (?P<cell>[^|]*) \|", re.M)
MESSAGE = re.compile(r"(?P<ticks>`+)(?P<text>.+?)(?P=ticks)(?!`)")


def messages_of_limits() -> list[str]:
    cells = [match["cell"] for match in CELL.finditer(LIMITS.read_text("utf-8"))]
    texts = [match["text"] for cell in cells for match in MESSAGE.finditer(cell)]
    return [text for text in texts if len(text.split()) > 3]


def test_limits_quote_messages():
    assert len(messages_of_limits()) >= 7


@pytest.mark.parametrize("message", messages_of_limits())
def test_each_message_in_limits_still_stands_in_the_source(message):
    assert len(message.replace("...", "")) > 12, "this would fit any message"
    assert any(stands_in(message, text) for text in strings())


def test_every_public_name_has_an_entry_in_the_api_reference():
    assert docs_names.missing_names() == []


def test_every_entry_of_the_api_reference_is_a_public_name_with_a_docstring():
    entries = docs_names.ENTRY.findall(docs_names.API_PAGE.read_text("utf-8"))
    for entry in entries:
        found = docs_names.entries(entry)
        assert found, entry
        for name, home in found.items():
            assert docs_names.docstring_of(name, home), name


def test_the_names_that_are_found_without_importing_are_those_of_all():
    tfdp = pytest.importorskip("tfdp")
    found = {name.split(".")[1] for name in docs_names.public_names()}
    assert found == set(tfdp.__all__)


def test_a_name_without_entry_is_found(tmp_path, monkeypatch):
    page = tmp_path / "api.md"
    text = docs_names.API_PAGE.read_text("utf-8")
    page.write_text(text.replace("::: tfdp.callbacks\n", ""), "utf-8")
    monkeypatch.setattr(docs_names, "API_PAGE", page)
    assert "tfdp.callbacks.LossScaling" in docs_names.missing_names()


def test_options_has_a_row_for_each_field():
    tree = sources()["tfdp/ground/options.py"]
    (options,) = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "CommunicationOptions"
    ]
    fields = [
        ast.unparse(n.target) for n in options.body if isinstance(n, ast.AnnAssign)
    ]
    page = (DOCS / "options.md").read_text("utf-8")
    table = page.partition("| option |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == fields


def test_callbacks_has_a_row_for_each_callback():
    names = docs_names.entries("tfdp.callbacks")
    page = (DOCS / "callbacks.md").read_text("utf-8")
    rows = set(re.findall(r"^\| \[?`(\w+)`", page, re.M))
    assert {name.rpartition(".")[2] for name in names} <= rows


def test_the_picture_of_a_step_is_well_formed_and_asks_no_other_host():
    picture = DOCS / "images" / "step.svg"
    root = xml.etree.ElementTree.parse(picture).getroot()
    assert root.tag.endswith("svg")
    text = picture.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text


def test_every_page_stands_in_the_menu_once():
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w/.-]+\.md)$", menu, re.M)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(set(listed)) == len(listed)
    # The others are files of the repository, which tools/docs_hooks.py makes pages of.
    in_menu = {name for name in listed if not name.startswith("source/")}
    assert in_menu == pages


def test_the_list_of_pages_has_the_first_sentence_of_each_page():
    page = (
        "---\nhide: [toc]\n---\n\n# Title\n\n    a command\n\nOne [link](a.md). Two.\n"
    )
    assert docs_llms.first_sentence(page) == "One link."
    code = "# Title\n\n```bash\n# a comment\nrun\n```\n"
    assert docs_llms.first_sentence(code) == ""


def test_every_page_begins_with_a_sentence():
    pages = [p for p in DOCS.rglob("*.md") if p.name not in ("api.md", "index.md")]
    found = {
        page.name: docs_llms.first_sentence(page.read_text("utf-8")) for page in pages
    }
    assert [name for name, text in found.items() if len(text.split()) < 4] == []
