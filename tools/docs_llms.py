"""The list of the pages in llms.txt, which programs read: see https://llmstxt.org."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

TITLE = re.compile(r"(?m)^# .*\n")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def list_of(pages: Iterable[Any]) -> str:
    """List pages by section, each with the first sentence of its text.

    Args:
        pages: MkDocs' pages, in the order of the navigation.

    Returns:
        String, Markdown.
    """
    lines, section = [""], None
    for page in pages:
        title = page.parent.title if page.parent else None
        if title != section:
            section = title
            lines += ["", f"## {section or 'More'}", ""]
        about = first_sentence(page.file.content_string)
        line = f"- [{page.title}]({page.file.url})"
        lines.append(f"{line}: {about}" if about else line)
    return "\n".join(lines) + "\n"


def first_sentence(markdown: str) -> str:
    """Find the first sentence below the title of a page.

    Args:
        markdown: String.

    Returns:
        String without links and line breaks; `""` if the page has only a list or code.
    """
    _, *rest = TITLE.split(markdown, maxsplit=1)
    for paragraph in "".join(rest).split("\n\n"):
        text = " ".join(paragraph.split())
        if re.match(r"[A-Z]|`(?!`)", text):
            return re.split(r"(?<=[.:]) ", LINK.sub(r"\1", text))[0].rstrip(":")
    return ""
