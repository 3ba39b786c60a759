"""The matrix: every optimizer with every option, against plain Keras on one device.

A cell is an optimizer (row), what is switched on (column), a dtype, and how the
optimizer's state is sharded. On one device plain Keras is given plain options; on the
set-ups a `DistributedOptimizer` is given accumulation, loss scale and sharding, and its
inner optimizer all else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tests.exactness import exactness_model as model_of
from tests.harness import common, registry
from tests.harness.env import Env

optimizers = keras.optimizers

NUM_UPDATES = 12
# That of every case, so that the limits are compared with the cells' own gradients.
SEED = 1234
DTYPES = ("float32", "float64")
SHARDINGS = ("none", "optimizer", "gradients", "parameters")
# DESIGN section 5, point 10.
TOLERANCES = {"float32": 1e-5, "float64": 1e-9}
FTRL_TOLERANCE = 5e-5


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A dynamic loss scale: first value, and updates after which it doubles."""

    initial: float = 16.0
    growth_steps: int = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """An optimizer.

    Args:
        make: Takes Keras's options of optimizers, returns an optimizer.
        title: How the table calls it.
        scaling: That of the `LossScaleOptimizer` around it, or `None`.
        float32_tolerance: Largest error of a tensor in float32.
    """

    make: Callable[..., keras.Optimizer]
    title: str
    scaling: Scaling | None = None
    float32_tolerance: float = TOLERANCES["float32"]

    def tolerance(self, dtype: str) -> float:
        """Largest error of a tensor."""
        is_single = dtype == "float32"
        return self.float32_tolerance if is_single else TOLERANCES[dtype]


@dataclasses.dataclass(frozen=True)
class Column:
    """What is switched on.

    Args:
        title: How the table calls it.
        options: What the Keras optimizer is given.
        accumulation: Micro-batches of an update.
        scaling: The loss scale, or `None`.
        excludes: Whether some variables are excluded from weight decay.
        overflows: Whether the gradient of one replica overflows, twice.
        is_partial: Whether the last batch of an epoch is smaller.
    """

    title: str
    options: dict[str, typing.Any] = dataclasses.field(default_factory=dict)
    accumulation: int = 1
    scaling: Scaling | None = None
    excludes: bool = False
    overflows: bool = False
    is_partial: bool = False


def multi_optimizer(**options: typing.Any) -> keras.Optimizer:
    """Momentum for the transformer block's beginning, Adam for the rest."""
    first = optimizers.SGD(0.005, momentum=0.9, **options)
    chosen = {"(embedding|attention|norm1)/.*": first}
    default = optimizers.Adam(0.01, **options)
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(default, chosen))


def muon(**options: typing.Any) -> keras.Optimizer:
    """Muon, which has a weight decay of its own for what Adam updates."""
    if "weight_decay" in options:
        options["adam_weight_decay"] = options["weight_decay"]
    return optimizers.Muon(0.01, **options)


def lars(**options: typing.Any) -> keras.Optimizer:
    """LARS is not part of Keras: undistributed on one device."""
    import tfdp.optimizers

    # Biases and norms learn by the bare rate: with a larger one they would diverge.
    return tfdp.optimizers.LARS(0.005, trust_coefficient=0.2, **options)


sgd = functools.partial(optimizers.SGD, 0.005)
momentum = functools.partial(sgd, momentum=0.9)

ROWS = {
    "sgd": Row(sgd, "SGD"),
    "sgd_momentum": Row(momentum, "SGD, momentum"),
    "sgd_nesterov": Row(functools.partial(momentum, nesterov=True), "SGD, Nesterov"),
    "adadelta": Row(functools.partial(optimizers.Adadelta, 1.0), "Adadelta"),
    "adafactor": Row(functools.partial(optimizers.Adafactor, 0.01), "Adafactor"),
    "adagrad": Row(functools.partial(optimizers.Adagrad, 0.05), "Adagrad"),
    "adam": Row(functools.partial(optimizers.Adam, 0.01), "Adam"),
    "adamw": Row(functools.partial(optimizers.AdamW, 0.01), "AdamW"),
    "adamax": Row(functools.partial(optimizers.Adamax, 0.01), "Adamax"),
    "ftrl": Row(
        functools.partial(optimizers.Ftrl, 0.05),
        "Ftrl",
        float32_tolerance=FTRL_TOLERANCE,
    ),
    "lamb": Row(functools.partial(optimizers.Lamb, 0.01), "Lamb"),
    "lion": Row(functools.partial(optimizers.Lion, 0.005), "Lion"),
    "nadam": Row(functools.partial(optimizers.Nadam, 0.01), "Nadam"),
    "rmsprop": Row(functools.partial(optimizers.RMSprop, 0.003), "RMSprop"),
    "loss_scale_optimizer": Row(
        functools.partial(optimizers.Adam, 0.01),
        "LossScaleOptimizer(Adam)",
        scaling=Scaling(),
    ),
    "lars": Row(lars, "tfdp LARS"),
}
# Not every supported Keras has these.
if hasattr(optimizers, "Muon"):
    ROWS["muon"] = Row(muon, "Muon")
if hasattr(optimizers, "ScheduleFreeAdamW"):
    ROWS["schedule_free_adamw"] = Row(
        functools.partial(optimizers.ScheduleFreeAdamW, 0.01), "ScheduleFreeAdamW"
    )
if hasattr(optimizers, "MultiOptimizer"):
    ROWS["multi_optimizer"] = Row(multi_optimizer, "MultiOptimizer(SGD, Adam)")

# Values are not clipped to less, for that would blow up the rounding of what is left.
CLIPS = {"global_clipnorm": 0.1, "clipnorm": 0.01, "clipvalue": 0.05}
EMA = {"use_ema": True, "ema_momentum": 0.8}
COLUMNS = {
    "no_option": Column("plain"),
    "accumulation": Column("accumulation 4", accumulation=4),
    **{name: Column(name, {name: limit}) for name, limit in CLIPS.items()},
    "an_overflow_on_one_replica": Column(
        "loss scale, inf on one replica", scaling=Scaling(), overflows=True
    ),
    "ema": Column("EMA", EMA | {"ema_overwrite_frequency": 5}),
    "weight_decay": Column("weight decay", {"weight_decay": 0.3}, excludes=True),
    "a_partial_batch": Column("partial batch", is_partial=True),
    # Without overwriting, Keras puts the averages in place at the end.
    "everything": Column(
        "everything",
        EMA | {"global_clipnorm": CLIPS["global_clipnorm"]},
        accumulation=4,
        scaling=Scaling(),
    ),
}


def run_cell(
    env: Env, row: Row, column: Column, dtype: str, sharding: str = "none"
) -> dict:
    """Trains 12 updates; returns all that has been trained or counted."""
    with precision(dtype):
        x, y = _data(column)
        with env.scope():
            model = model_of.build_model()
            optimizer = _optimizer(env, row, column, model, sharding)
            # XLA would compile on one device only.
            model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
            # Built within `fit`, on one device Keras traces twice and starts the
            # slots of ScheduleFreeAdamW from zeros, not from the variables.
            optimizer.build(model.trainable_variables)
        common.fit(model, x, y, epochs=2 if column.is_partial else 1)
        env.read(optimizer.variables)  # alike on the local replicas, tfdp's own too
        shards = getattr(optimizer, "shards", None)
        assert env.is_reference or (shards is None) == (sharding == "none")
        state = model_of.read_state(env, model, _innermost(optimizer), shards)
        return state | _counters(env, optimizer, column, _num_batches(column))


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Makes all of Keras compute and keep its variables in a dtype."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def _num_batches(column: Column) -> int:
    """Batches of the training, those that are skipped included."""
    skipped = len(model_of.OVERFLOWS) if column.overflows else 0
    return (NUM_UPDATES + skipped) * column.accumulation


def _data(column: Column) -> tuple:
    num_batches = _num_batches(column)
    if column.is_partial:
        return model_of.without_rows_of_last_batch(
            *model_of.make_data(num_batches // 2)
        )
    x, y = model_of.make_data(num_batches)
    if column.overflows:
        model_of.plant_overflows(y)
    return x, y


def _optimizer(
    env: Env, row: Row, column: Column, model: keras.Model, sharding: str
) -> keras.Optimizer:
    """Plain Keras on one device, a `DistributedOptimizer` around it elsewhere."""
    options = dict(column.options)
    scaling = column.scaling or row.scaling
    if env.is_reference and column.accumulation > 1:
        options["gradient_accumulation_steps"] = column.accumulation
    optimizer = row.make(**options)
    if column.excludes:
        _exclude_from_decay(optimizer, model)
    if scaling and (env.is_reference or row.scaling):
        # Keras counts micro-batches, and tfdp updates.
        factor = column.accumulation if env.is_reference else 1
        optimizer = optimizers.LossScaleOptimizer(
            optimizer, scaling.initial, scaling.growth_steps * factor
        )
    if env.is_reference:
        return optimizer
    from tfdp.training.optimizer.distributed import DistributedOptimizer
    from tfdp.training.step.loss_scale import LossScaling

    loss_scale = None
    if scaling and not row.scaling:
        loss_scale = LossScaling(
            initial_scale=scaling.initial, growth_steps=scaling.growth_steps
        )
    return DistributedOptimizer(
        optimizer,
        accumulation_steps=column.accumulation,
        loss_scale=loss_scale,
        sharding=sharding,
    )


def _exclude_from_decay(optimizer: keras.Optimizer, model: keras.Model) -> None:
    """Excludes variables by name and one by itself."""
    factor = model.get_layer("scale").factor
    for inner in _innermost(optimizer):
        inner.exclude_from_weight_decay(
            var_list=[factor], var_names=["bias", "norm", "embedding"]
        )


def _innermost(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """The optimizers that update variables."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return list(getattr(optimizer, "optimizers", [optimizer]))


def _counters(
    env: Env, optimizer: keras.Optimizer, column: Column, num_batches: int
) -> dict:
    """The numbers of updates made and skipped, and the loss scale."""
    if env.is_reference:
        made = int(np.asarray(_innermost(optimizer)[0].iterations))
        skipped = num_batches // column.accumulation - made
        scale = getattr(optimizer, "dynamic_scale", None)
    else:
        made = int(np.asarray(optimizer.iterations))
        skipped = optimizer.skipped_steps
        scale = optimizer.loss_scale
    found: dict = {"updates": made, "skipped": skipped}
    if scale is not None:
        found["loss_scale"] = np.asarray(scale, "float32")
    return found


def cell_name(row: str, column: str, dtype: str, sharding: str = "none") -> str:
    """The name of the case of a cell, by the names of its row and column."""
    name = f"{row}_with_{column}_in_{dtype}"
    return name if sharding == "none" else f"{name}_and_sharded_{sharding}"


# Each column on every set-up, each row on some.
COVERING = {
    cell_name("adamw", "no_option", "float32"): registry.ALL,
    cell_name("sgd_momentum", "accumulation", "float64"): registry.ALL,
    cell_name("adam", "global_clipnorm", "float32"): registry.ALL,
    cell_name("rmsprop", "clipnorm", "float32"): registry.ALL,
    cell_name("adagrad", "clipvalue", "float64"): registry.ALL,
    cell_name("sgd_nesterov", "an_overflow_on_one_replica", "float32"): registry.ALL,
    cell_name("adamax", "ema", "float32"): registry.ALL,
    cell_name("lion", "weight_decay", "float64"): registry.ALL,
    cell_name("sgd", "a_partial_batch", "float64"): registry.ALL,
    cell_name("loss_scale_optimizer", "everything", "float32"): registry.ALL,
    cell_name("adadelta", "ema", "float64"): ("mirrored",),
    cell_name("adafactor", "weight_decay", "float32"): ("mirrored",),
    cell_name("ftrl", "clipnorm", "float32"): ("mirrored",),
    cell_name("lamb", "global_clipnorm", "float32"): ("two_workers",),
    cell_name("lars", "a_partial_batch", "float32"): ("two_workers",),
    cell_name("nadam", "accumulation", "float32"): ("mirrored",),
    cell_name("muon", "an_overflow_on_one_replica", "float64"): ("mirrored",),
    cell_name("schedule_free_adamw", "clipvalue", "float32"): ("mirrored",),
    cell_name("multi_optimizer", "everything", "float32"): ("mirrored",),
}
# The same with sharded state, each column on some set-up, each way of sharding on every
# one: by row, the column, dtype, what is sharded, and where.
_SHARDED = {
    "adafactor": ("no_option", "float32", "gradients", "two_by_two"),
    "schedule_free_adamw": ("accumulation", "float32", "optimizer", "two_workers"),
    "muon": ("global_clipnorm", "float32", "gradients", "two_workers"),
    "rmsprop": ("clipnorm", "float64", "optimizer", "mirrored"),
    "adagrad": ("clipvalue", "float32", "optimizer", "mirrored"),
    "ftrl": ("an_overflow_on_one_replica", "float32", "optimizer", "two_workers"),
    "adamax": ("ema", "float32", "optimizer", "two_by_two"),
    "lion": ("weight_decay", "float32", "gradients", "mirrored"),
    "sgd": ("a_partial_batch", "float32", "gradients", "two_by_two"),
    "multi_optimizer": ("everything", "float64", "gradients", "two_workers"),
}
# And with sharded parameters.
_SHARDED_PARAMETERS = {
    "adamw": ("no_option", "float64", "two_by_two"),
    "adam": ("global_clipnorm", "float32", "two_workers"),
    "sgd_momentum": ("accumulation", "float32", "mirrored"),
    "schedule_free_adamw": ("an_overflow_on_one_replica", "float32", "two_by_two"),
    "muon": ("clipnorm", "float32", "mirrored"),
    "lamb": ("clipvalue", "float32", "two_by_two"),
    "adamax": ("ema", "float32", "two_workers"),
    "lion": ("weight_decay", "float64", "mirrored"),
    "sgd": ("a_partial_batch", "float32", "two_workers"),
    "multi_optimizer": ("everything", "float32", "mirrored"),
}
COVERING |= {
    cell_name(row, column, dtype, sharding): (setup_name,)
    for row, (column, dtype, sharding, setup_name) in _SHARDED.items()
}
COVERING |= {
    cell_name(row, column, dtype, "parameters"): (setup_name,)
    for row, (column, dtype, setup_name) in _SHARDED_PARAMETERS.items()
}
# Of these the quick tier runs two; "everything" accumulates, clips by the global norm,
# averages and scales the loss.
QUICK = {
    "clipvalue": cell_name("adagrad", "clipvalue", "float32", "optimizer"),
    "everything": cell_name("loss_scale_optimizer", "everything", "float32"),
}
# By column, the quick case that shows the same.
SAME_AS = QUICK | {
    "no_option": "mlp_with_adamw",
    "weight_decay": "mlp_with_adamw",
    "ema": QUICK["everything"],
    "a_partial_batch": "partial_batches_of_sharded_state",
    "clipnorm": "odd_variables_with_lamb_in_stage_2",
    "accumulation": QUICK["everything"],
    "global_clipnorm": QUICK["everything"],
    "an_overflow_on_one_replica": "overflow_on_last_replica_skips_the_step_everywhere",
}


def _register(row_name: str, column_name: str, dtype: str, sharding: str) -> None:
    row, column = ROWS[row_name], COLUMNS[column_name]
    name = cell_name(row_name, column_name, dtype, sharding)
    same_as = SAME_AS[column_name]

    def function(env: Env) -> dict:
        return run_cell(env, row, column, dtype, sharding)

    registry.register(
        name,
        function,
        f"{row.title}: {column.title}, sharding: {sharding}",
        setups=_setups(row_name, column_name, dtype, sharding),
        same_as="" if name == same_as else same_as,
        tol=row.tolerance(dtype),
    )


def _setups(row: str, column: str, dtype: str, sharding: str) -> tuple[str, ...]:
    """The covering set-ups, and one for each row with each column and sharding.

    Dtypes and set-ups take turns, so that each row and each column sees all pairs of
    them. `tools/exactness` runs all cells on all set-ups, which takes hours.
    """
    turn = sum(
        list(names).index(name)
        for name, names in ((row, ROWS), (column, COLUMNS), (sharding, SHARDINGS))
    )
    covering = COVERING.get(cell_name(row, column, dtype, sharding), ())
    if dtype != DTYPES[turn % len(DTYPES)]:
        return covering
    return tuple(dict.fromkeys([*covering, registry.ALL[turn % len(registry.ALL)]]))


CELLS = list(itertools.product(ROWS, COLUMNS, DTYPES, SHARDINGS))
for _cell in CELLS:
    _register(*_cell)


@registry.case("Every limit on gradients bites", setups=(), compare=False)
def limits_of_the_matrix_bite(env: Env) -> dict:
    """Compares each limit with the gradients before and after a training."""
    x, y = _data(COLUMNS["no_option"])
    for name, limit in CLIPS.items():
        keras.utils.set_random_seed(SEED)
        model = model_of.build_model()
        optimizer = ROWS["sgd_momentum"].make(**{name: limit})
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
        _check_limit(model, x, y, name, limit)
        common.fit(model, x, y)
        _check_limit(model, x, y, name, limit)
    return {}


def _check_limit(
    model: keras.Model, x: list, y: np.ndarray, name: str, limit: float
) -> None:
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    gradients = [
        tf.convert_to_tensor(gradient)
        for gradient in tape.gradient(loss, model.trainable_variables)
    ]
    if name == "global_clipnorm":
        assert tf.linalg.global_norm(gradients) > 2 * limit
        return
    measure = tf.norm if name == "clipnorm" else lambda g: tf.reduce_max(abs(g))
    for gradient, variable in zip(gradients, model.trainable_variables, strict=True):
        assert measure(gradient) > 2 * limit, f"{name}: {variable.path}"
