"""What compressed gradients cost in quality: held-out losses after as many steps."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.report import Arguments, Figure, Report

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_REPLICAS, SEEDS = 4, (1, 2, 3)
# The loss relative to that without compression, by the mean over the seeds.
GOALS = {"int8": 1.01, "PowerSGD": 1.01}
DIGITS_EPOCHS, DIGITS_BATCH, DIGITS_STEPS = 15, 64, 330
CHARACTERS, WIDTH, BLOCKS, STEPS, CHARACTERS_BATCH = 400_000, 64, 2, 300, 64


def run(args: Arguments) -> None:
    """Train every model with every compression, from each seed."""
    import tfdp.testing

    devices = tfdp.testing.logical_cpus(NUM_REPLICAS)
    setting = {
        "benchmark": f"held-out loss on {NUM_REPLICAS} replicas of one process, after "
        "as many steps, all buckets compressed",
        "seeds": ", ".join(map(str, SEEDS)),
        "digits": f"examples/digits_cnn.py, {DIGITS_EPOCHS} epochs of batches of "
        f"{DIGITS_BATCH}",
        "characters": f"examples/char_transformer.py, {BLOCKS} blocks of width "
        f"{WIDTH}, {STEPS} steps of batches of {CHARACTERS_BATCH}",
    }
    report = Report(args, setting)
    for model in args.models:
        _measure(report, model, devices)
    report.finish()


def _measure(report: Report, model: str, devices: list[str]) -> None:
    """Train a model by all arms, and report the means over the seeds."""
    train, num_steps = TRAINERS[model]
    plain: list[float] = []
    for name, options in _arms(num_steps).items():
        losses = [train(_strategy(devices, options), seed) for seed in SEEDS]
        report.keep("losses", f"{model}: {name}", losses)
        plain = plain or losses
        report.add(
            Figure(
                f"{model}, {name}: held-out loss relative to none's, mean of seeds",
                round(float(np.mean(losses) / np.mean(plain)), 4),
                at_most=GOALS.get(name),
                note=", ".join(f"{loss:.4f}" for loss in losses),
            )
        )


def _arms(num_steps: int) -> dict[str, dict[str, Any]]:
    """Options of the communication, by name."""
    from tfdp.compression import BlockQuantized, PowerSGD, TopK

    compressions = {
        "int8": "int8",
        "PowerSGD": PowerSGD(rank=4, start_step=num_steps // 10),
        "int4": BlockQuantized(bits=4),
        "TopK": TopK(ratio=0.05),
    }
    return {
        "none": {},
        # How much a loss differs for no other reason than rounding in another order.
        "none, added up in another order": {"algorithm": "tree"},
        **{name: {"compression": given} for name, given in compressions.items()},
    }


def _strategy(devices: list[str], options: dict[str, Any]) -> Any:
    import tfdp

    # So slow that every bucket is compressed that can be.
    slow = tfdp.Links(tfdp.Link(0.0, 1.0), tfdp.Link(0.0, 1.0))
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


def _digits(strategy: Any, seed: int) -> float:
    import keras

    example = _example("digits_cnn")
    keras.utils.set_random_seed(seed)
    train, test = example.load_data()
    with strategy.scope():
        model = example.build_model()
        example.compile_model(model, num_steps=DIGITS_STEPS)
    model.fit(*train, batch_size=DIGITS_BATCH, epochs=DIGITS_EPOCHS, verbose=0)
    return _held_out_loss(model, *test)


def _characters(strategy: Any, seed: int) -> float:
    import keras
    import tensorflow as tf

    example = _example("char_transformer")
    keras.utils.set_random_seed(seed)
    text, held_out = example.load_text(CHARACTERS)
    train, ids = example.to_ids(text), example.to_ids(held_out)
    data = tf.data.Dataset.from_tensor_slices(example.windows(train))
    data = data.shuffle(len(train) // example.CONTEXT, seed=seed).repeat()
    data = data.batch(CHARACTERS_BATCH, drop_remainder=True)
    with strategy.scope():
        model = example.build_model(WIDTH, BLOCKS)
        example.compile_model(model, STEPS)
    model.fit(data, epochs=1, steps_per_epoch=STEPS, shuffle=False, verbose=0)
    x, y = example.windows(ids)
    whole = len(x) // CHARACTERS_BATCH * CHARACTERS_BATCH
    return _held_out_loss(model, x[:whole], y[:whole])


def _held_out_loss(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    import tensorflow as tf

    results = model.evaluate(x, y, batch_size=64, verbose=0, return_dict=True)
    tf.keras.backend.clear_session()
    gc.collect()
    return float(results["loss"])


# Each model's training, and the number of its steps.
TRAINERS: dict[str, tuple[Callable[[Any, int], float], int]] = {
    "digits": (_digits, DIGITS_STEPS),
    "characters": (_characters, STEPS),
}
MODELS = tuple(TRAINERS)
