"""The benchmark's models built by Keras, and timed steps of `fit`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfdp.launch.bench.models import (
    CONTEXT,
    IMAGE_CHANNELS,
    IMAGE_SIDE,
    NUM_CLASSES,
    NUM_INPUTS,
    VOCABULARY,
    Model,
)

# Batches are NumPy arrays of inputs and labels, which both `fit` and `tf.constant`
# take.
Batch = tuple[np.ndarray, np.ndarray]
# Inputs of these families are random numbers of the given shape. A transformer has no
# entry, since its inputs are token ids.
_INPUTS = {"mlp": (NUM_INPUTS,), "cnn": (IMAGE_SIDE, IMAGE_SIDE, IMAGE_CHANNELS)}


def make_batch(model: Model, size: int) -> Batch:
    """Generate a batch of inputs and labels, the same at each call.

    Args:
        model: `Model` that takes the batch.
        size: Int, number of samples.

    Returns:
        Tuple of two arrays: `[size, 784]` and `[size]` for an MLP, `[size, 32, 32,
        3]` and `[size]` for a CNN, twice `[size, 64]` for a transformer.
    """
    generator = np.random.default_rng(0)
    if model.family in _INPUTS:
        x = generator.normal(size=(size, *_INPUTS[model.family])).astype("float32")
        return x, generator.integers(0, NUM_CLASSES, size)
    ids = generator.integers(0, VOCABULARY, (size, CONTEXT + 1)).astype("int32")
    return ids[:, :-1], ids[:, 1:]


def build(model: Model) -> Any:
    """Build a Keras model.

    Args:
        model: `Model`, the shape to build.

    Returns:
        A `keras.Model` whose outputs are logits.

    Example:

    >>> build(Model("mlp", 8)).count_params()
    6442
    """
    families = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}
    return families[model.family](model)


class TokenAndPosition(keras.layers.Layer):
    """Layer that adds learned embeddings of tokens and of positions.

    Args:
        width: Int, size of an embedding.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = keras.layers.Embedding(VOCABULARY, width)
        self.positions = keras.layers.Embedding(CONTEXT, width)

    def build(self, input_shape: Any) -> None:
        """Build both embeddings."""
        self.tokens.build(input_shape)
        self.positions.build((CONTEXT,))

    def call(self, ids: Any) -> Any:
        """Embed token ids of shape `[batch, CONTEXT]`."""
        # All rows have the same positions, so the sum is broadcast over the batch:
        # [batch, CONTEXT, width] + [CONTEXT, width].
        return self.tokens(ids) + self.positions(keras.ops.arange(CONTEXT))


def _mlp(model: Model) -> Any:
    """Build the MLP: two hidden layers with ReLU, and a linear head.

    Args:
        model: `Model`, whose `width` is the number of units of a hidden layer.

    Returns:
        A `keras.Sequential`.
    """
    hidden = [keras.layers.Dense(model.width, activation="relu") for _ in range(2)]
    head = keras.layers.Dense(NUM_CLASSES)
    return keras.Sequential([keras.Input((NUM_INPUTS,)), *hidden, head])


def _cnn(model: Model) -> Any:
    """Build the CNN: stages of two convolutions and pooling, and a linear head.

    Args:
        model: `Model`, whose `channels` are those of the convolutions of each stage.

    Returns:
        A `keras.Sequential`.
    """
    layers = keras.layers
    network = keras.Sequential([keras.Input(_INPUTS["cnn"])])
    for channels in model.channels:
        for _ in range(2):
            network.add(layers.Conv2D(channels, 3, padding="same", activation="relu"))
        network.add(layers.MaxPooling2D())
    network.add(layers.GlobalAveragePooling2D())
    network.add(layers.Dense(NUM_CLASSES))
    return network


def _transformer(model: Model) -> Any:
    """Build the pre-norm transformer with causal attention, and a linear head.

    Args:
        model: `Model`, with the width and the numbers of blocks and attention heads.

    Returns:
        A `keras.Model` that maps token ids of shape `[batch, CONTEXT]` to logits of
        shape `[batch, CONTEXT, VOCABULARY]`.
    """
    layers, width = keras.layers, model.width
    ids = keras.Input((CONTEXT,), dtype="int32")
    x = TokenAndPosition(width)(ids)
    for _ in range(model.num_blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(model.num_heads, width // model.num_heads)
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        x = layers.Add()([x, layers.Dense(width)(y)])
    x = layers.LayerNormalization()(x)
    return keras.Model(ids, layers.Dense(VOCABULARY)(x))


class Clock(keras.callbacks.Callback):
    """Callback that times the steps of `fit`.

    Args:
        skipped: Int, index of the step, from 0, at whose end the clock starts.
    """

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self._skipped = skipped

    def on_train_begin(self, logs: Any = None) -> None:
        """Discard the step times of an earlier `fit`: each is measured alone."""
        self._ends: list[tuple[int, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the time at which a step ends, or an execution of several steps."""
        self._ends.append((batch, time.perf_counter()))

    @property
    def seconds(self) -> float:
        """Float, mean seconds per step from the end of step `skipped` to the last."""
        timed = [end for end in self._ends if end[0] >= self._skipped]
        (first, begin), (last, end) = timed[0], timed[-1]
        return (end - begin) / (last - first)


def timed_fit(
    model: Any, batch: Sequence[np.ndarray], skipped: int = 0
) -> Callable[..., float]:
    """Return a callable that measures steps of `fit` on a repeated batch.

    The first step, or execution of several steps, is not timed: the clock starts at
    its end.

    Args:
        model: Compiled `keras.Model`.
        batch: Inputs and labels of all replicas.
        skipped: Int, number of further steps that are not timed. Defaults to `0`.

    Returns:
        Callable that takes a number of steps, and callbacks, and returns seconds per
        step.
    """
    most_steps = model.steps_per_execution

    def run(steps: int, *callbacks: Any) -> float:
        """Time `steps` steps of `fit` with callbacks, and return seconds per step."""
        clock = Clock(skipped)
        # No execution has more steps than the block, so that short blocks stay short.
        size = min(steps, most_steps)
        if size != model.steps_per_execution:
            model.steps_per_execution, model.train_function = size, None
        # `fit` runs whole executions of `size` steps, and the clock starts only after
        # the first `skipped + 1` steps. The executions with these untimed steps are
        # added, so the timed ones have all of the requested steps.
        num_steps = size * (-(-(skipped + 1) // size) + steps // size)
        x, y = (np.concatenate([part] * num_steps) for part in batch)
        model.fit(
            x,
            y,
            batch_size=len(batch[0]),
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, clock],
        )
        return clock.seconds

    return run


def fit_variant(
    strategy: Any,
    model: Model,
    *,
    batch_size: int = 32,
    jit_compile: bool = False,
    steps_per_execution: int = 1,
    make_optimizer: Callable[[], Any] | None = None,
) -> Callable[..., float]:
    """Build a model, and return the callable that times its `fit`.

    Args:
        strategy: Strategy of the model, or `None`.
        model: `Model`, the shape to build.
        batch_size: Int, number of samples of each replica. Defaults to `32`.
        jit_compile: Bool, as in `keras.Model.compile`. Defaults to `False`.
        steps_per_execution: Int, as in `keras.Model.compile`, but not more than the
            number of steps that is measured. Defaults to `1`.
        make_optimizer: Callable that returns a Keras optimizer. Defaults to SGD, which
            the loops of the other sides use too.

    Returns:
        Callable that takes a number of steps, and callbacks, and returns seconds per
        step.

    Example:

    >>> fit = fit_variant(None, Model("mlp", 8))
    >>> 0 < fit(3) < 10
    True
    """
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        network = build(model)
        network.compile(
            make_optimizer() if make_optimizer else keras.optimizers.SGD(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=jit_compile,
            steps_per_execution=steps_per_execution,
        )
    num_replicas = strategy.num_replicas_in_sync if strategy else 1
    return timed_fit(network, make_batch(model, batch_size * num_replicas))
