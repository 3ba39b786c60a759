"""The commands of the pages have options that exist, and each is accounted for."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.docs import command_list
from tests.docs.command_accounts import (
    EXECUTED_BY,
    LIST,
    Account,
    account_of,
    commands_of_examples,
    commands_to_account,
    items,
    pages,
    usage_of_tools,
)
from tests.docs.command_options import problem_of
from tests.docs.command_runs import Run, execute, singles, stories
from tests.docs.page_commands import (
    Command,
    PageError,
    PageFile,
    items_of,
    simple_commands,
)
from tests.harness.commands import ROOT

# An sdist lacks some of what the commands run.
pytestmark = pytest.mark.skipif(
    not (ROOT / ".ci").is_dir(), reason="only a checkout has all that commands run"
)
PAGE = """\
Run `tfdp run --max-restarts 5`, or
`tools/storm
--minutes 30`; `train.py` and `tfdp` are no commands.

<!-- file: train.py -->
```python
print("tfdp run --bogus")
```

    tfdp run -n 2 \\
        train.py --name "a # b"   # two workers

    # a comment first
    export A=1
    tfdp doctor

    indented prose about tfdp run
- and a list
    tfdp is its continuation

```console
$ tfdp plan a.keras \\
    --nodes 2
output of tfdp plan
$ tfdp doctor
```

<!-- needs: two hosts -->
```bash
if true; then
  tfdp doctor
fi
cat > f.py <<'EOF'
it's a file
EOF
python f.py
```

<!-- takes: minutes -->
<!-- exits: 3 -->

    python train.py

```text
tfdp output --bogus
```
"""


def commands_of(text: str) -> list[Command]:
    found = items_of("docs/page.md", text)
    return [item for item in found if isinstance(item, Command)]


def the_command(text: str) -> Command:
    (command,) = commands_of(f"    {text}\n")
    return command


def test_commands_and_files_of_a_page_are_found_with_their_lines():
    found = items_of("docs/page.md", PAGE)
    assert [(item.line, item.text.split("\n")[0]) for item in found] == [
        (1, "tfdp run --max-restarts 5"),
        (2, "tools/storm --minutes 30"),
        (7, 'print("tfdp run --bogus")'),
        (10, 'tfdp run -n 2 train.py --name "a # b"'),
        (14, "export A=1"),
        (15, "tfdp doctor"),
        (22, "tfdp plan a.keras --nodes 2"),
        (25, "tfdp doctor"),
        (30, "if true; then"),
        (33, "cat > f.py <<'EOF'"),
        (36, "python f.py"),
        (42, "python train.py"),
    ]
    kinds = [getattr(item, "kind", "file") for item in found]
    assert kinds == ["inline"] * 2 + ["file"] + ["block"] * 9


def test_comments_before_a_block_hold_for_its_commands():
    found = {item.line: item for item in commands_of(PAGE)}
    assert {c.needs for line, c in found.items() if 30 <= line <= 36} == {"two hosts"}
    assert (found[42].takes, found[42].exits, found[42].needs) == ("minutes", 3, "")
    assert found[15].before == ("export A=1",)
    assert account_of(found[42]) == Account("runs", "minutes")
    assert account_of(found[14]) == Account("shell")
    assert account_of(found[10]) == Account("runs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- needs: MPI -->\nProse.\n", "docs/page.md:2: .* before a block"),
        ("<!-- file: a.py -->\n", "stands before nothing"),
        ("<!-- exits: 1 -->\n```python\nx = 1\n```\n", "a block of python"),
    ],
)
def test_a_comment_that_stands_before_no_block_is_refused(text: str, message: str):
    with pytest.raises(PageError, match=message):
        items_of("docs/page.md", text)


def test_a_line_is_split_into_simple_commands():
    text = (
        "A=1 tfdp doctor > f 2>&1 && until python a.py; do sleep 2; done | grep 'a|b'"
    )
    assert simple_commands(text) == [
        ["tfdp", "doctor"],
        ["python", "a.py"],
        ["sleep", "2"],
        ["grep", "a|b"],
    ]


@pytest.mark.parametrize("page", pages())
def test_the_options_of_all_commands_of_a_page_exist(page: str):
    assert_right(item for item in items(page) if isinstance(item, Command))


def assert_right(commands: Iterable[Command]) -> None:
    problems = list(filter(None, map(problem_of, commands)))
    assert not problems, "\n".join(problems)


def test_the_options_of_all_commands_in_examples_and_tools_exist():
    commands = [*commands_of_examples(), *usage_of_tools()]
    found = {"tools/exactness", "tools/faults", "examples/digits_cnn.py"}
    assert found <= {command.page for command in commands}
    assert_right(commands)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tfdp run -n 2 --restarts 5 train.py", "No such option '--restarts'"),
        ("tfdp launch -n 2 train.py", "tfdp has no command launch"),
        ("tfdp plan a.keras --nodes 2", "--replicas-per-node"),
        (
            "tfdp run -n 2 examples/digits_cnn.py --fast",
            "unrecognized arguments: --fast",
        ),
        ("tfdp run -n 2 examples/gone.py", "there is no examples/gone.py"),
        ("srun -n 2 tfdp doctr", "tfdp has no command doctr"),
        ("docker run --entrypoint tfdp image doctr", "tfdp has no command doctr"),
        ("python -m tools.bench monitorr", "no command monitorr"),
        ("python -m tools.bench monitor --models cnnn", "cnnn"),
        ("tools/faults --counts 2", "unrecognized arguments: --counts"),
        ("tools/storm --minutes soon", "invalid float value"),
        ("tools/lint --mend", "does not take --mend"),
        ("tools/demo --fast", "unrecognized arguments: --fast"),
        ("tools/test --fulll", "pytest does not take --fulll"),
        ("tools/gone", "there is no tools/gone"),
        ("pip install .[gpu]", "no extra of the name gpu"),
        ("python train.py | frobnicate", "frobnicate is not a program that"),
    ],
)
def test_a_wrong_command_is_named_with_its_page_and_line(text: str, says: str):
    problem = problem_of(the_command(text))
    assert problem.startswith(f"docs/page.md:1: `{text}`: ")
    assert says in problem


@pytest.mark.parametrize("text", ["`tfdp run --restart 5`", "`tfdp benhc train`"])
def test_a_wrong_command_in_prose_is_found_too(text: str):
    (command,) = commands_of(f"Say {text} then.\n")
    assert problem_of(command)


@pytest.mark.parametrize(
    "text",
    ["`tfdp run --max-restarts R`", "`tfdp run ...`", "`tools/faults --only KIND`"],
)
def test_a_command_in_prose_may_lack_arguments_and_have_names_for_values(text: str):
    (command,) = commands_of(f"Say {text} then.\n")
    assert problem_of(command) == ""


def test_what_needs_a_cluster_is_listed_with_its_need():
    assert (
        account_of(the_command("srun -n 4 python train.py")).text == "a Slurm cluster"
    )
    assert account_of(the_command("TF_CONFIG='{}' python a.py")).text == "two hosts"
    (marked,) = commands_of("<!-- needs: a GPU -->\n\n    tfdp doctor\n")
    assert account_of(marked) == Account("needs", "a GPU")


@pytest.mark.parametrize("command", EXECUTED_BY)
def test_what_is_executed_elsewhere_is_executed_there(command: str):
    path, words = EXECUTED_BY[command]
    assert words in (ROOT / path).read_text("utf-8"), f"{path} lacks `{words}`"


def test_every_command_is_executed_or_listed():
    executed = {item for run in [*stories(), *singles()] for item in run.items}
    texts = {(*c.before, c.text) for c in executed if isinstance(c, Command)}
    listed = (ROOT / LIST).read_text("utf-8")
    lost = [
        f"{command.where}: `{command.text}` is neither executed nor in {LIST}; run "
        "python -m tests.docs.command_list"
        for command in commands_to_account()
        if account_of(command).how != "shell"
        and (*command.before, command.text) not in texts
        and command_list.as_code(command.text) not in listed
    ]
    assert not lost, "\n".join(lost)


def test_the_list_of_commands_that_are_not_executed_is_that_of_the_pages():
    listed = (ROOT / LIST).read_text("utf-8").splitlines()
    stale = sorted(set(listed) ^ set(command_list.page().splitlines()))
    lines = "\n".join(stale)
    assert not stale, f"{LIST} is stale; run python -m tests.docs.command_list\n{lines}"


def test_a_page_with_files_is_told_in_one_folder(monkeypatch):
    from tests.docs import command_runs

    told = tuple(items_of("docs/page.md", PAGE))
    monkeypatch.setattr(command_runs, "items", lambda page: told)
    story = command_runs._story("docs/page.md")
    assert story
    assert [item.line for item in story.items] == [7, 10, 15, 22, 25]
    assert isinstance(story.items[0], PageFile)


def executed(tmp_path, *items: Command | PageFile) -> None:
    execute(Run("docs/page.md", False, items), tmp_path, tmp_path)


@pytest.mark.parametrize("text", ["false", "false | cat", "cd gone", "grep b train.py"])
def test_a_command_that_fails_is_named_with_its_page_and_line(text: str, tmp_path):
    file = PageFile("docs/page.md", 3, "train.py", "a\n")
    with pytest.raises(AssertionError, match=r"docs/page.md:7: .* ended with code 1"):
        executed(tmp_path, file, Command("docs/page.md", 7, text))


def test_a_command_has_the_newest_file_above_it_and_the_code_the_page_says(tmp_path):
    def at(line: int, text: str, **given) -> Command:
        return Command("docs/page.md", line, text, **given)

    executed(
        tmp_path,
        at(1, "grep first data/train.py"),
        PageFile("docs/page.md", 2, "data/train.py", "first\n"),
        at(3, "grep first train.py", before=("cd data",)),
        PageFile("docs/page.md", 4, "data/train.py", "second\n"),
        at(5, "grep first data/train.py", exits=1),
        at(6, "test -f examples/digits_cnn.py && test -x tools/test"),
    )
