"""The check of words finds phrases in prose, and leaves quotes and code alone."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location(
    "vocabulary", ROOT / "tools" / "vocabulary.py"
)
assert SPEC is not None
assert SPEC.loader is not None
vocabulary = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(vocabulary)

CODE = """'''A module.'''

# A comment that goes
# on for ever.
text = "training goes on"


class Worker:
    '''Who waits for nobody.'''
"""
PAGE = """# Page

Training goes on.

```python
loop()  # goes on
```

    tfdp run  # goes on

`training goes on` is a message, and nobody reads it.
"""


def found_in(folder: pathlib.Path, name: str, text: str) -> list[tuple[int, str]]:
    path = folder / name
    path.write_text(text, "utf-8")
    return [(each.line, each.phrase) for each in vocabulary.findings(path)]


def test_phrases_of_comments_and_docstrings_are_found_and_strings_are_not(tmp_path):
    found = found_in(tmp_path, "module.py", CODE)
    assert found == [
        (3, "goes on"),
        (4, "for ever"),
        (9, "Who waits"),
        (9, "nobody"),
    ]


def test_phrases_of_a_page_are_found_outside_of_code_and_quotes(tmp_path):
    assert found_in(tmp_path, "page.md", PAGE) == [(3, "goes on"), (11, "nobody")]


@pytest.mark.parametrize(("text", "code"), [("Plain.", 0), ("It goes on.", 1)])
def test_the_exit_code_says_whether_a_phrase_was_found(
    tmp_path, monkeypatch, text, code
):
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    monkeypatch.setattr(sys, "argv", ["vocabulary.py", str(tmp_path)])
    assert vocabulary.main() == code
