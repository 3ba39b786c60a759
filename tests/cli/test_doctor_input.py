"""`tfdp doctor --input`: what it measures, and a sentence for what it cannot."""

from __future__ import annotations

import glob
import os
import re
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.harness.commands import Finished, run_command
from tests.harness.tiers import full
from tfdp.launch.cli.main import cli

DEADLINE_SECONDS = 200
MODEL = """
import sys, time
import keras, tensorflow as tf, tfdp
strategy = tfdp.auto_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **OPTIONS)
def data(batches, function=lambda x: x):
    numbers = tf.data.Dataset.range(4 * batches)
    numbers = numbers.map(lambda i: tf.cast(i, tf.float32)[None])
    return numbers.map(function).batch(4).map(lambda x: (x, x))
"""


def doctor(folder: Path, script: str, *arguments: str, **options: str) -> Finished:
    """Writes a script and runs the command on it."""
    text = MODEL.replace("**OPTIONS", options.pop("compiled", ""))
    path = folder / "train.py"
    path.write_text(text + textwrap.dedent(script))
    words = [word if word != "SCRIPT" else str(path) for word in arguments]
    return run_command(
        *(sys.executable, "-m", "tfdp", "doctor", *words),
        deadline_seconds=DEADLINE_SECONDS,
        environment={"TMPDIR": str(folder), "COLUMNS": "200"},
    )


def shares(output: str) -> dict[int, int]:
    """The share of each worker in the table, in percent."""
    rows = re.findall(r"│ (\d+) +│ .* ms │ .* ms │ +(\d+)% │", output)
    return {int(rank): int(share) for rank, share in rows}


@pytest.mark.processes
@pytest.mark.full
def test_each_worker_is_shown_with_its_share_and_one_sentence_of_advice(tmp_path):
    found = doctor(
        tmp_path,
        """
        def slow(x):
            time.sleep(0.03)
            return x
        def load(x):
            x = tf.numpy_function(slow, [x], tf.float32, stateful=False)
            return tf.ensure_shape(x, [1])
        assert sys.argv[1:] == ["--flag", "-n"], sys.argv
        checkpoint = keras.callbacks.ModelCheckpoint(sys.argv[0] + ".keras")
        model.fit(data(30, load), epochs=9, verbose=0, callbacks=[checkpoint])
        """,
        *("-n", "2", "--steps", "40", "--input", "SCRIPT", "--flag", "-n"),
    )
    assert found.code == 0, found.output
    assert "Waiting for data: train.py, 30 steps" in found.output
    told = shares(found.output)
    assert set(told) == {0, 1}
    # A worker has two rows of a batch, which take 60 ms.
    assert max(told.values()) > 50, found.output
    # The last `map` stands behind `batch`.
    assert "each worker prepares all rows, not only its own" in found.output
    assert (
        "Removed from `fit`, since they write files: ModelCheckpoint." in found.output
    )
    # It ended in the second epoch, after what the first one would have saved.
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.processes
@pytest.mark.full
def test_a_step_that_computes_does_not_wait(tmp_path):
    found = doctor(
        tmp_path,
        """
        with strategy.scope():
            dense = [keras.layers.Dense(1500) for _ in range(4)]
            model = keras.Sequential([keras.Input((1,)), *dense, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = tf.zeros([60 * 256, 1])
        model.fit(x, x, batch_size=256, verbose=0)
        """,
        *("--steps", "30", "--input", "SCRIPT"),
    )
    assert found.code == 0, found.output
    (share,) = shares(found.output).values()
    assert share < 30, found.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "options", "sentence"),
    [
        (
            "raise OSError('no such data')",
            {},
            "Worker 0 failed with exit code 1 before",
        ),
        full("print('done')", {}, "The script has ended without a call of `fit`"),
        full("model.fit(data(4), verbose=0)", {}, "too soon: 3 steps could be"),
        full(
            "model.fit(data(99), verbose=0)",
            {"compiled": "steps_per_execution=3"},
            "remove `steps_per_execution`",
        ),
        full(
            "strategy = tf.distribute.MirroredStrategy(['CPU:0'])\n"
            "model = keras.Sequential([keras.layers.Dense(1)])\n"
            "model.compile('sgd', 'mse')\n"
            "model.fit(data(99), verbose=0)",
            {},
            "the model has no strategy of tfdp",
        ),
    ],
    ids=["fails", "no fit", "too short", "several steps at once", "no strategy"],
)
def test_what_cannot_be_measured_gets_one_sentence(tmp_path, script, options, sentence):
    found = doctor(tmp_path, script, "--input", "SCRIPT", **options)
    assert found.code == 2, found.output
    *before, last = found.output.splitlines()
    assert last.startswith("tfdp: error: ")
    assert sentence in last
    assert last.endswith(f"Received: {tmp_path / 'train.py'}")
    if "OSError" in script:
        assert before[-1] == "OSError: no such data"
        (log,) = glob.glob(str(tmp_path / "tfdp-input-*" / "worker-0.log"))
        assert log in last
    else:
        assert not before
        assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.full
@pytest.mark.processes
def test_a_script_that_takes_too_long_is_ended(tmp_path):
    found = doctor(
        tmp_path, "time.sleep(600)", *("--timeout", "6", "--input", "SCRIPT")
    )
    assert found.code == 2
    assert "--timeout ended the script before its first step" in found.output
    assert found.output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--input"], "Give the script to run"),
        (["train.py"], "A script needs --input"),
        (["-n", "2"], "an option of --input, which was not given. Received: -n 2"),
        (["--timeout", "9", "--steps", "3"], "Received: --steps 3, --timeout 9"),
        (["--timeout", "0"], "Received: --timeout 0"),
        (["--input", "nothing.py"], "The script does not exist"),
        (["--input", "-n", "100000", "SCRIPT"], "too many workers"),
    ],
)
def test_wrong_arguments_get_one_sentence(tmp_path, arguments, sentence):
    script = tmp_path / "train.py"
    script.write_text("")
    words = [word if word != "SCRIPT" else str(script) for word in arguments]
    before = set(os.listdir(tempfile.gettempdir()))
    result = CliRunner().invoke(cli, ["doctor", *words])
    assert result.exit_code == 2
    assert sentence in result.output
    made = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in made if name.startswith("tfdp-input-")]
