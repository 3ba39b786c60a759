"""Run one program: KIND PROGRAM FOLDER, see `Bed`; results go to FOLDER by rank."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tests.docs.published.bed import NUM_REPLICAS, Bed
from tests.harness.results import flatten_results


def main(kind: str, program: str, folder: str) -> None:
    if kind == "devices":
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS
        tf.config.set_logical_device_configuration(cpu, logical)
    os.chdir(folder)
    keras.config.set_floatx("float64")
    bed = Bed(kind, Path(folder))
    keras.utils.set_random_seed(1)
    module = importlib.import_module(f"tests.docs.published.{program}")
    results = flatten_results(module.main(bed))
    np.savez(Path(folder) / f"results-{bed.rank}.npz", **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
