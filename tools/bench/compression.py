"""What fewer bytes cost in quality: held-out losses after as many steps."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.report import Arguments, Figure, Report

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_REPLICAS = 4
# Rounding in another order changes a loss by percents: hence so many seeds.
DIGITS_BATCH, DIGITS_STEPS, DIGITS_SEEDS = 64, 400, range(1, 41)
# With so many steps a loss differs more by the order of adding up, but outer steps are
# enough for what they do to be seen.
MORE_DIGITS_STEPS = 1500
CHARACTERS, WIDTH, BLOCKS, STEPS, CHARACTERS_BATCH = 2_000_000, 64, 2, 5000, 32
CHARACTERS_SEEDS = range(1, 4)
SYNC_EVERY = 50
WARMUP_SHARE = 10  # of the examples' learning rates
PLAIN = "none"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to send less.

    Args:
        options: Dict, of the communication.
        callbacks: Callable that makes the callbacks of `fit`. Defaults to none.
        at_most: Float or `None`, the goal: loss relative to that of `PLAIN`.
        sync_every: Int, updates from one exchange to the next. Defaults to 1.
        plain_steps: Int, updates at the beginning that nothing is left out of.
            Defaults to 0.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    at_most: float | None = None
    sync_every: int = 1
    plain_steps: int = 0

    def share_of_bytes(self, share: float, num_steps: int) -> float:
        """The share of the bytes of a run, given that of an exchange."""
        plain = self.plain_steps / num_steps
        return plain + (1 - plain) * share / self.sync_every


def run(args: Arguments) -> None:
    """Train every model with every variant, from each seed."""
    import tfdp.testing

    devices = tfdp.testing.logical_cpus(NUM_REPLICAS)
    setting = {
        "benchmark": f"held-out loss on {NUM_REPLICAS} replicas of one process, after "
        "as many steps, all buckets compressed",
        "digits model": f"examples/digits_cnn.py, {DIGITS_STEPS} steps of batches of "
        f"{DIGITS_BATCH}, or {MORE_DIGITS_STEPS}, {len(DIGITS_SEEDS)} seeds",
        "characters model": f"examples/char_transformer.py, {BLOCKS} blocks of width "
        f"{WIDTH}, {STEPS} steps of batches of {CHARACTERS_BATCH}, "
        f"{len(CHARACTERS_SEEDS)} seeds",
    }
    report = Report(args, setting)
    for model in args.models:
        _measure(report, model, devices)
    report.finish()


def _measure(report: Report, model: str, devices: list[str]) -> None:
    """Train a model by all variants, and report the means over the seeds."""
    training = TRAININGS[model]
    plain: list[float] = []
    plain_bytes = 0
    for name, variant in _variants(training).items():
        runs = [
            training.run(
                _strategy(devices, variant.options), variant, seed, training.num_steps
            )
            for seed in training.seeds
        ]
        losses = [run.loss for run in runs]
        plain, plain_bytes = plain or losses, plain_bytes or runs[0].wire_bytes
        share = runs[0].wire_bytes / plain_bytes
        share = variant.share_of_bytes(share, training.num_steps)
        report.keep(model, name, {"losses": losses, "share_of_bytes": share})
        ratio, error = ratio_of_means(losses, plain)
        report.add(
            Figure(
                f"{model}, {name}: held-out loss relative to {PLAIN}'s, mean of seeds",
                round(ratio, 4),
                at_most=variant.at_most,
                note=f"standard error {error:.4f}; {share:.3f} of the bytes",
            )
        )


def ratio_of_means(losses: Sequence[float], plain: Sequence[float]) -> tuple:
    """Compare the means of losses that belong together, seed by seed.

    Args:
        losses: Sequence of floats, by seed.
        plain: Sequence of floats, to compare with.

    Returns:
        Tuple of the ratio of the means, and its standard error.

    Example:

    >>> ratio_of_means([1.0, 3.0], [1.0, 1.0])
    (2.0, 1.0)

    Source: Cochran 1977, "Sampling Techniques", section 6.4, the ratio estimate.
    """
    own, other = np.array(losses), np.array(plain)
    ratio = own.mean() / other.mean()
    error = (own - ratio * other).std(ddof=1) / np.sqrt(len(own)) / other.mean()
    return float(ratio), float(error)


def _variants(training: Training) -> dict[str, Variant]:
    """The variants, by name."""
    outer = {
        "DiLoCo": _outer(*training.outer, at_most=training.outer_at_most),
        "DiLoCo, int8": _outer(*training.outer, compression="int8"),
    }
    plain = {PLAIN: Variant()}
    if training.is_for_outer:
        return plain | outer
    return plain | _compressed(training.num_steps) | outer


def _compressed(num_steps: int) -> dict[str, Variant]:
    """The variants that exchange gradients in each step."""
    from tfdp.compression import BlockQuantized, TopK

    return {
        # How much a loss differs for no other reason than rounding in another order.
        "none, as a tree": Variant({"algorithm": "tree"}),
        "bf16": Variant({"compression": "bf16"}),
        "int8": Variant({"compression": "int8"}, at_most=1.01),
        "int4": Variant({"compression": BlockQuantized(bits=4)}),
        "PowerSGD, rank 16": _low_rank(16, num_steps),
        "PowerSGD, rank 4": _low_rank(4, num_steps, at_most=1.01),
        "PowerSGD, rank 1": _low_rank(1, num_steps),
        "TopK": Variant({"compression": TopK(ratio=0.05)}),
    }


def _low_rank(rank: int, num_steps: int, at_most: float | None = None) -> Variant:
    from tfdp.compression import PowerSGD

    # The warmup of the learning rate is over then.
    start = num_steps // WARMUP_SHARE
    compression = PowerSGD(rank=rank, start_step=start)
    return Variant({"compression": compression}, at_most=at_most, plain_steps=start)


def _outer(
    learning_rate: float,
    momentum: float,
    *,
    compression: str | None = None,
    at_most: float | None = None,
) -> Variant:
    """DiLoCo, by Nesterov's SGD outside."""
    import keras

    from tfdp.callbacks import DiLoCo

    def callbacks() -> list[Any]:
        outer = keras.optimizers.SGD(learning_rate, momentum=momentum, nesterov=True)
        return [DiLoCo(SYNC_EVERY, outer, scope="replica", compression=compression)]

    # No gradients travel; the strategy's plan counts the bytes of what does instead.
    return Variant(
        {"compression": compression}, callbacks, at_most, sync_every=SYNC_EVERY
    )


def _strategy(devices: list[str], options: dict[str, Any]) -> Any:
    import tfdp

    # So slow that every bucket is compressed that can be.
    slow = tfdp.options.Links(tfdp.options.Link(0.0, 1.0), tfdp.options.Link(0.0, 1.0))
    return tfdp.MirroredStrategy(
        devices,
        communication=tfdp.CommunicationOptions(
            **{"algorithm": "ring", **options}, links=slow
        ),
    )


def _example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class _Run:
    """The held-out loss of a run, and the bytes that a replica sends to reduce once."""

    loss: float
    wire_bytes: int


def _digits(strategy: Any, variant: Variant, seed: int, num_steps: int) -> _Run:
    import keras
    import tensorflow as tf

    example = _example("digits_cnn")
    keras.utils.set_random_seed(seed)
    (x, y), test = example.load_data()
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed)
    with strategy.scope():
        model = example.build_model()
        example.compile_model(model, num_steps)
    _train(model, data, DIGITS_BATCH, num_steps, variant)
    return _result(strategy, model, *test)


def _characters(strategy: Any, variant: Variant, seed: int, num_steps: int) -> _Run:
    import keras
    import tensorflow as tf

    example = _example("char_transformer")
    keras.utils.set_random_seed(seed)
    text, held_out = example.load_text(CHARACTERS)
    train, ids = example.to_ids(text), example.to_ids(held_out)
    data = tf.data.Dataset.from_tensor_slices(example.windows(train))
    data = data.shuffle(len(train) // example.CONTEXT, seed=seed)
    with strategy.scope():
        model = example.build_model(WIDTH, BLOCKS)
        example.compile_model(model, num_steps)
    _train(model, data, CHARACTERS_BATCH, num_steps, variant)
    x, y = example.windows(ids)
    whole = len(x) // CHARACTERS_BATCH * CHARACTERS_BATCH
    return _result(strategy, model, x[:whole], y[:whole])


def _train(model: Any, data: Any, batch: int, num_steps: int, variant: Variant) -> None:
    """Make all steps in one epoch, at whose end variants may meet once more."""
    data = data.repeat().batch(batch, drop_remainder=True)
    model.fit(
        data,
        steps_per_epoch=num_steps,
        shuffle=False,
        verbose=0,
        callbacks=variant.callbacks(),
    )


def _result(strategy: Any, model: Any, x: np.ndarray, y: np.ndarray) -> _Run:
    import tensorflow as tf

    results = model.evaluate(x, y, batch_size=64, verbose=0, return_dict=True)
    wire_bytes = strategy.communication_plan(model).wire_bytes
    tf.keras.backend.clear_session()
    gc.collect()
    return _Run(float(results["loss"]), wire_bytes)


@dataclasses.dataclass(frozen=True)
class Training:
    """How a model is trained.

    Args:
        run: Callable that trains it by a variant, from a seed, for so many steps.
        num_steps: Int.
        seeds: Range, of which each variant has a run.
        outer: Tuple of floats, rate and momentum of the outer steps of `DiLoCo`, whose
            own momentum of 0.9 is one for hundreds of them.
        outer_at_most: Float or `None`, the goal of `DiLoCo`. Defaults to `None`.
        is_for_outer: Bool, whether only the variants of `DiLoCo` are of interest.
            Defaults to `False`.
    """

    run: Callable[[Any, Variant, int, int], _Run]
    num_steps: int
    seeds: range
    outer: tuple[float, float]
    outer_at_most: float | None = None
    is_for_outer: bool = False


TRAININGS = {
    "digits": Training(_digits, DIGITS_STEPS, DIGITS_SEEDS, (1.0, 0.5)),
    "digits-longer": Training(
        _digits,
        MORE_DIGITS_STEPS,
        DIGITS_SEEDS,
        (1.0, 0.5),
        outer_at_most=1.02,
        is_for_outer=True,
    ),
    "characters": Training(
        _characters, STEPS, CHARACTERS_SEEDS, (0.7, 0.7), outer_at_most=1.02
    ),
}
MODELS = tuple(TRAININGS)
