"""Exchanges of one island in this process, with a hub of its own."""

from __future__ import annotations

import collections.abc
import json
import socket
import time

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import common
from tests.harness.tiers import full
from tfdp.communication.cluster import Cluster
from tfdp.features.islands import training as island_training
from tfdp.features.islands.hub import Hub
from tfdp.features.islands.island import Island
from tfdp.ground.base.threads import run_on_thread

NUM_BATCHES = 12
SECRET = "0123456789abcdef"


@pytest.fixture
def hub(monkeypatch) -> collections.abc.Iterator[Hub]:
    """A hub of one island, which this process is."""
    with Hub(socket.create_server(("127.0.0.1", 0)), SECRET, 1) as hub:
        config = json.loads(Cluster(("127.0.0.1:1",)).to_tf_config())
        Island(0, 1, f"127.0.0.1:{hub.port}", SECRET).add_to(config)
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        yield hub


def fit(
    callback: tfdp.callbacks.DiLoCo,
    *others: keras.callbacks.Callback,
    steps_per_execution: int = 1,
    epochs: int = 2,
    validates: bool = False,
) -> keras.Model:
    with tfdp.MirroredStrategy(["CPU:0"]).scope():
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
        layers[0].trainable = False
        model = keras.Sequential(
            [keras.Input((common.NUM_FEATURES,)), *layers, keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    data = common.regression_data(NUM_BATCHES * common.BATCH_SIZE)
    common.fit(
        model,
        *data,
        epochs=epochs,
        validation_data=data if validates else None,
        callbacks=[*others, callback],
    )
    return model


class AtTheEnd(keras.callbacks.Callback):
    """Keeps the weights at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list = []

    def on_epoch_end(self, epoch, logs=None):
        self.weights = [v.numpy() for v in self.model.trainable_variables]


@pytest.mark.parametrize("sync_every", [full(4), 5])
def test_an_epoch_ends_on_the_common_weights_whatever_is_under_way(hub, sync_every):
    callback, watch = tfdp.callbacks.DiLoCo(sync_every, delay=2), AtTheEnd()
    # Callbacks that stand before it see them too.
    fit(callback, watch, validates=True)
    training = callback._island
    assert training is not None
    for seen, common_value in zip(watch.weights, training._state.weights, strict=True):
        np.testing.assert_array_equal(seen, common_value)


@pytest.mark.full
def test_exchanges_are_due_after_as_many_updates_in_each_epoch(hub):
    callback = tfdp.callbacks.DiLoCo(5)
    fit(callback, epochs=3)
    assert callback._island is not None
    assert callback._island._version == 3 * 3  # after 5, 10 and 12


@pytest.mark.full
def test_an_exchange_is_over_before_the_next_begins_with_several_steps(hub):
    callback = tfdp.callbacks.DiLoCo(8, delay=7)
    fit(callback, steps_per_execution=3)
    assert callback._island is not None
    # After 9 of 12, and at the end.
    assert callback._island._version == 2 * 2


@pytest.mark.full
def test_what_is_flushed_at_the_end_of_an_epoch_is_exchanged(hub):
    callback = tfdp.callbacks.DiLoCo(2)
    # 12 batches: two updates, an exchange after them, and two batches that are left.
    flush = tfdp.callbacks.GradientAccumulation(5, flush="epoch")
    watch = AtTheEnd()
    model = fit(callback, flush, watch)
    training = callback._island
    assert training is not None
    assert training._version == 2 * 2
    assert int(model.optimizer.iterations.numpy()) == 2 * 3
    for variable, value in zip(
        model.trainable_variables, training._state.weights, strict=True
    ):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_of_other_variables_moving_statistics_are_averaged_only(hub):
    callback = tfdp.callbacks.DiLoCo(4)
    model = fit(callback, epochs=1)
    assert callback._island is not None
    names = [
        variable.path.split("/")[-1]
        for variable in callback._island._statistic_variables()
    ]
    assert names == ["moving_mean", "moving_variance"]
    assert len(model.non_trainable_variables) > len(names)


def test_a_fit_that_fails_leaves_the_others(hub):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyError("of the user's own")

    with pytest.raises(KeyError, match="of the user's own"):
        fit(tfdp.callbacks.DiLoCo(4), Fails())
    (rounds,) = hub._rounds_by_fit.values()
    with rounds._changed:
        assert rounds._changed.wait_for(lambda: not rounds._members, 20.0)
    # A later `fit` has other rounds.
    again = tfdp.callbacks.DiLoCo(4)
    fit(again, epochs=1)
    assert again._island is not None
    assert again._island._version == 3


def test_an_island_that_the_hub_has_taken_for_gone_joins_again(hub):
    class Cut(keras.callbacks.Callback):
        """Ends the connection in the middle of an epoch, from the other side."""

        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                for connection in list(hub._connections):
                    connection.close()

    callback = tfdp.callbacks.DiLoCo(4)
    fit(callback, Cut(), epochs=1)
    training = callback._island
    assert training is not None
    # The second of three was lost with the connection, and what it would have brought.
    assert training._version == 2
    assert training.participants == 1


def test_who_waits_for_long_says_so(hub, monkeypatch, capsys):
    callback = tfdp.callbacks.DiLoCo(4)
    fit(callback, epochs=1)
    training = callback._island
    assert training is not None
    assert "has waited" not in capsys.readouterr().err
    monkeypatch.setattr(island_training, "_WARN_AFTER_SECONDS", 0.1)
    training._exchange = run_on_thread("late", lambda: bool(time.sleep(0.5)))
    training._finish(0.0)
    said = capsys.readouterr().err
    assert "tfdp: island 0 has waited for 0.1 s for the others" in said


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (tfdp.callbacks.LocalSGD(sync_every=3), "An island needs exactly one `DiLoCo`"),
        (tfdp.callbacks.DiLoCo(4), "Give `fit` one `tfdp.callbacks.DiLoCo`"),
    ],
)
def test_an_island_has_one_callback_of_local_steps(hub, other, message):
    with pytest.raises(ValueError, match=message):
        fit(tfdp.callbacks.DiLoCo(4), other)
