"""The model and the data on which every optimizer is compared with one device."""

from __future__ import annotations

import typing

import keras
import numpy as np

from tests.harness.env import Env

layers = keras.layers

BATCH_SIZE = 8
# So that a replica of the last batch has no sample where there are four.
PARTIAL_SIZE = 3
NUM_TOKENS = 6
LENGTH = 4
WIDTH = 4
IMAGE_SIZE = 4

# In which batch a gradient overflows, and in which row: first the last replica
# alone, then the first alone.
OVERFLOWS = ((2, BATCH_SIZE - 1), (8, 0))
# Lists that an optimizer has besides; at the end of an update nothing is accumulated.
_NO_SLOTS = ("_trainable_variables", "_variables", "_accumulated_gradients")


class Scale(keras.layers.Layer):
    """Multiplies by a weight that has no axis."""

    def build(self, input_shape):
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, inputs):
        return inputs * self.factor


def build_model() -> keras.Model:
    """Returns a model of tokens and an image, with layers of every kind.

    A transformer block over an Embedding, a layer that is used twice, one that
    is frozen, a convolution with synchronized normalization, a scalar weight.
    """
    ids = keras.Input((LENGTH,), dtype="int32", name="ids")
    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1), name="image")
    both = layers.Concatenate(name="both")([_of_tokens(ids), _of_image(image)])
    return keras.Model([ids, image], Scale(name="scale")(both))


def _of_tokens(ids: keras.KerasTensor) -> keras.KerasTensor:
    # As large as what the block adds: rounding would be blown up to that size.
    initializer = keras.initializers.RandomNormal(stddev=1.0)
    x = layers.Embedding(NUM_TOKENS, WIDTH, initializer, name="embedding")(ids)
    h = layers.LayerNormalization(name="norm1")(x)
    # The bias of the keys would have no gradient: softmax ignores it.
    attention = layers.MultiHeadAttention(
        1, 2, use_bias=False, kernel_initializer=initializer, name="attention"
    )
    x = x + attention(h, h)
    h = layers.LayerNormalization(name="norm2")(x)
    h = layers.Dense(6, activation="tanh", use_bias=False, name="mlp_in")(h)
    x = x + layers.Dense(WIDTH, name="mlp_out")(h)
    tied = layers.Dense(WIDTH, activation="tanh", name="tied")
    x = layers.GlobalAveragePooling1D(name="mean")(tied(tied(x)))
    x = layers.Dense(WIDTH, trainable=False, name="frozen")(x)
    return layers.Dense(1, name="token_head")(x)


def _of_image(image: keras.KerasTensor) -> keras.KerasTensor:
    # A bias before the normalization would have no gradient.
    x = layers.Conv2D(2, 3, use_bias=False, name="conv")(image)
    x = layers.BatchNormalization(synchronized=True, name="batch_norm")(x)
    x = layers.Flatten(name="flat")(layers.Activation("tanh", name="tanh")(x))
    return layers.Dense(1, use_bias=False, name="image_head")(x)


def make_data(num_batches: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns inputs and targets of whole batches.

    Targets are far above the outputs, so that all samples pull the same way: sums
    of gradients that cancel would be mostly rounding.
    """
    rng = np.random.default_rng(0)
    size = num_batches * BATCH_SIZE
    ids = rng.integers(0, NUM_TOKENS, size=(size, LENGTH)).astype("int32")
    images = rng.normal(size=(size, IMAGE_SIZE, IMAGE_SIZE, 1))
    signal = np.stack([ids.mean(axis=1) - 2.0, images.mean(axis=(1, 2, 3))], axis=1)
    targets = 6.0 + signal + 0.5 * rng.normal(size=(size, 2))
    dtype = keras.config.floatx()
    return [ids, images.astype(dtype)], targets.astype(dtype)


def plant_overflows(targets: np.ndarray) -> None:
    """Makes the gradients of one replica overflow, those of others stay finite.

    Of the tokens: gradients of the image pass through the normalization, which is
    synchronized backwards too.
    """
    for batch, row in OVERFLOWS:
        targets[batch * BATCH_SIZE + row, 0] = 0.9 * np.finfo(targets.dtype).max


def without_rows_of_last_batch(x: list, y: np.ndarray) -> tuple[list, np.ndarray]:
    """Cuts the last batch down to a few rows."""
    size = len(y) - BATCH_SIZE + PARTIAL_SIZE
    return [array[:size] for array in x], y[:size]


def read_state(
    env: Env, model: keras.Model, inner: list, shards: typing.Any = None
) -> dict:
    """Reads weights, slots and averages; local replicas must agree exactly.

    Args:
        env: The surroundings.
        model: The trained model.
        inner: List of the optimizers that update variables.
        shards: The `ShardedState` of their state, or `None` where every replica has
            all of it.
    """
    state: dict = {"weights": env.weights(model)}
    for index, optimizer in enumerate(inner):
        state[f"optimizer{index}"] = {
            "iterations": np.asarray(optimizer.iterations),
            **{
                name: _read_one(env, variable)
                for name, variable in vars(optimizer).items()
                # Keras's counter may count micro-batches.
                if isinstance(variable, keras.Variable) and name != "_iterations"
            },
            **{
                name.strip("_"): _read_by_path(
                    env, slots, optimizer._trainable_variables
                )
                for name, slots in _slots(optimizer).items()
            },
            **(_read_shards(env, shards, optimizer) if shards else {}),
        }
    return state


def _read_shards(
    env: Env, shards: typing.Any, optimizer: keras.Optimizer
) -> dict[str, np.ndarray]:
    """The whole slots, put together from the slices of all replicas.

    Of what several replicas hold, all must hold the same.
    """
    from tfdp.training.sharding.full_state import gather_full_state

    part = shards.parts.get(id(optimizer))
    tensors = shards.state(part) if part else []
    whole = gather_full_state(tensors, env.distribution.extended.host_group, keep=True)
    values = {}
    for tensor in tensors:
        value = whole.read(tensor)
        for shard in tensor.local_shards:
            np.testing.assert_array_equal(
                shard.read(), value.ravel()[shard.start : shard.stop], tensor.name
            )
        name = tensor.name.removeprefix(f"{optimizer.name}/")
        values[_with_path(name, part.variables)] = value
    return values


def _with_path(name: str, trained: list) -> str:
    """The attribute and the trained variable's path, of a slot's name in files."""
    attribute, _, place = name.partition("/")
    number = place.partition("/")[0]
    return f"{attribute}/{trained[int(number)].path}" if number else attribute


def _slots(optimizer: keras.Optimizer) -> dict[str, list]:
    """Lists of variables, one for each trained variable, by attribute."""
    trained = optimizer._trainable_variables
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NO_SLOTS
        and isinstance(value, list)
        and len(value) == len(trained)
        and any(isinstance(item, keras.Variable) for item in value)
    }


def _read_by_path(env: Env, slots: list, trained: list) -> dict[str, np.ndarray]:
    return {
        variable.path: _read_one(env, slot)
        for slot, variable in zip(slots, trained, strict=True)
        if slot is not None
    }


def _read_one(env: Env, variable: keras.Variable) -> np.ndarray:
    (value,) = env.read([variable]).values()
    return value
