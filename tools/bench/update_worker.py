"""Updates of many variables by Keras's optimizers and by wrapped ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdp.launch.bench.channel import Variants, timed, work
from tools.bench.update import GOALS, LARGE, LAYERS, SMALL


def small_shapes() -> list[tuple[int, ...]]:
    """200 vectors and matrices, evenly on a logarithmic scale."""
    sizes = 8 * np.round(np.geomspace(64, 4096, 200) / 8).astype(int)
    return [
        (int(size),) if index % 2 else (int(size) // 8, 8)
        for index, size in enumerate(sizes)
    ]


SHAPES: dict[str, list[tuple[int, ...]]] = {
    LAYERS: [(64, 64), (64,), (64,), (64,)] * 50,
    SMALL: small_shapes(),
    LARGE: [(1024, 1024)] * 20,
}
OPTIONS: dict[str, dict[str, float]] = {
    "Adam": {},
    "Adam, weight decay, global_clipnorm": {
        "weight_decay": 1e-2,
        "global_clipnorm": 1.0,
    },
}


def update_step(
    shapes: Sequence[tuple[int, ...]],
    options: dict[str, Any],
    *,
    wrapped: bool,
    compiles: bool = False,
) -> Callable[[], Any]:
    """A traced update of variables of these shapes by fixed gradients."""
    import keras
    import tensorflow as tf

    from tfdp.training.optimizer.distributed import DistributedOptimizer

    keras.utils.set_random_seed(0)
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    gradients = [tf.random.normal(shape) for shape in shapes]
    optimizer: Any = keras.optimizers.Adam(1e-3, **options)
    if wrapped:
        optimizer = DistributedOptimizer(optimizer)
    optimizer.build(variables)

    @tf.function(jit_compile=compiles or None)
    def update() -> None:
        optimizer.apply(gradients, variables)

    @tf.function
    def step() -> Any:
        update()
        return optimizer.iterations.value.read_value()

    return step


def call_step(shapes: list[tuple[int, ...]]) -> Callable[[], Any]:
    """A traced function that takes what an update with Adam takes, and leaves it."""
    import keras
    import tensorflow as tf

    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in 3 * shapes]
    gradients = [tf.random.normal(shape) for shape in shapes]

    @tf.function
    def step() -> Any:
        for variable in variables:
            tf.identity(variable.value.handle)
        for gradient in gradients:
            tf.identity(gradient)
        return tf.constant(0)

    return step


def make_variants(setup: dict[str, Any]) -> Variants:
    variants = {}
    for variables, optimizer in GOALS:
        shapes, options = SHAPES[variables], OPTIONS[optimizer]
        steps = {
            "keras": update_step(shapes, options, wrapped=False),
            "tfdp": update_step(shapes, options, wrapped=True),
            "xla": update_step(shapes, options, wrapped=False, compiles=True),
            "nothing": call_step(shapes),
        }
        for kind, step in steps.items():
            variants[f"{kind}: {optimizer}, {variables}"] = timed(step)
    return variants


if __name__ == "__main__":
    work(make_variants)
