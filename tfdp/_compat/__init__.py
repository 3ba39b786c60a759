"""Access to private names of TensorFlow and Keras, the only room with it."""

from tfdp._compat.keras_optimizer import *  # noqa: F403
