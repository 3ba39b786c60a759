"""Saving takes less memory than a bucket of gradients, however large the model is.

A save in the background takes a copy, too, once for all saves.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import forks
from tests.harness.tf_config import cluster_configs
from tests.harness.tiers import full

CLEAR = "/proc/self/clear_refs"
DEADLINE_SECONDS = 120
BUCKET_MB = tfdp.CommunicationOptions().bucket_mb
WIDTHS = (1024, 2048, 2048, 2048, 1024)
# 12.6 million parameters in four buckets: 48 MB, and as much for each kind of slot.
LARGEST_MB = 16
# Code that is loaded at its first use, and what the allocator keeps.
SLACK_MB = 8
_M_MMAP_THRESHOLD = -3  # of malloc.h

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not os.path.exists(CLEAR), reason="needs the /proc of Linux"),
]


def rise_mb(action: Callable[[], object]) -> float:
    """By how much the memory of this process rises above what it is now.

    The least of three times: what else happens in the process only adds to it.
    """
    return min(_rise_once(action) for _ in range(3))


def _rise_once(action: Callable[[], object]) -> float:
    gc.collect()
    # What is free but not given back would hide what the action takes.
    ctypes.CDLL(None).malloc_trim(0)
    before = status_mb("VmRSS")
    with open(CLEAR, "w", encoding="ascii") as file:
        file.write("5")  # the peak is counted from here
    action()
    return status_mb("VmHWM") - before


def status_mb(field: str) -> float:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) / 1024


def saved(directory: str, name: str, sharding: str) -> dict:
    """In a process of its own: trains and saves, and what that took."""
    # What is freed is given back at once: glibc would keep some of it, more or less.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    strategy = tfdp.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(width, use_bias=False) for width in WIDTHS[1:]]
        model = keras.Sequential([keras.Input((WIDTHS[0],)), *layers])
        optimizer = tfdp.DistributedOptimizer(
            getattr(keras.optimizers, name)(0.001),
            accumulation_steps=2,
            sharding=sharding,
        )
        model.compile(optimizer, "mse", jit_compile=False)

    def train(num_batches: int) -> None:
        x = np.ones((2 * num_batches, WIDTHS[0]), "float32")
        y = np.zeros((2 * num_batches, WIDTHS[-1]), "float32")
        model.fit(x, y, batch_size=2, verbose=0)

    def save() -> None:
        tfdp.checkpoint.save(model, directory)

    def save_in_background() -> None:
        tfdp.checkpoint.save(model, directory, background=True).wait()

    train(2)
    rises = {"between updates": rise_mb(save)}
    save_in_background()
    # The first save has taken the memory of a copy, which the next ones use again.
    rises["in the background"] = rise_mb(save_in_background)
    train(1)
    assert optimizer.accumulated_steps == 1
    rises["before an update"] = rise_mb(save)
    tfdp.checkpoint.restore(model, directory)
    rises["after restoring"] = rise_mb(save)
    assert len(optimizer.shards.buckets) >= 4
    return rises


# Where no slices are accumulated, each replica has a sum of its own for every weight,
# and these are summed, one after the other.
@pytest.mark.parametrize(
    ("name", "sharding", "more_mb"),
    [
        full("Adam", "optimizer", 2 * LARGEST_MB),
        full("Lamb", "gradients", 0),
    ],
)
def test_saving_takes_less_memory_than_one_bucket(tmp_path, name, sharding, more_mb):
    starts = [
        forks.Start(
            saved,
            config,
            {"directory": str(tmp_path), "name": name, "sharding": sharding},
        )
        for config in cluster_configs(2)
    ]
    for answer in forks.run(starts, DEADLINE_SECONDS):
        assert answer.text == ""
        rises = answer.value
        for kind in ("between updates", "in the background"):
            assert rises.pop(kind) <= BUCKET_MB + SLACK_MB, (kind, rises)
        assert max(rises.values()) <= BUCKET_MB + more_mb + SLACK_MB, rises
