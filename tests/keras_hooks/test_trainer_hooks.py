"""What Keras's own methods do under a strategy, without a step."""

from __future__ import annotations

from unittest import mock

import keras
import pytest
import tensorflow as tf

import tfdp

layers = keras.layers


def physical_devices(*kinds: str) -> mock._patch:
    """Devices that TensorFlow says are there, all visible."""
    devices = [tf.config.PhysicalDevice(f"/{kind}:0", kind) for kind in kinds]

    def listed(kind: str | None = None) -> list:
        return [d for d in devices if kind in (None, d.device_type)]

    # Keras asks for all devices, tfdp for those that the process may use.
    both = {"list_physical_devices": listed, "get_visible_devices": listed}
    return mock.patch.multiple(tf.config, **both)


def chosen(*parts: layers.Layer) -> bool:
    model = keras.Sequential([*parts, layers.Dense(1)])
    model.compile("sgd", "mse")  # `jit_compile="auto"`
    return model.jit_compile


@pytest.mark.parametrize(
    ("kinds", "is_compiled"), [(["CPU"], False), (["CPU", "GPU"], True)]
)
def test_auto_compiles_with_xla_where_plain_keras_would(kinds, is_compiled):
    strategy = tfdp.MirroredStrategy(["CPU:0"])
    with physical_devices(*kinds):
        assert chosen() == is_compiled
        with strategy.scope():
            assert chosen() == is_compiled
            # Of a layer that says that XLA cannot.
            assert not chosen(layers.StringLookup(vocabulary=["a"]))
