"""Each replica keeps its batch on another number of them, where that is asked for."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.checkpoint import interrupted_fit
from tests.harness.interrupted import Layout, run
from tfdp.callbacks import BackupAndRestore, resumed_batches
from tfdp.features import warmup
from tfdp.training.data.batch_change import (
    BatchChange,
    BatchSettings,
    change_for_replicas,
    change_for_updates,
    convert_position,
)
from tfdp.training.data.determinism import batch_dependence_of

ONE, TWO = Layout(1, 1), Layout(1, 2)
RATE, EPOCHS, PER_REPLICA = 0.02, 4, 4


def test_positions_are_kept_in_samples_and_no_sample_is_left_out():
    for before in range(1, 30):
        for now in range(1, 30):
            change = BatchChange(before, now)
            for count in range(20):
                samples = count * before
                assert samples - now < change.floor(count) * now <= samples
                assert samples <= change.ceil(count) * now < samples + now


def test_epochs_that_are_over_are_read_to_their_end_and_a_kept_iterator_is_not():
    snapshot = {"taken": [5, 5, 3], "steps_seen": 3, "num_batches": 5, "order": 7}
    change = BatchChange(before=6, now=4)
    fresh, batches = convert_position(
        snapshot, 2, change, keeps_iterator=False, group=1
    )
    assert (fresh["taken"], batches) == ([8, 8, 5], 3)
    kept, batches = convert_position(snapshot, 2, change, keeps_iterator=True, group=1)
    # Of 18 samples of the iterator four batches are gone, of 30 seven.
    assert (kept["taken"], batches) == ([8, 8, 4], 3)
    assert (kept["steps_seen"], kept["num_batches"], kept["order"]) == (4, None, 7)
    _, batches = convert_position(snapshot, 2, change, keeps_iterator=True, group=2)
    assert batches == 2


@pytest.mark.parametrize(
    ("then", "now", "text"),
    [
        (
            BatchSettings(4, 128, None),
            BatchSettings(2, 128, None),
            "with 2 replicas the batch size must be 64, and is",
        ),
        (
            BatchSettings(3, 32, None),
            BatchSettings(2, 21, None),
            "with 2 replicas the batch size must be 21.3333, and is 21",
        ),
        (
            BatchSettings(4, None, None),
            BatchSettings(2, None, None),
            "of the data is unknown",
        ),
        (
            BatchSettings(4, 32, 9),
            BatchSettings(2, 16, 9),
            "`steps_per_epoch` was 9 with batches",
        ),
        (
            BatchSettings(4, 32, 9),
            BatchSettings(2, 16, None),
            "was 9 with batches of 32, and is N",
        ),
    ],
)
def test_batches_that_do_not_fit_the_replicas_are_named(then, now, text):
    with pytest.raises(ValueError, match=text):
        change_for_replicas(then, now)


def test_as_many_replicas_change_nothing():
    assert change_for_replicas(BatchSettings(2, 8, 3), BatchSettings(2, 9, 4)) is None
    change = change_for_replicas(BatchSettings(4, 32, 9), BatchSettings(2, 16, 18))
    assert change == BatchChange(32, 16)
    assert (
        change_for_replicas(BatchSettings(4, 32, 9), BatchSettings(2, 16, 19)) == change
    )


def test_updates_of_as_many_samples_may_accumulate_more_or_fewer_batches():
    then = BatchSettings(4, 64, 9, accumulated=2)
    assert change_for_updates(then, BatchSettings(2, 64, 9, 2), 1, 5) is None
    assert (
        change_for_updates(then, BatchSettings(2, 32, 18, 2), 1, 5) is None
    )  # refused
    change = change_for_updates(then, BatchSettings(2, 32, 18, 4), 1, 5)
    assert change == BatchChange(64, 32, keeps_updates=True)
    assert change.ratio == 1.0
    assert change.can_carry(1)
    more = BatchSettings(8, 128, 4, 1)
    assert not change_for_updates(then, more, 1, 5).can_carry(1)
    with pytest.raises(ValueError, match="1 batch of size 64 waited for an update"):
        change_for_updates(then, more, 1, 0)


def test_what_depends_on_the_size_of_batches_is_named():
    dataset = tf.data.Dataset.range(9).shuffle(9, seed=1)

    def found(source: tf.data.Dataset) -> str | None:
        return batch_dependence_of(source, shuffles_batches=False)

    assert found(dataset.repeat().batch(2).map(lambda x: x).prefetch(1)) is None
    assert "RepeatDataset comes after" in str(found(dataset.batch(2).repeat()))
    assert "ShuffleDataset comes after" in str(found(dataset.batch(2).shuffle(3)))
    arrays = batch_dependence_of(np.ones(3), shuffles_batches=True)
    assert "shuffled in batches" in str(arrays)


def compiled(rate) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", jit_compile=False)
    return model


def weights_after(model: keras.Model, steps: int) -> np.ndarray:
    x = np.arange(8.0).reshape(4, 2) / 8
    for _ in range(steps):
        model.train_on_batch(x, x[:, :1])
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


def schedule(factor: float = 1.0):
    return keras.optimizers.schedules.InverseTimeDecay(0.1 * factor, 2, 0.5)


@pytest.mark.parametrize("rate", [lambda f: 0.1 * f, schedule])
def test_a_rate_is_scaled_also_in_a_step_that_was_traced(rate):
    scaled, wanted = compiled(rate(1.0)), compiled(rate(0.5))
    wanted.set_weights(scaled.get_weights())
    saved = resumed_batches.rate_factors(scaled)
    assert resumed_batches.scale_rates(scaled, 0.5, saved)
    np.testing.assert_allclose(
        weights_after(scaled, 4), weights_after(wanted, 4), rtol=1e-6
    )


def test_the_factor_of_a_schedule_is_restored_and_multiplied_again():
    first = compiled(schedule())
    resumed_batches.scale_rates(first, 0.5, resumed_batches.rate_factors(first))
    saved = resumed_batches.rate_factors(first)
    second = compiled(schedule())
    resumed_batches.restore_rate_factors(second, saved)
    assert warmup.options_of(second.optimizer).last == 0.5
    assert resumed_batches.scale_rates(second, 3.0, saved)
    assert warmup.options_of(second.optimizer).last == 1.5


def test_a_schedule_that_the_script_has_adapted_is_taken_as_it_is():
    saved = resumed_batches.rate_factors(compiled(schedule()))
    model = compiled(schedule(0.5))
    assert not resumed_batches.scale_rates(model, 0.5, saved)
    assert isinstance(model.optimizer, keras.optimizers.SGD)


def test_something_else_than_the_two_batches_is_refused():
    with pytest.raises(ValueError, match='must be "global" or "per_replica"'):
        BackupAndRestore("folder", batch="local")


def plan_by_hand(
    orders: list[list[int]], batches: list[tuple[int, int, int]], factors: list[float]
) -> list[tuple[float, list[list[int]]]]:
    """Updates of two micro-batches each.

    Args:
        orders: List of lists, samples by epoch.
        batches: List of epoch, first sample in it, and size.
        factors: List of floats, of the rate of each update.
    """
    cut = [orders[epoch][first : first + size] for epoch, first, size in batches]
    pairs = [cut[i : i + 2] for i in range(0, len(cut) - 1, 2)]
    return [(RATE * factor, pair) for factor, pair in zip(factors, pairs, strict=False)]


def batches_of(epochs: range, size: int, first: int = 0) -> list[tuple[int, int, int]]:
    """All batches of some epochs, in the first of them from one sample on."""
    return [
        (epoch, begin, size)
        for epoch in epochs
        for begin in range(
            first if epoch == epochs[0] else 0, interrupted_fit.NUM_SAMPLES, size
        )
    ]


def kill_after_backup(options: dict[str, Any]) -> dict[str, Any]:
    """A kill of worker 0 in the step after a backup, once that is complete."""
    step = options["save_freq"]
    backup = f"{options['directory']}/step-{step}/index.json"
    number = int(signal.SIGKILL)
    return {"step": step + 1, "at": 0, "number": number, "backup": backup}


def check(
    layouts: tuple[Layout, Layout],
    folder: Path,
    *,
    step: int,
    first: int,
    schedule: bool,
    data: str,
) -> None:
    """Trains with one layout, is killed, goes on with another; the same by hand.

    Args:
        layouts: Before and after.
        folder: Path.
        step: Int, at which the backup is made, in the second epoch.
        first: Int, sample of the second epoch with which it goes on.
        schedule: Bool, whether the rate is one.
        data: String.
    """
    before, now = (PER_REPLICA * layout.devices for layout in layouts)
    options = {
        "directory": str(folder / "backups"),
        "save_freq": step,
        "epochs": EPOCHS,
        "everything": False,
        "learning_rate": RATE,
        "per_replica": PER_REPLICA,
        "schedule": schedule,
        "data": data,
    }
    kill = kill_after_backup(options)
    run(layouts[0], interrupted_fit.fit, folder, {**options, "kill": kill})
    found = run(layouts[1], interrupted_fit.fit, folder, options)
    assert found.weights is not None, found.output[-3000:]
    assert f"the learning rate is multiplied by {now / before:g}" in found.output
    order = {"epochs": EPOCHS, "data": data}
    told = run(ONE, interrupted_fit.order_of_samples, folder, order).answers[0]
    batches = batches_of(range(EPOCHS), before)[:step]
    batches += batches_of(range(1, EPOCHS), now, first)
    factors = [1.0 if update < step // 2 else now / before for update in range(99)]
    if schedule:
        factors = [f / (1 + 0.5 * update / 4) for update, f in enumerate(factors)]
    plan = plan_by_hand(told["orders"], batches, factors)
    wanted = run(ONE, interrupted_fit.by_hand, folder, {"plan": plan})
    assert wanted.weights is not None, wanted.output[-3000:]
    for name, value in wanted.weights.items():
        error = np.abs(found.weights[name] - value).max()
        assert error <= 1e-5 * max(np.abs(value).max(), 1e-3), (name, error)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_half_the_replicas_go_on_as_one_device_with_half_batch_and_rate(tmp_path):
    # Two epochs of five batches; the seventh waits for the other half of its update.
    check((TWO, ONE), tmp_path, step=7, first=16, schedule=False, data="dataset")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_twice_the_replicas_go_on_as_one_device_that_sees_a_few_samples_twice(tmp_path):
    # Twelve samples of the second epoch are one and a half batches of eight.
    check((ONE, TWO), tmp_path, step=13, first=8, schedule=True, data="dataset")


def check_updates(layouts, micro_batches, step: int, folder: Path) -> None:
    """Another number of micro-batches for an update, in the midst of one."""
    options = {"epochs": EPOCHS, "everything": False, "learning_rate": RATE}
    wanted = run(ONE, interrupted_fit.fit, folder, options)
    options |= {"directory": str(folder / "backups"), "save_freq": step}
    kill = kill_after_backup(options)
    first, second = (options | {"micro_batch": size} for size in micro_batches)
    run(layouts[0], interrupted_fit.fit, folder, {**first, "kill": kill})
    found = run(layouts[1], interrupted_fit.fit, folder, second)
    assert found.weights is not None, found.output[-3000:]
    assert "training continues with batches of" in found.output
    for name, value in wanted.weights.items():
        error = np.abs(found.weights[name] - value).max()
        assert error <= 1e-5 * max(np.abs(value).max(), 1e-3), (name, error)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_half_the_replicas_accumulate_twice_the_batches_as_one_device_would(tmp_path):
    # Of two batches of eight that make an update one is done: two of four of four.
    check_updates((TWO, ONE), (8, 4), 7, tmp_path)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("step", [13, 14])
def test_twice_the_replicas_accumulate_half_the_batches(step, tmp_path):
    # One batch of four is half of one of eight: that update begins again. Two are one.
    check_updates((ONE, TWO), (4, 8), step, tmp_path)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("is_schedule", [False, True])
def test_endless_data_goes_on_where_it_was(is_schedule, tmp_path):
    check((TWO, ONE), tmp_path, step=7, first=16, schedule=is_schedule, data="endless")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.full
def test_another_batch_than_the_replicas_need_is_refused(tmp_path):
    options = {"directory": str(tmp_path / "backups"), "everything": False}
    first = {"epochs": 1, "delete_at_end": False, "per_replica": 4}
    run(TWO, interrupted_fit.fit, tmp_path, {**options, **first})
    found = run(ONE, interrupted_fit.fit, tmp_path, {**options, "per_replica": 8})
    assert (
        "with 1 replica the batch size must be 4, and is 8" in found.answers[0]["text"]
    )
    found = run(ONE, interrupted_fit.fit, tmp_path, {**options, "epochs": 2})
    assert found.weights is not None  # the same global batch, and the default
