"""The table of all functions of Keras and TensorFlow that tfdp replaces."""

from tfdp.keras_hooks.trainer_hooks import install as install
