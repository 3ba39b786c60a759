"""Callbacks that decide decide alike everywhere; shared files are not raced for."""

from __future__ import annotations

import csv
import glob
import warnings

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

callbacks = keras.callbacks


def _model() -> keras.Model:
    return common.compiled(common.mlp(), metrics=["mae"])


def _fit(env: Env, *chosen, **options) -> dict:
    """Trains with callbacks and validation; returns history and weights."""
    x, y = common.regression_data(32)
    options = {"epochs": 2} | options
    results = common.train(
        env, _model, x, y, validation_data=(x, y), callbacks=list(chosen), **options
    )
    env.wait_for_all("trained")
    return results


@case("ReduceLROnPlateau, EarlyStopping")
@same_as("other_callbacks_act_on_the_rate_after_warmup")
def plateau_and_early_stopping(env: Env) -> dict:
    plateau = callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=0.05)
    stopping = callbacks.EarlyStopping(
        "val_mae", min_delta=0.2, patience=2, restore_best_weights=True
    )
    results = _fit(env, plateau, stopping, epochs=8)
    assert len(results["history"]["loss"]) < 8, "did not stop early"
    return results | {"stopped": stopping.stopped_epoch, "best": stopping.best_epoch}


@case("LearningRateScheduler")
@same_as("other_callbacks_act_on_the_rate_after_warmup")
def learning_rate_scheduler(env: Env) -> dict:
    return _fit(env, callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)))


@case("SwapEMAWeights")
@same_as("ema_overwrite_frequency")
def swap_ema_weights(env: Env) -> dict:
    def build():
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)
        return common.compiled(common.mlp(), optimizer)

    x, y = common.regression_data(32)
    swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
    return common.train(
        env, build, x, y, validation_data=(x, y), callbacks=[swap], epochs=2
    )


@case("TensorBoard: one set of files", compare=False)
def tensorboard_writes_one_set_of_files(env: Env) -> dict:
    board = callbacks.TensorBoard(str(env.tmp / "logs"), write_graph=False)
    results = _fit(env, board)
    files = [
        f"{kind}/{len(glob.glob(str(env.tmp / 'logs' / kind / '*')))}"
        for kind in ("train", "validation")
    ]
    assert files == ["train/1", "validation/1"], files
    return results


@case("TensorBoard: training goes on the same")
@same_as("tensorboard_writes_one_set_of_files")
def tensorboard_with_histograms(env: Env) -> dict:
    board = callbacks.TensorBoard(
        str(env.tmp / "logs"), histogram_freq=1, update_freq=2
    )
    return _fit(env, board)


@case("One path on all workers: ModelCheckpoint and `.weights.h5`")
def checkpoints_at_one_path(env: Env) -> dict:
    whole, weights = env.tmp / "best.keras", env.tmp / "{epoch}.weights.h5"
    x, y = common.regression_data(32)
    results = common.train(
        env,
        lambda: common.compiled(common.mlp()),
        x,
        y,
        epochs=2,
        callbacks=[
            callbacks.ModelCheckpoint(str(whole), "loss", save_best_only=True),
            callbacks.ModelCheckpoint(str(weights), save_weights_only=True),
        ],
    )
    env.wait_for_all("trained")
    plain = keras.models.load_model(str(whole))
    first = common.mlp()
    first.load_weights(str(env.tmp / "1.weights.h5"))
    return results | {
        "files": sorted(p.name for p in env.tmp.iterdir() if p.name[0] != "."),
        "best": plain(x).numpy(),
        "first": first(x).numpy(),
    }


@case("One path on all workers: the best by `val_loss`")
@same_as("checkpoints_at_one_path")
def the_best_of_validation_at_one_path(env: Env) -> dict:
    path = str(env.tmp / "best.keras")
    results = _fit(
        env, callbacks.ModelCheckpoint(path, "val_loss", save_best_only=True)
    )
    env.wait_for_all("trained")
    x, _ = common.regression_data()
    return results | {"best": keras.models.load_model(path).predict(x, verbose=0)}


@case("One path on all workers: CSVLogger")
@same_as("checkpoints_at_one_path")
def csv_logger_at_one_path(env: Env) -> dict:
    path = env.tmp / "log.csv"
    results = _fit(env, callbacks.CSVLogger(str(path)))
    with open(path, newline="") as lines:
        rows = list(csv.DictReader(lines))
    columns = {
        name: np.array([float(row[name]) for row in rows], "float32")
        for name in rows[0]
    }
    return results | {"csv": columns}


class Interrupted(Exception):
    """Stands for a job that is stopped from outside."""


class Interrupt(callbacks.Callback):
    """Raises on every worker at the end of an epoch."""

    def __init__(self, epoch: int):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Interrupted


@case("One path on all workers: BackupAndRestore")
@same_as("checkpoints_at_one_path")
def backup_and_restore_at_one_path(env: Env) -> dict:
    def backup():
        return callbacks.BackupAndRestore(str(env.tmp / "backup"))

    x, y = common.regression_data(32)
    model = common.build_in_scope(env, _model)
    try:
        common.fit(model, x, y, epochs=4, callbacks=[backup(), Interrupt(2)])
    except Interrupted:
        pass
    else:
        raise AssertionError("was not interrupted")
    env.wait_for_all("interrupted")
    keras.backend.clear_session()
    keras.utils.set_random_seed(99)
    model = common.build_in_scope(env, _model)
    history = common.fit(model, x, y, epochs=4, callbacks=[backup()])
    assert len(history["loss"]) < 4, "started again from the first epoch"
    return {
        "history": history,
        "weights": env.weights(model),
        "iterations": model.optimizer.iterations.numpy(),
    }


class Counting(keras.Model):
    """Counts its steps in variables that Keras does not track, or in a weight."""

    def __init__(self, is_tracked: bool) -> None:
        super().__init__()
        if is_tracked:
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
        else:
            self.count = tf.Variable(0.0, trainable=False)
        self.own = keras.metrics.Mean(name="own")
        self.all = [
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ]

    def call(self, x, training=False):
        for layer in self.all:
            x = layer(x, training=training)
        return x

    def train_step(self, data):
        x, y = data
        self.count.assign(self.count + 1.0)
        self.own.update_state(self.count + keras.random.uniform(()))
        return super().train_step((x + tf.random.normal(tf.shape(x)), y))


@case("BackupAndRestore: a warning of states that it does not save", compare=False)
def a_state_that_no_backup_has(env: Env) -> None:
    x, y = common.regression_data(32)
    for is_tracked in (True, False):
        with env.scope():
            model = common.compiled(Counting(is_tracked), metrics=["mae"])
        backup = tfdp.callbacks.BackupAndRestore(str(env.tmp / "backups"), save_freq=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(1 + is_tracked):
                common.fit(model, x, y, epochs=2, callbacks=[backup])
                # The state of another optimizer is none of the next step's.
                model.compile("sgd", "mse")
        texts = [
            str(each.message) for each in caught if "not save" in str(each.message)
        ]
        assert len(texts) == (not is_tracked), texts
        assert all("`self.count.assign(self.count + 1.0)`" in text for text in texts)


@case("TerminateOnNaN")
@same_as("stop_training_on_one_worker")
def terminate_on_nan(env: Env) -> dict:
    x, y = common.regression_data(32)
    # In the share of the last replica only.
    y[2 * common.BATCH_SIZE - 1] = np.nan
    model = common.build_in_scope(env, _model)
    history = common.fit(model, x, y, callbacks=[callbacks.TerminateOnNaN()], epochs=3)
    return {"history": history, "iterations": model.optimizer.iterations.numpy()}


class StopOnOneWorker(callbacks.Callback):
    """Asks to stop, on the last worker only."""

    def __init__(self, env: Env, epoch: int | None = None, batch: int | None = None):
        super().__init__()
        self.is_last = env.rank == env.setup.num_workers - 1
        self.epoch, self.batch = epoch, batch

    def on_epoch_end(self, epoch, logs=None):
        if self.is_last and epoch == self.epoch:
            self.model.stop_training = True

    def on_train_batch_end(self, batch, logs=None):
        if self.is_last and batch == self.batch:
            self.model.stop_training = True


@case(
    "`stop_training` on one worker only, at the end of an epoch: ends on all",
    quick_setup="two_workers",
)
def stop_training_on_one_worker(env: Env) -> dict:
    x, y = common.regression_data(32)
    stop = StopOnOneWorker(env, epoch=1)
    return common.train(env, _model, x, y, callbacks=[stop], epochs=4)


@case(
    "`stop_training` on one worker only, within an epoch: ends on all",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
@same_as("stop_training_on_one_worker")
def stop_training_within_an_epoch_on_one_worker(env: Env) -> dict:
    results = _fit(env, StopOnOneWorker(env, batch=1), epochs=4)
    assert len(results["history"]["loss"]) == 1
    return results
