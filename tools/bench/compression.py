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
MODELS = ("digits", "characters")
# The loss relative to that without compression, by the mean over the seeds.
GOALS = {"int8": 1.01, "PowerSGD": 1.01}
DIGITS_EPOCHS, DIGITS_BATCH = 15, 64
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
    trainers: dict[str, Callable] = {"digits": _digits, "characters": _characters}
    for model in args.models:
        plain: list[float] = []
        for name, compression in _compressions().items():
            losses = [
                trainers[model](_strategy(tfdp, devices, compression), seed)
                for seed in SEEDS
            ]
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
    report.finish()


def _compressions() -> dict[str, Any]:
    from tfdp.compression import BlockQuantized, PowerSGD, TopK

    return {
        "none": None,
        "int8": "int8",
        "int4": BlockQuantized(bits=4),
        "PowerSGD": PowerSGD(rank=4),
        "TopK": TopK(ratio=0.05),
    }


def _strategy(tfdp: Any, devices: list[str], compression: Any) -> Any:
    # So slow that every bucket is compressed that can be.
    slow = tfdp.Links(tfdp.Link(0.0, 1.0), tfdp.Link(0.0, 1.0))
    options = tfdp.CommunicationOptions(compression=compression, links=slow)
    return tfdp.MirroredStrategy(devices, communication=options)


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
        steps = DIGITS_EPOCHS * (example.TRAIN_IMAGES // DIGITS_BATCH)
        example.compile_model(model, num_steps=steps)
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
