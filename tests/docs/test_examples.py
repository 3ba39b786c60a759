"""The examples run on two workers, as their first lines say, and end as they should."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.harness.commands import ROOT, run_python

WORKERS = 2
DEADLINE_SECONDS = 300
EXAMPLES = {
    "digits": "examples/digits_cnn.py",
    "augmented": "examples/digits_augmented.py",
    "characters": "examples/char_transformer.py",
    "large": "examples/large_model.py",
    "tutorial": "examples/multi_worker_with_keras/main.py",
}
pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture
def run_on_two_workers(tmp_path):
    return functools.partial(_run, tmp_path)


def _run(log_dir: Path, script: str, *args: str) -> str:
    launcher = ("-m", "tfdp", "run", "-n", str(WORKERS), "--log-dir", str(log_dir))
    done = run_python(
        *launcher,
        script,
        *args,
        deadline_seconds=DEADLINE_SECONDS,
    )
    assert done.code == 0, done.output[-5000:]
    # A progress bar redraws its line; each drawing counts as a line here.
    return done.output.replace("\r", "\n").replace("\b", "")


def numbers(pattern: str, output: str) -> list[float]:
    """The numbers in the one line that matches; more or fewer lines are an error."""
    found = re.findall(pattern, output)
    assert len(found) == 1, f"{pattern!r} {len(found)} times in:\n{output[-3000:]}"
    groups = found[0] if isinstance(found[0], tuple) else (found[0],)
    return [float(group) for group in groups]


@pytest.mark.full
def test_digits_example_learns_and_only_the_chief_tells(run_on_two_workers, tmp_path):
    logs = str(tmp_path / "communication")
    output = run_on_two_workers(EXAMPLES["digits"], "--short", "--logs", logs)
    sent, share = numbers(
        r"communicated: ([\d.]+) MB sent .* under way in (\d+) % of the step", output
    )
    assert sent > 30
    assert 0 < share < 100
    (accuracy,) = numbers(r"test accuracy: ([\d.]+) %", output)
    assert accuracy >= 95


@pytest.mark.full
def test_augmented_images_of_two_workers_are_those_of_one_process(run_on_two_workers):
    told = r"images of all epochs: (\w+)"
    output = run_on_two_workers(EXAMPLES["augmented"], "--short")
    (accuracy,) = numbers(r"test accuracy: ([\d.]+) %", output)
    assert accuracy >= 80
    done = run_python(
        EXAMPLES["augmented"], "--short", deadline_seconds=DEADLINE_SECONDS
    )
    assert done.code == 0, done.output[-5000:]
    assert re.findall(told, done.output) == re.findall(told, output) != []


@pytest.mark.full
def test_character_example_loses_less_at_the_end_and_writes_text(run_on_two_workers):
    output = run_on_two_workers(EXAMPLES["characters"], "--short")
    first, last = numbers(r"training loss: from ([\d.]+) to ([\d.]+) nats", output)
    assert last < first - 0.5
    (held_out,) = numbers(r"held-out loss: ([\d.]+) nats", output)
    (bigram,) = numbers(r"bigram's loss: ([\d.]+) nats", output)
    assert held_out < bigram + 0.5
    assert "--- sample" in output


@pytest.mark.full
def test_large_example_trains_within_a_limit_that_its_state_exceeds(run_on_two_workers):
    output = run_on_two_workers(EXAMPLES["large"], "--short")
    (state,) = numbers(r"with Adam's slots: (\d+) MB", output)
    used, limit = numbers(r"peak of memory: (\d+) MB .* \(limit: (\d+) MB\)", output)
    assert used <= limit < state


@pytest.mark.full
def test_large_example_fails_plainly_where_parameters_are_whole():
    launcher = ("-m", "tfdp", "run", "-n", str(WORKERS))
    arguments = (EXAMPLES["large"], "--short", "--sharding", "none")
    done = run_python(*launcher, *arguments, deadline_seconds=DEADLINE_SECONDS)
    assert done.code == 1
    assert re.search(r"out of memory limit: \d+ MB used, \d+ MB allowed", done.output)


@pytest.mark.full
def test_large_example_has_the_loss_of_whole_parameters(run_on_two_workers):
    arguments = (EXAMPLES["large"], "--short", "--limit-mb", "0", "--sharding")
    pattern = r"training loss: from ([\d.]+) to ([\d.]+) nats"
    sharded, whole = (
        numbers(pattern, run_on_two_workers(*arguments, sharding))
        for sharding in ("parameters", "none")
    )
    assert sharded == pytest.approx(whole, rel=1e-4)


@pytest.mark.full
def test_official_tutorial_learns_with_only_the_strategy_line_changed(
    run_on_two_workers,
):
    output = run_on_two_workers(EXAMPLES["tutorial"])
    assert "Epoch 3/3" in output
    accuracies = [float(a) for a in re.findall(r"accuracy: ([\d.]+)", output)]
    # A tenth is chance; three short epochs of SGD reach far above it.
    assert accuracies[-1] > 0.5


def test_the_tutorials_strategy_line_is_the_only_one_that_names_tfdp():
    text = (ROOT / EXAMPLES["tutorial"]).read_text("utf-8")
    lines = [
        ast.unparse(node)
        for node in ast.parse(text).body[1:]
        if "tfdp" in ast.unparse(node)
    ]
    assert lines == ["import tfdp", "strategy = tfdp.MultiWorkerMirroredStrategy()"]


@pytest.mark.parametrize("script", EXAMPLES.values(), ids=EXAMPLES)
def test_each_example_opens_with_the_command_that_runs_it(script):
    docstring = ast.get_docstring(ast.parse((ROOT / script).read_text("utf-8"))) or ""
    lines = [line.strip() for line in docstring.splitlines()]
    assert lines[2] == f"tfdp run -n {WORKERS} {script}"
