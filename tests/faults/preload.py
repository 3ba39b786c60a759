"""What every worker of a fault job imports, once for all of them."""

import os

os.environ.update(
    KERAS_BACKEND="tensorflow", CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="2"
)

import keras  # noqa: F401
import tensorflow as tf  # noqa: F401

import tests.faults.worker  # noqa: F401
import tfdp.callbacks
import tfdp.checkpoint  # noqa: F401
