"""Latency per image of a trained model, in plain Keras.

    python examples/serve_latency.py cifar-output/checkpoints

Opens what cifar_resnet.py has saved (a file, or the newest of a folder) and needs
nothing of what trained it: neither tfdp nor the other workers.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import keras
import numpy as np

BATCH_SIZES = (1, 32)
WARMUP_CALLS = 5  # the first one traces


def find(path: Path) -> Path:
    """The checkpoint, or the last of a folder of checkpoints."""
    found = sorted(path.glob("*.keras")) if path.is_dir() else [path]
    if not found or not found[-1].is_file():
        raise ValueError(f"There is no saved model here. Received: {path}")
    return found[-1]


def load(path: Path) -> keras.Model:
    try:
        return keras.saving.load_model(path, compile=False)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"Keras cannot open the model ({first_line}). Received: {path}"
        ) from error


def seconds_per_image(
    model: keras.Model, batch_size: int, num_calls: int
) -> np.ndarray:
    """The time of each call over its images: [num_calls]."""
    shape = (batch_size, *model.input_shape[1:])
    images = np.random.default_rng(0).integers(0, 256, shape).astype("float32")
    times = []
    for _ in range(WARMUP_CALLS + num_calls):
        begin = time.perf_counter()
        model.predict_on_batch(images)
        times.append((time.perf_counter() - begin) / batch_size)
    return np.array(times[WARMUP_CALLS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="file, or folder of files")
    parser.add_argument("--calls", type=int, default=100, help="of each batch size")
    args = parser.parse_args()
    if args.calls < 1:
        parser.error(f"--calls must be at least 1. Received: {args.calls}")
    try:
        path = find(args.checkpoint)
        model = load(path)
    except ValueError as error:
        sys.exit(f"serve_latency.py: error: {error}")
    print(f"{path.name}: {model.count_params():,} parameters")
    for batch_size in BATCH_SIZES:
        times = seconds_per_image(model, batch_size, args.calls)
        median, p95, p99 = 1000 * np.percentile(times, (50, 95, 99))
        print(
            f"batch {batch_size:2}: {median:.3f} ms per image "
            f"(p95 {p95:.3f}, p99 {p99:.3f})"
        )


if __name__ == "__main__":
    main()
