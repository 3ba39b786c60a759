"""Training that goes back to a backup, without a bad batch, and is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.elastic import job
from tests.harness import common
from tests.harness.interrupted import Layout, Result, run
from tests.spikes import cases_spikes as spikes
from tests.spikes import interrupted_guard, lost_at_a_spike

ONE_PROCESS, TWO_WORKERS, TWO_BY_TWO = Layout(1, 2), Layout(2, 1), Layout(2, 2)


def train(layout: Layout, folder: Path, **arguments) -> Result:
    return run(layout, interrupted_guard.fit, folder, arguments)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Result]:
    """Trains on one device without the bad batches, and with a guard on two workers."""
    folder = tmp_path_factory.mktemp("run")
    return {
        "one device": train(Layout(1, 1), folder, without=True),
        "guarded": train(TWO_WORKERS, folder, directory=str(folder / "backups")),
    }


# In the quick tier a case goes back, too.
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
# The spikes come after 10 and, with up to 2 batches that are made again, 22 batches.
@pytest.mark.parametrize("after", [11, 4, 14, 23])
def test_a_run_that_is_killed_around_a_rollback_ends_bit_for_bit_as_another(
    after, undisturbed, tmp_path
):
    wanted, directory = undisturbed["guarded"], str(tmp_path / "backups")
    assert wanted.output.count("going back to the newest backup") == 2
    first = train(TWO_WORKERS, tmp_path, directory=directory, kill_after=after)
    assert first.codes[1] == -signal.SIGKILL, first.output[-3000:]
    found = train(TWO_WORKERS, tmp_path, directory=directory)
    assert found.weights is not None, found.output[-3000:]
    assert found.history == wanted.history
    for name, value in wanted.weights.items():
        np.testing.assert_array_equal(found.weights[name], value)
    table = [line for line in found.output.splitlines() if line.endswith(("before",))]
    assert len(table) == 1, found.output


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_the_loss_of_the_micro_batches_before_a_kill_counts(tmp_path):
    options = {"action": "skip", "accumulation": 2}
    # The backup after 15 batches has the loss of the first micro-batch of an update.
    wanted = train(TWO_BY_TWO, tmp_path, directory=str(tmp_path / "one"), **options)
    directory = str(tmp_path / "other")
    first = train(TWO_BY_TWO, tmp_path, directory=directory, kill_after=16, **options)
    assert first.codes[1] == -signal.SIGKILL, first.output[-3000:]
    found = train(TWO_BY_TWO, tmp_path, directory=directory, **options)
    assert found.history == wanted.history
    for name, value in wanted.weights.items():
        np.testing.assert_array_equal(found.weights[name], value)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "layout", [ONE_PROCESS, TWO_WORKERS, TWO_BY_TWO], ids=lambda x: x.name
)
@pytest.mark.parametrize(
    "options", [{"memory_every": 4, "save_freq": "epoch"}, {"save_freq": 3}]
)
def test_a_rollback_gives_what_one_device_gives_without_the_batches(
    layout, options, undisturbed, tmp_path
):
    wanted = undisturbed["one device"]
    found = train(layout, tmp_path, directory=str(tmp_path / "backups"), **options)
    assert found.weights is not None, found.output[-3000:]
    assert found.history.pop("skipped_spikes") == [0, 1, 2]
    np.testing.assert_allclose(found.history["loss"], wanted.history["loss"], rtol=1e-5)
    for name, value in wanted.weights.items():
        error = np.abs(found.weights[name] - value) / max(np.abs(value).max(), 1e-3)
        assert error.max() <= 1e-5, name


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_all_go_back_alike_if_a_worker_is_lost_at_a_spike(tmp_path):
    script = lost_at_a_spike.train
    wanted = job.on_one_device(tmp_path / "one", script=script)
    outcome = job.run(tmp_path / "three", 3, script=script)
    assert outcome.codes == [0, 0, -signal.SIGKILL], outcome.output[-3000:]
    for result in outcome.results.values():
        job.assert_same(result, wanted)


def test_a_rollback_without_backups_is_refused():
    guard = tfdp.callbacks.SpikeGuard(action="rollback")
    with pytest.raises(ValueError, match=r"goes back to a backup: pass `tfdp\.callb"):
        common.fit(common.compiled(common.mlp()), *spikes.data(), callbacks=[guard])


def test_a_rollback_with_data_that_cannot_be_read_again_is_refused(tmp_path):
    batches = common.batched(*spikes.data())
    generated = tf.data.Dataset.from_generator(
        lambda: batches, output_signature=batches.element_spec
    )
    callbacks = [
        tfdp.callbacks.SpikeGuard(action="rollback"),
        tfdp.callbacks.BackupAndRestore(tmp_path),
    ]
    model = common.compiled(common.mlp())
    for data, text in (
        (iter(batches), "not an iterator"),
        (batches.shuffle(4).filter(lambda x, y: True), "in the same order"),
        (generated, "which cannot be restored: a Python generator"),
    ):
        with pytest.raises(ValueError, match=text):
            common.fit(model, data, callbacks=callbacks)


def test_more_than_skipping_with_local_steps_is_refused():
    callbacks = [
        tfdp.callbacks.SpikeGuard(action="stop"),
        tfdp.callbacks.LocalSGD(2),
    ]
    with tfdp.MirroredStrategy(["/cpu:0"]).scope():
        model = common.compiled(common.mlp())
    with pytest.raises(ValueError, match="can only skip"):
        common.fit(model, *spikes.data(), callbacks=callbacks)


def test_a_later_fit_without_the_guard_does_not_go_back(tmp_path):
    backup = tfdp.callbacks.BackupAndRestore(tmp_path, 4)
    guard = tfdp.callbacks.SpikeGuard(action="rollback")
    model = common.compiled(common.mlp())
    common.fit(model, *spikes.data(), callbacks=[guard, backup])
    batches = common.batched(*spikes.data())
    generated = tf.data.Dataset.from_generator(
        lambda: batches, output_signature=batches.element_spec
    )
    with pytest.warns(UserWarning, match="cannot be restored: a Python generator"):
        common.fit(model, generated, callbacks=[backup])
