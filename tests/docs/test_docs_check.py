"""Checks of CONTRIBUTING and docs/step.md: they find what is missing or wrong."""

from __future__ import annotations

from tools import count_lines, docs_check


def test_a_floor_without_line_in_contributing_is_found(tmp_path, monkeypatch):
    page = tmp_path / "CONTRIBUTING.md"
    lines = docs_check.CONTRIBUTING.read_text("utf-8").splitlines()
    page.write_text("\n".join(x for x in lines if "[`training`]" not in x), "utf-8")
    monkeypatch.setattr(docs_check, "CONTRIBUTING", page)
    (found,) = docs_check.check_packages()
    assert found.startswith("CONTRIBUTING.md: ")
    assert "checkpoint, training, communication" in found.partition("; they are ")[0]
    assert "checkpoint, communication" in found.partition("; they are ")[2]


def test_rooms_of_a_floor_stand_in_the_order_of_its_contract(monkeypatch):
    layers = docs_check.layers()
    layers["launch"] = layers["launch"][::-1]
    monkeypatch.setattr(docs_check, "layers", lambda: layers)
    (found,) = docs_check.check_packages()
    assert found == (
        "tfdp/launch/__init__.py: the lines of the packages should be those of "
        "bench, rendezvous, cli, in this order; they are cli, rendezvous, bench"
    )


def test_a_file_that_its_package_does_not_name_is_found(monkeypatch):
    assert list(docs_check.check_packages()) == []
    found_in = docs_check.modules_of
    monkeypatch.setattr(
        docs_check, "modules_of", lambda package: [*found_in(package), "newcomer"]
    )
    first, *others = docs_check.check_packages()
    assert first.endswith("the docstring does not name newcomer")
    assert len(others) == len(docs_check.packages()) - 1


def test_a_walk_that_names_what_is_not_there_is_found(tmp_path, monkeypatch):
    assert list(docs_check.check_walk()) == []
    page = tmp_path / "step.md"
    text = docs_check.WALK.read_text("utf-8")
    page.write_text(text.replace("`save_state`", "`save_all`"), "utf-8")
    monkeypatch.setattr(docs_check, "WALK", page)
    (found,) = docs_check.check_walk()
    assert found.endswith("tfdp/checkpoint/api.py defines no save_all")


def test_a_dead_link_on_a_page_of_a_subfolder_is_found(tmp_path, monkeypatch):
    folder = tmp_path / "docs" / "howto"
    folder.mkdir(parents=True)
    (tmp_path / "docs" / "index.md").write_text("# Start\n", "utf-8")
    (folder / "ssh.md").write_text(
        "[`start`](../index.md#start) [gone](index.md) ![picture](none.png)\n"
        '[no heading](../index.md#end "title") `table["a"](x)`\n',
        "utf-8",
    )
    monkeypatch.setattr(docs_check, "ROOT", tmp_path)
    monkeypatch.setattr(docs_check, "markdown_pages", lambda: ["docs/howto/ssh.md"])
    assert list(docs_check.check_links()) == [
        "docs/howto/ssh.md: link to index.md, which is not there",
        "docs/howto/ssh.md: link to none.png, which is not there",
        "docs/howto/ssh.md: link to ../index.md#end: no such heading",
    ]


def test_pages_of_subfolders_are_walked(monkeypatch):
    listed = ["docs/howto/ssh.md", "docs/index.md", "tfdp/ground/options.py"]
    monkeypatch.setattr(docs_check, "tracked_files", lambda: listed)
    assert docs_check.markdown_pages() == listed[:2]


def test_lines_of_code_are_counted_without_docstrings_comments_and_blanks():
    source = """'A module.'

# Why not?
def greet(name):
    '''Say hello.

    Politely.
    '''
    print(  # loudly
        'hello', name,

    )
"""
    assert count_lines.lines_of_code(source) == 4
