"""A small GPT-style character model on the text of Python's own standard library.

    tfdp run -n 2 examples/char_transformer.py

Training takes a few minutes on 2 CPU cores (`--short`: under a minute) and ends
with the loss on held-out files, a bigram model's loss on the same characters, and
a sample of what the model writes.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdp

SEED = 7
VOCABULARY = 128  # the ASCII codes
CONTEXT = 64  # characters that the model sees
HELD_OUT_EVERY = 20  # one file in 20 is held out
HELD_OUT_CHARACTERS = 200_000


def load_text(max_characters: int) -> tuple[str, str]:
    """Training and held-out text: the same on every worker with the same Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    skipped = ("site-packages/", "test/", "idlelib/", "lib2to3/")
    paths = [p for p in paths if not p.startswith(skipped) and "/test" not in p]
    train, held_out = "", ""
    for number, path in enumerate(paths):
        text = (root / path).read_text("utf-8", errors="ignore")
        text = text.encode("ascii", errors="ignore").decode("ascii")
        text = text.replace("    ", "\t")  # or half of the context is indentation
        if number % HELD_OUT_EVERY == 0:
            held_out += text
        elif len(train) < max_characters:
            train += text
    return train[:max_characters], held_out[:HELD_OUT_CHARACTERS]


def to_ids(text: str) -> np.ndarray:
    """One id per character: its ASCII code."""
    return np.frombuffer(text.encode("ascii"), dtype=np.uint8).astype("int32")


def to_text(ids: Iterable[int]) -> str:
    return "".join(map(chr, ids)).replace("\t", "    ")


def windows(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and, one character further on, targets: [num_windows, CONTEXT] each."""
    num_windows = (len(ids) - 1) // CONTEXT
    size = num_windows * CONTEXT
    return (
        ids[:size].reshape(num_windows, CONTEXT),
        ids[1 : size + 1].reshape(num_windows, CONTEXT),
    )


def bigram_loss(train: np.ndarray, targets_from: np.ndarray) -> float:
    """Cross-entropy, in nats, of guessing each character from the one before it."""
    counts = np.full((VOCABULARY, VOCABULARY), 0.1)  # smoothing
    np.add.at(counts, (train[:-1], train[1:]), 1)
    probabilities = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log(probabilities[targets_from[:-1], targets_from[1:]]).mean())


class TokenAndPosition(keras.layers.Layer):
    """Learned embeddings of the characters plus learned ones of the positions."""

    def __init__(self, width: int):
        super().__init__()
        self.tokens = keras.layers.Embedding(VOCABULARY, width)
        self.positions = keras.layers.Embedding(CONTEXT, width)

    def build(self, input_shape):
        self.tokens.build(input_shape)
        self.positions.build((CONTEXT,))

    def call(self, ids):
        # [batch, CONTEXT, width] + [CONTEXT, width]
        return self.tokens(ids) + self.positions(keras.ops.arange(CONTEXT))


def block(x, width: int, num_heads: int):
    """A pre-norm transformer block."""
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.MultiHeadAttention(num_heads, width // num_heads)(
        y, y, use_causal_mask=True
    )
    x = keras.layers.Add()([x, y])
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.Dense(4 * width, activation="gelu")(y)
    y = keras.layers.Dense(width)(y)
    return keras.layers.Add()([x, y])


def build_model(width: int, num_blocks: int, num_heads: int = 4) -> keras.Model:
    ids = keras.Input((CONTEXT,), dtype="int32")
    x = TokenAndPosition(width)(ids)
    for _ in range(num_blocks):
        x = block(x, width, num_heads)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(ids, keras.layers.Dense(VOCABULARY)(x))


def compile_model(model: keras.Model, num_steps: int) -> None:
    warmup_steps = max(1, num_steps // 10)
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=4e-3,
        warmup_steps=warmup_steps,
        decay_steps=max(1, num_steps - warmup_steps),
        alpha=0.05,
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(schedule, weight_decay=0.01, beta_2=0.98),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def sample(weights: list, sizes: tuple[int, int], prompt: np.ndarray, length: int):
    """Text that the model writes after `prompt`, which fills the context.

    It runs in a copy of the model outside the strategy's scope, so that the chief
    can sample alone: nothing here waits for the other workers.
    """
    model = build_model(*sizes)
    model.set_weights(weights)
    next_logits = tf.function(lambda ids: model(ids, training=False)[0, -1])
    generator = np.random.default_rng(SEED)
    temperature = 0.7
    ids = [int(i) for i in prompt]
    for _ in range(length):
        logits = next_logits(tf.constant([ids[-CONTEXT:]])).numpy() / temperature
        probabilities = np.exp(logits - logits.max(), dtype="float64")
        probabilities /= probabilities.sum()
        ids.append(int(generator.choice(VOCABULARY, p=probabilities)))
    return to_text(ids[len(prompt) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64, help="global")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="a few steps, for CI")
    parser.add_argument(
        "--logs", default="", help="where to write what communication takes"
    )
    args = parser.parse_args()
    if args.short:
        args.steps, args.width, args.blocks = min(args.steps, 150), 64, 2

    strategy = tfdp.auto_strategy()
    keras.utils.set_random_seed(SEED)  # the same on every worker
    text, held_out_text = load_text(400_000 if args.short else 4_000_000)
    train, held_out = to_ids(text), to_ids(held_out_text)
    # The seed makes all workers shuffle alike; each then reads its own share.
    dataset = tf.data.Dataset.from_tensor_slices(windows(train))
    dataset = dataset.shuffle(len(train) // CONTEXT, seed=SEED).repeat()
    dataset = dataset.batch(args.batch_size, drop_remainder=True)
    x_held_out, y_held_out = windows(held_out)
    whole_batches = len(x_held_out) // args.batch_size * args.batch_size
    validation = (x_held_out[:whole_batches], y_held_out[:whole_batches])

    sizes = (args.width, args.blocks)
    with strategy.scope():
        model = build_model(*sizes)
        compile_model(model, args.steps)

    epochs = 5
    steps_per_epoch = max(1, args.steps // epochs)
    callbacks: list[keras.callbacks.Callback] = []
    if args.logs:
        callbacks = [
            tfdp.callbacks.CommunicationMonitor(args.logs),
            tfdp.callbacks.Timeline(Path(args.logs) / "timeline.json"),
        ]
    fitted = model.fit(
        dataset,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        shuffle=False,
        callbacks=callbacks,
    )
    history = fitted.history["loss"]
    # All workers evaluate, the chief tells.
    loss = model.evaluate(*validation, batch_size=args.batch_size, verbose=0)
    if not strategy.extended.should_checkpoint:
        return
    prompt = held_out[:CONTEXT]
    print("--- sample, written after", repr(to_text(prompt)))
    print(sample(model.get_weights(), sizes, prompt, length=100 if args.short else 500))
    print("---")
    print(f"training loss: from {history[0]:.3f} to {history[-1]:.3f} nats")
    print(f"held-out loss: {loss:.3f} nats per character")
    bigram = bigram_loss(train, held_out[: whole_batches * CONTEXT + 1])
    print(f"bigram's loss: {bigram:.3f} nats per character")


if __name__ == "__main__":
    main()
